"""A real vLLM server answers the prompts as the target does in this process: same token ids, greedily, in fp32."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress

import pytest

from headtrain.config import DataConfig, PromptSource, RecipeConfig, ResponsesConfig, ShapeConfig, TargetConfig
from headtrain.data_gen import server

pytestmark = pytest.mark.engines

QUESTIONS = 24
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random llama with a byte-level tokenizer and a chat template."""
    from headtrain.smoke import build_target

    folder = tmp_path_factory.mktemp("served") / "tiny"
    shape = ShapeConfig(4, 64, 4, 2, 32, 128, 384)
    build_target(RecipeConfig(target=TargetConfig(family="llama", shape=shape)), folder)
    return folder


class Server:
    """A vLLM server of a target, on a port of its own, that can be killed and started again."""

    def __init__(self, folder, log):
        pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-engines` has it")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log, self.process = f"http://127.0.0.1:{port}", log, None
        self.command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
            "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
            "--max-num-seqs", "4", "--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip

    def start(self):
        with open(self.log, "a") as out:
            self.process = subprocess.Popen(
                self.command, env=os.environ | ENVIRONMENT, stdout=out, stderr=out, start_new_session=True
            )
        return self

    def wait(self):
        """Until it answers."""
        until = time.monotonic() + 400
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return self
            time.sleep(1)
        raise AssertionError(self.log.read_text()[-3000:])

    def kill(self):
        """As kill -9 does, with the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def servers(folder, tmp_path_factory):
    """Two servers of the target: the first one runs, the second one is not started yet."""
    root = tmp_path_factory.mktemp("log")
    both = [Server(folder, root / f"{n}.log") for n in range(2)]
    try:
        both[0].start().wait()
        yield both
    finally:
        for server in both:
            if server.process:
                server.kill()


@pytest.fixture
def url(servers):
    """Where a vLLM of this target listens."""
    if servers[0].process.poll() is not None:
        servers[0].start().wait()
    return servers[0].url


@pytest.fixture
def answers(folder, tmp_path):
    """answers(name, rule): {prompt: (ids, finish)} of a responses stage, and its manifest."""
    from headtrain.data_gen import prompts, respond
    from headtrain.data_gen.store import ResponseStore
    from headtrain.target import Target

    source = tmp_path / "questions.jsonl"
    texts = [f"What is {n} times {n + 3}, and why – naïvely {'x' * (n % 5)}?" for n in range(QUESTIONS)]
    source.write_text("\n".join(json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts))
    target = Target.load(TargetConfig(model=str(folder), dtype="float32", device="cpu"))

    def answer(name: str, rule: ResponsesConfig):
        config = RecipeConfig(
            target=TargetConfig(model=str(folder), dtype="float32", device="cpu"),
            data=DataConfig(
                prompts=[PromptSource(str(source))], held_out=1, valid=1, max_length=200, responses=rule
            ),
        )  # fmt: skip
        folders = [tmp_path / name / stage for stage in ("prompts", "responses", "captures")]
        prompts.gather(config, folders[0])
        respond.work(config, target, *folders, (1, 2))
        respond.finish(config, *folders[1:])
        store = ResponseStore(folders[1])
        rows = {row.id: (store.read(row).ids.tolist(), row.finish) for row in store.rows}
        return rows, json.loads((folders[1] / "manifest.json").read_text())

    return answer


def test_a_vllm_server_answers_with_the_ids_of_our_own_greedy_decoding(url, answers, ledger):
    ours, _ = answers("local", ResponsesConfig(max_new_tokens=40, batch_tokens=1000))
    theirs, manifest = answers(
        "server", ResponsesConfig("server", [url], max_new_tokens=40, batch_tokens=1000, concurrency=4)
    )
    assert len(theirs) == QUESTIONS - 1 and theirs == ours
    (about,) = manifest["servers"]
    assert about["engine"] == "vLLM" and about["version"] and about["model"] == "tiny"
    tokens = sum(len(ids) for ids, _ in ours.values())
    ledger.append(f"vLLM {about['version']} as a server: {len(theirs)} responses, {tokens} tokens, all as decoded here")


def test_sampled_answers_of_a_vllm_server_come_back_the_same_with_the_same_seed(url, answers):
    rule = {"max_new_tokens": 20, "temperature": 0.8, "top_p": 0.9, "concurrency": 4}
    first, _ = answers("first", ResponsesConfig("server", [url], **rule))
    again, _ = answers("again", ResponsesConfig("server", [f"{url}/v1"], **rule))
    assert first == again and len({tuple(ids[-20:]) for ids, _ in first.values()}) > 20


def test_servers_killed_while_they_answer_lose_and_repeat_nothing(
    servers, url, answers, tmp_path, monkeypatch, caplog, ledger
):
    """The first one is killed with -9, the second takes over, is killed too, and the first comes back."""
    monkeypatch.setattr(server, "LONGEST_WAIT", 2.0)
    budget = {"max_new_tokens": 100, "batch_tokens": 1000}
    journal, at_kill = tmp_path / "killed" / "responses" / server.JOURNAL, []

    def kill_twice():
        for enough, one, other in ((4, *servers), (12, *servers[::-1])):
            while not journal.is_file() or journal.read_bytes().count(b"\n") < enough:
                time.sleep(0.02)
            one.kill()
            at_kill.append(journal.read_bytes().count(b"\n"))
            other.start()

    killer = threading.Thread(target=kill_twice, daemon=True)
    killer.start()
    rule = ResponsesConfig("server", [s.url for s in servers], concurrency=2, tries=50, **budget)
    theirs, manifest = answers("killed", rule)
    killer.join(timeout=60)
    asked = [json.loads(line)["id"] for line in journal.read_text().splitlines()]
    assert len(asked) == len(set(asked)) == QUESTIONS - 1 and set(asked) == theirs.keys()
    assert 4 <= at_kill[0] < 12 <= at_kill[1] < QUESTIONS - 1 and manifest["left_out"] == {}
    for one in servers:
        assert f"{one.url} is back" in caplog.text
    assert theirs == answers("whole", ResponsesConfig(**budget))[0]
    first, second = at_kill
    ledger.append(f"vLLM servers killed with -9 after {first} and {second} of {len(asked)} responses: all kept once")
