"""The real `transformers serve`: it takes and gives text alone, so that it is refused before anything is asked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress

import pytest

from headtrain.config import DataConfig, RecipeConfig, ResponsesConfig, ShapeConfig, TargetConfig

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(a tiny random llama's folder, where `transformers serve` answers for it as some/tiny)"""
    from headtrain.smoke import build_target

    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package, reason=f"{package} is not installed here; `make test-engines` has it")
    root = tmp_path_factory.mktemp("served")
    hub, commit = root / "hub" / "models--some--tiny", "a" * 40  # it lists what the Hub's cache has
    folder = hub / "snapshots" / commit
    target = TargetConfig(family="llama", shape=ShapeConfig(4, 64, 4, 2, 32, 128, 384))
    build_target(RecipeConfig(target=target), folder)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(commit)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", "some/tiny",
        "--host", "127.0.0.1", "--port", str(port), "--device", "cpu",
    ]  # fmt: skip
    with open(root / "log", "w") as log:
        there = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub.parent)}
        process = subprocess.Popen(command, env=os.environ | there, stdout=log, stderr=log, start_new_session=True)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 200
    try:
        while True:
            assert process.poll() is None and time.monotonic() < until, (root / "log").read_text()[-3000:]
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            time.sleep(0.5)
        yield folder, url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("named", [True, False])
def test_a_server_of_text_alone_is_refused_in_one_line_that_says_what_it_cannot_do(served, named):
    from transformers import AutoTokenizer

    from headtrain.data_gen import server
    from headtrain.data_gen.client import Misfit

    folder, url = served
    rule = ResponsesConfig("server", [url], model="some/tiny" if named else None)
    config = RecipeConfig(target=TargetConfig(model=str(folder)), data=DataConfig(max_length=200, responses=rule))
    with pytest.raises(Misfit, match=r"gives no token ids for a prompt of token ids, .*; serve the target") as error:
        server.check(config, AutoTokenizer.from_pretrained(folder), 384, {258})
    assert url in str(error.value) and "\n" not in str(error.value)
