"""Captures by the real vLLM beside those of the target as we load it: the same rows, the same tensors."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from headtrain.config import CapturesConfig, RecipeConfig, ShapeConfig, TargetConfig
from headtrain.files import read_json

pytestmark = pytest.mark.engines

LONGEST = 512  # data.max_length, and all the positions that the target has
TAPS = [1, 2, 4]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
BY_VLLM = {"backend": "vllm", "engine": {  # 64: rows come in pieces, with parts of others
    "enforce_eager": True, "max_num_batched_tokens": 64, "max_num_seqs": 4,
}}  # fmt: skip
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # of the largest value of a row's tensor


@pytest.fixture(scope="module", autouse=True)
def _there():
    pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-engines` has it")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny):
    """folders(family): a tiny random target; its norms are not 1."""
    from transformers import AutoModelForCausalLM

    from headtrain.smoke import build_target

    root = tmp_path_factory.mktemp("targets")

    def make(family: str):
        folder = root / family
        if not folder.is_dir():
            shape = ShapeConfig(4, 64, 4, 2, 32, 128, 384)
            build_target(RecipeConfig(target=TargetConfig(family=family, shape=shape)), folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            tiny.scatter(model, 0.3)
            model.save_pretrained(folder)
        return folder

    return make


def questions(path):
    """Rows of token ids: of 2 and 3 tokens, as long as allowed, several with a long prefix in common, and others."""
    chance = random.Random(0)
    lengths = (2, 3, LONGEST, LONGEST - 1, 70, 90, 17, 40, 33, 64, 65)
    texts = [[chance.randrange(256) for _ in range(n)] for n in lengths]
    texts += [texts[2][:100] + [chance.randrange(256) for _ in range(n)] for n in (1, 5, 40)]
    cuts = [1, 2, *(chance.randrange(1, len(text)) for text in texts[2:])]
    rows = [{"prompt_token_ids": t[:n], "completion_token_ids": t[n:]} for t, n in zip(texts, cuts, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def command(run, source, folder, dtype) -> list[str]:
    recipe = {
        "target": {"model": str(folder), "device": "cpu", "dtype": dtype},
        "data": {
            "prompts": [{"source": str(source)}], "held_out": 0, "valid": 1, "max_length": LONGEST,
            "responses": {"backend": "given", "batch_tokens": 200}, "captures": {"dtype": dtype, **BY_VLLM},
        },
        "head": {"taps": TAPS},
    }  # fmt: skip
    (file := source.with_name("recipe.yaml")).write_text(json.dumps(recipe))
    return [sys.executable, "-m", "headtrain", "generate", f"recipe={file}", f"run_dir={run}"]


def kill_after_the_first_batch(command, run):
    """As kill -9 does; what the command started ends with it."""
    process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list((run / "captures").glob("captures-*")):
        time.sleep(0.002)
    process.kill()
    process.wait()
    until = time.monotonic() + 20
    while (alive := [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(run).encode() in _text(p)]):
        assert time.monotonic() < until, alive
        time.sleep(0.1)


def _text(path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("qwen3", "float32"), ("llama", "bfloat16")])
def test_vllm_gives_the_states_that_the_target_has_here(family, dtype, folders, tmp_path, ledger):
    from headtrain.data_gen import capture
    from headtrain.data_gen.store import CaptureStore
    from headtrain.target import Target

    questions(tmp_path / "rows.jsonl")
    asked = command(run := tmp_path / "run", tmp_path / "rows.jsonl", folders(family), dtype)
    if (family, dtype) == ("llama", "float32"):
        kill_after_the_first_batch(asked, run)
        assert capture.missing(run / "responses", run / "captures") > 0
    done = subprocess.run(asked, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    config = RecipeConfig(target=TargetConfig(model=str(folders(family)), dtype=dtype, device="cpu"))
    config.data.captures = CapturesConfig(dtype=dtype)
    target = Target.load(config.target)
    capture.work(config, target, run / "responses", tmp_path / "here", TAPS)
    capture.finish(config, run / "responses", tmp_path / "here")
    theirs, ours = CaptureStore(run / "captures"), CaptureStore(tmp_path / "here")
    one, two = (read_json(store.folder / "index.json") for store in (theirs, ours))
    assert one | {"files": None} == two | {"files": None} and len(theirs.rows) == 14
    same, count, worst = 0, 0, 0.0
    for a, b in zip(theirs.rows, ours.rows, strict=True):
        assert a == b
        x, y = theirs.read(a), ours.read(b)
        for name in ("ids", "supervised"):
            assert torch.equal(getattr(x, name), getattr(y, name))
        for name in ("taps", "last", "logsumexp"):
            one, two = getattr(x, name).float(), getattr(y, name).float()
            assert not one[-1].any() and not two[-1].any()
            gap = float((one - two).abs().max() / two.abs().max())
            assert gap < TOLERANCE[dtype], (name, a.tokens, gap)
            worst = max(worst, gap)
        same, count = same + int((x.argmax == y.argmax).sum()), count + a.tokens
    assert same == count if dtype == "float32" else same > 0.97 * count
    assert not list((run / "captures" / "claims").glob("vllm-*/"))
    ledger.append(f"captures of a tiny {family} by vLLM in {dtype}: {len(theirs.rows)} rows, largest gap {worst:.1e}, "
                  f"{same} of {count} choices the same")  # fmt: skip
