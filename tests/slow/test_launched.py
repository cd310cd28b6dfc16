"""`headtrain generate` under the user's own launcher, torchrun or srun; with a process killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from headtrain.configload import load
from headtrain.files import Manifest, read_json
from headtrain.smoke import build_target, shrink

pytestmark = pytest.mark.slow
SLURM = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "7"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny random target of a smoke run."""
    place = tmp_path_factory.mktemp("target") / "tiny"
    build_target(shrink(load("eagle3_llama8b", ["smoke=true"])), place)
    return place


@pytest.fixture(scope="module")
def arguments(folder):
    return for_target(folder, 150, 28)


def for_target(folder, tokens: int, prompts: int) -> list[str]:
    source = f"{{source:package:headtrain.data_gen/smoke_prompts.jsonl,limit:{prompts}}}"
    return [
        "generate", "recipe=eagle3_llama8b", f"target.model={folder}", "target.family=null", "target.device=cpu",
        "target.dtype=float32", f"data.prompts=[{source}]", "data.held_out=2",
        "data.valid=2", "data.max_length=400", f"data.responses.max_new_tokens={tokens}",
        "data.responses.batch_tokens=300",
        "launch.workers=1",
        *(f"target.shape.{key}=null" for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        "target.shape.vocab=null", "head.draft_vocab=128", "head.taps=null",
    ]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


def ids(run) -> dict[str, list[int]]:
    from headtrain.data_gen.store import CaptureStore, ResponseStore

    assert all(Manifest(run / stage).data["complete"] for stage in ("prompts", "responses", "captures"))
    store, states = ResponseStore(run / "responses"), CaptureStore(run / "captures")
    assert [row.id for row in store.rows] == [row.id for row in states.rows]
    return {row.id: store.read(row).ids.tolist() for row in store.rows}


@pytest.fixture(scope="module")
def plain(arguments, tmp_path_factory):
    """What one process makes."""
    run = tmp_path_factory.mktemp("plain") / "run"
    argv = [sys.executable, "-m", "headtrain", *arguments, f"run_dir={run}"]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return ids(run)


def torchrun(arguments, run, processes: int = 3) -> subprocess.Popen:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.Popen(
        [*launcher, "-m", "headtrain", *arguments, f"run_dir={run}"], env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def a_worker_at_its_batch(run, others: tuple[int, ...] = ()) -> int:
    """The pid of a process that has begun a batch and not finished it."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for note in (run / "responses" / "claims").glob("[0-9]*.json"):
            if not (run / "responses" / f"responses-{int(note.stem):05d}.safetensors").is_file():
                pid = read_json(note)["pid"]
                if pid not in others:
                    return pid
        time.sleep(0.01)
    raise AssertionError("no process began a batch")


def test_torchrun_shares_the_batches_among_its_processes(arguments, plain, tmp_path):
    said, _ = (started := torchrun(arguments, tmp_path / "run")).communicate(timeout=600)
    assert started.returncode == 0, said
    assert ids(tmp_path / "run") == plain
    assert said.count("responses: rows") == 1  # rank 0's last words
    again, _ = (started := torchrun(arguments, tmp_path / "run", 2)).communicate(timeout=600)
    assert started.returncode == 0 and again.count("responses: rows") == 1, again


def test_torchrun_ends_with_a_killed_process_and_the_same_command_goes_on(arguments, plain, tmp_path):
    run = tmp_path / "run"
    started = torchrun(arguments, run)
    os.kill(a_worker_at_its_batch(run), signal.SIGKILL)
    killed = time.monotonic()
    said, _ = started.communicate(timeout=600)
    assert started.returncode != 0 and time.monotonic() - killed < 60, said
    said, _ = (started := torchrun(arguments, run)).communicate(timeout=600)
    assert started.returncode == 0, said
    assert ids(run) == plain


def test_where_a_launcher_lets_the_others_live_they_take_over_a_killed_ones_batch(arguments, plain, tmp_path):
    run, argv = tmp_path / "run", [sys.executable, "-m", "headtrain", *arguments, f"run_dir={tmp_path / 'run'}"]
    ranks = [
        subprocess.Popen(
            argv, env=environment(**SLURM, SLURM_PROCID=str(n), SLURM_LOCALID=str(n)), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for n in range(3)
    ]  # fmt: skip
    victim = a_worker_at_its_batch(run, (ranks[0].pid,))
    os.kill(victim, signal.SIGKILL)
    for process in ranks:
        said, _ = process.communicate(timeout=600)
        assert process.returncode == (-signal.SIGKILL if process.pid == victim else 0), said
    assert ids(run) == plain


# ------------------------------------------------------------------------------------------------- split by matrices

def states(run) -> dict[str, list]:
    from headtrain.data_gen.store import CaptureStore

    store = CaptureStore(run / "captures")
    rows = {row.id: store.read(row) for row in store.rows}
    return {name: [row.taps.float(), row.last.float(), row.logsumexp, row.argmax] for name, row in rows.items()}


@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_two_processes_that_split_every_matrix_make_what_one_makes(heat, folder, tmp_path):
    import torch

    more = [f"data.responses.temperature={heat}", "data.captures.dtype=float32"]
    found = []
    for name, how in (("one", []), ("two", ["target.gpus=2", "target.split=tensor"])):
        argv = [sys.executable, "-m", "headtrain", *for_target(folder, 24, 10), *more, *how]
        argv += [f"run_dir={tmp_path / name}"]
        done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append((ids(tmp_path / name), states(tmp_path / name)))
    (own, theirs), (ours, split) = found
    assert ours == own
    for name, tensors in theirs.items():
        for a, b in zip(tensors, split[name], strict=True):
            torch.testing.assert_close(b, a, atol=1e-4, rtol=1e-4)
    assert "lies on 2 processes" in (tmp_path / "two" / "logs" / "responses-1.log").read_text()


def test_a_killed_process_of_a_team_ends_the_job_in_seconds(folder, tmp_path):
    run = tmp_path / "run"
    argv = [sys.executable, "-m", "headtrain", *for_target(folder, 150, 10), f"run_dir={run}"]
    split = subprocess.Popen(
        [*argv, "target.gpus=2", "target.split=tensor"], env=environment(), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    first = a_worker_at_its_batch(run)
    other = next(pid for pid in children_of(split.pid) if pid != first)
    os.kill(other, signal.SIGKILL)
    killed = time.monotonic()
    said, _ = split.communicate(timeout=60)
    assert split.returncode == 2 and time.monotonic() - killed < 30
    assert "error: responses (2 processes) was killed by signal 9; its log is" in said


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(text) for text in found.split()]
