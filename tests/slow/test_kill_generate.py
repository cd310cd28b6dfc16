"""`kill -9` of a generating run, its workers, and its servers: no finished response is lost or made twice.

Half of the kills aim at a short window (the plan, a file being written, a batch between its two files, the journal, the
index), the others fall at random within a start. `pytest -s` prints where they fell.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from headtrain.files import Manifest, read_header, read_json

pytestmark = pytest.mark.slow

KILLS = 25  # of each test
LOOPBACK = Path(__file__).parent.parent / "data_gen" / "loopback.py"
NEW, VOCAB, END = 24, 384, 258
RECIPE = """
target: {{model: {model}, family: llama, dtype: float32, device: cpu}}
data:
  prompts: [{prompts}]
  held_out: 4
  valid: 4
  max_length: 192
  responses: {{max_new_tokens: 24, batch_tokens: 450}}
head: {{draft_vocab: 128}}
"""


# ------------------------------------------------------------------------------------------------- what is watched


class Arrivals:
    """How often each file has been put into a folder, which is made anew when it is not a stage's yet."""

    MOVED_TO = 0x80  # inotify's

    def __init__(self, folder: Path):
        self.folder, self.counts, self.libc = folder, Counter(), ctypes.CDLL(None, use_errno=True)
        self.handle = -1

    def watch(self) -> None:
        """To be called before a start."""
        if not Manifest(self.folder).data:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.handle = self.libc.inotify_init1(os.O_NONBLOCK)
        assert self.libc.inotify_add_watch(self.handle, os.fsencode(self.folder), self.MOVED_TO) >= 0

    def note(self) -> None:
        """To be called when the start has ended."""
        while data := self._read():
            while data:
                size = struct.unpack("iIII", data[:16])[3]
                self.counts[data[16 : 16 + size].rstrip(b"\0").decode()] += 1
                data = data[16 + size :]
        os.close(self.handle)

    def _read(self) -> bytes:
        try:
            return os.read(self.handle, 1 << 16)
        except BlockingIOError:
            return b""


def files(folder: Path, kind: str) -> dict[int, tuple[int, int, int]]:
    """The finished files of a stage: batch -> what changes when a file is written again."""
    found = {}
    for path in folder.glob(f"{kind}-*.safetensors"):
        stat = path.stat()
        found[int(path.stem[-5:])] = stat.st_ino, stat.st_mtime_ns, stat.st_size
    return found


def batches(run: Path) -> int:
    plan = run / "responses" / "plan.json"
    return len(read_json(plan)["batches"]) if plan.is_file() else 0


def journal(run: Path) -> list[str]:
    """Prompts whose answers are recorded."""
    path = run / "responses" / "answers.jsonl"
    return [json.loads(line)["id"] for line in path.read_bytes().split(b"\n")[:-1]] if path.is_file() else []


def phase(run: Path) -> str:
    """Where a run was when it was killed."""
    whole, answered = batches(run), files(run / "responses", "responses")
    parts = [path.name for place in ("responses", "captures") for path in (run / place).glob(".*.part")]
    if Manifest(run / "responses").data.get("complete"):
        return "after the responses' index"
    if whole and len(answered) == whole:
        return "at the index"
    if (run / "responses" / "answers.jsonl").is_file():
        return "while a batch is written" if parts else "asking servers" if journal(run) else "before an answer"
    if set(files(run / "captures", "captures")) - set(answered):
        return "between captures and responses"
    if parts:
        return "while a file is written"
    claims = {int(path.stem) for path in (run / "responses" / "claims").glob("*.json")}
    return "answering" if claims - set(answered) else "loading" if whole else "before the plan"


# ------------------------------------------------------------------------------------------------- what is started


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """A recipe of a tiny random target and 160 prompts, some 30 batches."""
    from headtrain.configload import load
    from headtrain.smoke import build_target, shrink

    folder = tmp_path_factory.mktemp("recipe")
    config = shrink(load("eagle3_llama8b", ["smoke=true", f"run_dir={folder}"]))
    build_target(config, Path(config.target.model))
    rows = [{"messages": [{"role": "user", "content": f"Say {n} {'very ' * (n % 9)}slowly."}]} for n in range(160)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.format(model=config.target.model, prompts=folder / "prompts.jsonl"))
    return path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Client:
    """`headtrain generate` of one run folder, started again and again."""

    def __init__(self, recipe: Path, run: Path, *more: str):
        self.run, self.arrivals = run, Arrivals(run / "responses")
        self.argv = [sys.executable, "-m", "headtrain", "generate", f"recipe={recipe}", f"run_dir={run}", *more]
        self.log = run.with_suffix(".log")

    def start(self) -> None:
        self.arrivals.watch()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(self.argv, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def workers(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()] if self.running() else []

    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self, pid: int) -> None:
        """One process of the run; the others follow it."""
        all_of_them = self.workers()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.process.wait(60)
        until = time.monotonic() + 60
        while any(map(alive, all_of_them)):
            assert time.monotonic() < until, "a worker outlives its parent"
            time.sleep(0.01)
        self.arrivals.note()

    def finish(self) -> None:
        self.process.wait(600)
        self.arrivals.note()
        assert self.process.returncode == 0, self.log.read_text()

    def wait(self, seen, seconds: float) -> bool:
        """Until `seen()`; False when the run ended, or after so many seconds."""
        until = time.monotonic() + seconds
        while self.running() and time.monotonic() < until:
            if seen():
                return True
            time.sleep(0.001)
        return False

    def reset(self) -> None:
        for stage in ("responses", "captures"):
            shutil.rmtree(self.run / stage)
        self.arrivals = Arrivals(self.run / "responses")


def rows_of(run: Path) -> dict[str, tuple[list[int], int]]:
    """id -> (token ids, tokens of the prompt)."""
    from headtrain.data_gen.store import ResponseStore

    store = ResponseStore(run / "responses")
    found = {row.id: (store.read(row).ids.tolist(), row.first) for row in store.rows}
    assert len(found) == len(store.rows)
    return found


def half_written(run: Path) -> list[str]:
    return [str(path) for stage in ("responses", "captures") for path in (run / stage).rglob("*.part")]


def states(run: Path) -> list[tuple]:
    """Per capture file: its tensors' places and their bytes, as a hash. The order of other facts in it may differ."""
    found = []
    for entry in read_json(run / "captures" / "index.json")["files"]:
        tensors, start = read_header(run / "captures" / entry["file"])
        found.append((tensors, hashlib.sha256((run / "captures" / entry["file"]).read_bytes()[start:]).digest()))
    return found


def show(name: str, fell: Counter, starts: int) -> None:
    print(f"\n{name}: {fell.total()} kills in {starts} starts: " + ", ".join(f"{n} {k}" for k, n in fell.most_common()))


# ------------------------------------------------------------------------------------------------- local


def test_a_run_with_two_workers_that_is_killed_ends_like_an_unbroken_one(recipe, tmp_path):
    whole = Client(recipe, tmp_path / "whole", "launch.workers=2")
    began = time.monotonic()
    whole.start()
    whole.finish()
    duration, expected, captures = time.monotonic() - began, rows_of(whole.run), states(whole.run)
    assert len(expected) == 156 and batches(whole.run) >= 30

    client, dice, fell, starts = Client(recipe, tmp_path / "run", "launch.workers=2"), random.Random(0), Counter(), 0
    responses, kept = client.run / "responses", {}

    def between() -> bool:
        return bool(set(files(client.run / "captures", "captures")) - set(files(responses, "responses")))

    aims = {
        "plan": lambda: any(responses.glob(".plan.json*")) or (responses / "plan.json").is_file(),
        "between": between,
        "index": lambda: len(files(responses, "responses")) == batches(client.run) > 0,
    }

    def whole_again() -> None:
        """The run is finished: is it as if nothing had happened?"""
        assert rows_of(client.run) == expected and states(client.run) == captures and not half_written(client.run)
        assert all(files(responses, "responses")[batch] == mark for batch, mark in kept.items())
        names = {f"responses-{n:05d}.safetensors" for n in range(batches(client.run))}
        assert {name: client.arrivals.counts[name] for name in names} == dict.fromkeys(names, 1)

    while fell.total() < KILLS:
        starts += 1
        assert starts < 4 * KILLS, f"only {fell.total()} kills in {starts} starts"
        left = batches(client.run) - len(kept)
        aim = dice.choice(["random", "plan" if not batches(client.run) else "index" if left < 8 else "between"])
        client.start()
        client.wait(lambda: len(client.workers()) == 2, duration)
        if aim == "random":
            client.wait(lambda: False, dice.uniform(0, duration))
        elif client.wait(aims[aim], 2 * duration):
            time.sleep(dice.uniform(0, 0.02))
        if client.running():
            client.kill(dice.choice([client.process.pid, *client.workers()]))
            fell[phase(client.run)] += 1
            now = files(responses, "responses")
            assert all(now[batch] == mark for batch, mark in kept.items()), "a finished response was lost or made anew"
            kept = now
        else:
            client.finish()
            whole_again()
            client.reset()
            kept = {}
    client.start()
    client.finish()
    whole_again()
    show("local", fell, starts)
    assert fell["answering"] + fell["while a file is written"] + fell["between captures and responses"] >= 5


# ------------------------------------------------------------------------------------------------- servers


class Engine:
    """A process of loopback.py on a port of its own."""

    def __init__(self, folder: Path, log: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log, self.url, self.seen = log, f"http://127.0.0.1:{self.port}", 0
        self.argv = [sys.executable, str(LOOPBACK), str(self.port), "vllm", str(VOCAB), str(END), str(folder), str(log)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.argv, stdout=subprocess.PIPE, text=True)
        self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def asked(self) -> list[tuple[int, ...]]:
        """Prompts that it was asked for since the last call."""
        data = self.log.read_bytes() if self.log.is_file() else b""
        new, self.seen = data[self.seen :], len(data)
        return [tuple(json.loads(line)) for line in new.splitlines()]


@pytest.fixture
def engines(recipe, tmp_path):
    folder = next((recipe.parent / "target").iterdir())
    both = [Engine(folder, tmp_path / f"asked-{n}.jsonl") for n in range(2)]
    yield both
    for engine in both:
        engine.kill()


def test_a_run_whose_client_and_servers_are_killed_asks_for_nothing_twice(recipe, engines, tmp_path):
    spec = importlib.util.spec_from_file_location("headtrain_loopback", LOOPBACK)
    loopback = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loopback)
    urls = ",".join(engine.url for engine in engines)
    client = Client(
        recipe, tmp_path / "run", "data.responses.backend=server", f"data.responses.urls=[{urls}]",
        "data.responses.concurrency=3", "launch.workers=1",
    )  # fmt: skip
    dice, fell, starts, repeated = random.Random(1), Counter(), 0, set()
    responses, marks = client.run / "responses", []  # per kill of the client: what is recorded, what is asked later

    def look() -> None:
        """The client has ended: what was asked belongs to the starts before."""
        asked = [ids for engine in engines for ids in engine.asked()]
        for mark in marks:
            mark[1].update(asked)
        done = journal(client.run)
        repeated.update(name for name, n in Counter(done).items() if n > 1)
        marks.append((set(done), set()))

    def whole_again() -> None:
        rows = rows_of(client.run)
        assert len(rows) == 156 and not repeated and sorted(journal(client.run)) == sorted(rows)
        prompts = {tuple(ids[:first]): name for name, (ids, first) in rows.items()}
        assert len(prompts) == 156 and not half_written(client.run)
        for ids, name in prompts.items():
            assert rows[name][0][len(ids) :] == loopback.answer(list(ids), NEW, VOCAB, END)[0]
        for recorded, asked in marks:
            assert not recorded & {prompts[ids] for ids in asked}, "a recorded response was asked for again"
        assert all(Manifest(client.run / stage).data["complete"] for stage in ("responses", "captures"))

    def grown(answers: int):
        return lambda: len(journal(client.run)) >= answers

    def kill_server() -> None:
        engine = dice.choice(engines)
        engine.kill()
        fell["a server"] += 1
        time.sleep(dice.choice([0, dice.uniform(0, 2)]))
        engine.start()

    while fell.total() < KILLS:
        starts += 1
        assert starts < 4 * KILLS, f"only {fell.total()} kills in {starts} starts"
        before = len(journal(client.run))
        client.start()
        for _ in range(dice.randrange(3)):
            if client.wait(grown(before + dice.randrange(1, 60)), 30):
                kill_server()
        aim = dice.choice(["random", "journal", "write", "index"])
        if aim == "random":
            client.wait(lambda: False, dice.uniform(0, 8))
        elif aim == "journal":
            client.wait(grown(before + dice.randrange(1, 60)), 30)
        elif aim == "write":
            client.wait(lambda: any(responses.glob(".responses-*.part")), 30)
        elif client.wait(lambda: len(files(responses, "responses")) == batches(client.run) > 0, 60):
            time.sleep(dice.uniform(0, 0.05))
        if client.running():
            client.kill(dice.choice([client.process.pid, *client.workers()]))
            fell[phase(client.run)] += 1
            look()
        else:
            client.finish()
            look()
            whole_again()
            client.reset()
            marks.clear()
    client.start()
    client.finish()
    look()
    whole_again()
    show("servers", fell, starts)
    assert fell["a server"] >= 5 and fell["asking servers"] >= 3
