"""Child processes: they are watched, fail loudly, and never outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from headtrain import children
from headtrain.children import Child, Progress, StageFailed, last_words
from headtrain.config import ConfigError, RecipeConfig


def child(code: str, log: Path, **env: str) -> Child:
    return Child([sys.executable, "-c", code], log, env)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition, seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def test_children_run_together_with_their_own_environment_and_logs(tmp_path):
    code = "import os; print('I am', os.environ['WHO'])"
    pair = [child(code, tmp_path / f"logs/{n}.log", WHO=str(n)) for n in range(2)]
    children.run(pair, "pair", Progress)
    assert [f"I am {n}" in (tmp_path / f"logs/{n}.log").read_text() for n in range(2)] == [True, True]


def test_a_failing_child_ends_the_others_and_shows_its_last_words(tmp_path):
    slow = child(f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)",
                 tmp_path / "slow.log")  # fmt: skip
    code = f"""
import os, sys, time
while not os.path.exists({str(tmp_path / 'pid')!r}) or not open({str(tmp_path / 'pid')!r}).read(): time.sleep(.02)
print('the disk is on fire'); sys.exit(1)"""
    began = time.monotonic()
    with pytest.raises(StageFailed, match=r"(?s)work ended with status 1; its log is .*bad.log.*the disk is on fire"):
        children.run([slow, child(code, tmp_path / "bad.log")], "work", Progress)
    assert time.monotonic() - began < 30
    assert wait_for(lambda: gone(int((tmp_path / "pid").read_text())))


def test_a_child_that_found_no_room_to_say_why_it_failed_is_spoken_for(tmp_path, monkeypatch):
    monkeypatch.setattr(children.shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    with pytest.raises(StageFailed, match=rf"^work: {tmp_path}: the disk is full; make room and run the same command"):
        children.run([child("import sys; sys.exit(120)", tmp_path / "logs" / "0.log")], "work", Progress)


def test_a_users_mistake_found_by_a_child_is_one_line(tmp_path):
    code = "import sys; print('noise'); print('error: row 3 has no text', file=sys.stderr); sys.exit(2)"
    with pytest.raises(StageFailed) as error:
        children.run([child(code, tmp_path / "x.log")], "prompts", Progress)
    assert str(error.value) == "prompts: row 3 has no text"


def test_what_a_child_notes_is_shown_once_and_the_rest_stays_in_its_log(tmp_path, capsys):
    code = "print('note: the file is cut off', flush=True); print('chatter'); import time; time.sleep(1)"
    for _ in range(2):
        children.run([child(code, tmp_path / "x.log")], "prompts", Progress)
    said = capsys.readouterr().out
    assert said.count("note: the file is cut off\n") == 2 and "chatter" not in said
    assert (tmp_path / "x.log").read_text().count("\nchatter\n") == 2


def test_only_the_last_runs_words_are_shown(tmp_path):
    for words in ("first", "second"):
        with pytest.raises(StageFailed) as error:
            children.run([child(f"raise SystemExit({words!r})", tmp_path / "x.log")], "again", Progress)
    assert "second" in str(error.value) and "first" not in str(error.value)


PARENT = """
import sys
from pathlib import Path
from headtrain.children import Child, Progress, run
grandchild = 'import os, time; open("grandchild", "w").write(str(os.getpid())); time.sleep(100)'
code = f'''
import os, subprocess, sys, time
open("child", "w").write(str(os.getpid()))
subprocess.run([sys.executable, "-c", {grandchild!r}])'''
try:
    run([Child([sys.executable, "-c", code], Path("log"))], "work", Progress)
except KeyboardInterrupt:
    sys.exit(130)
"""


def started_parent(folder: Path) -> tuple[subprocess.Popen, list[int]]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=folder)
    files = [folder / "child", folder / "grandchild"]
    assert wait_for(lambda: all(file.is_file() and file.read_text() for file in files))
    return parent, [int(file.read_text()) for file in files]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_parent_takes_children_and_grandchildren_along(number, tmp_path):
    parent, pids = started_parent(tmp_path)
    parent.send_signal(number)
    assert parent.wait(timeout=20) == 130
    assert wait_for(lambda: all(map(gone, pids)))


def test_a_killed_parent_leaves_no_child_behind(tmp_path):
    parent, pids = started_parent(tmp_path)
    parent.kill()
    parent.wait()
    assert wait_for(lambda: gone(pids[0]))
    os.kill(pids[1], signal.SIGKILL)  # a grandchild is its own parent's business


def test_workers_are_one_per_device_and_share_the_cores_on_a_cpu(monkeypatch):
    config = RecipeConfig()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert [env["CUDA_VISIBLE_DEVICES"] for env in children.workers(config)] == ["4", "6"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,1,0,3")
    config.target.gpus = 2  # each
    assert [env["CUDA_VISIBLE_DEVICES"] for env in children.workers(config)] == ["4,6", "1,0"]
    config.target.split = "tensor"  # a process for each GPU, in teams
    found, alone = children.workers(config), children.workers(config, teams=False)
    assert [env["CUDA_VISIBLE_DEVICES"] + ":" + env["RANK"] for env in found] == ["4:0", "6:1", "1:0", "0:1"]
    assert [found[n]["MASTER_PORT"] == found[0]["MASTER_PORT"] for n in range(4)] == [True, True, False, False]
    assert {(env["WORLD_SIZE"], env["LOCAL_RANK"]) for env in found} == {("2", "0")}
    assert [env["CUDA_VISIBLE_DEVICES"] for env in alone] == ["4,6", "1,0"]
    config.target.gpus = 8
    with pytest.raises(ConfigError, match="gpus=8: this machine has 5 CUDA devices"):
        children.workers(config)
    config.target.gpus, config.target.split, config.target.device = 1, "layers", "cpu"
    cores = len(os.sched_getaffinity(0))
    assert len(children.workers(config)) == cores
    config.launch.workers = 1
    assert [env["OMP_NUM_THREADS"] for env in children.workers(config)] == [str(cores)]
    config.launch.workers, config.smoke = "auto", True
    assert len(children.workers(config)) == 1


def test_the_progress_line_says_how_far_how_fast_and_how_long():
    said = children.line("responses", Progress(25, 100, "50 tokens/s"), 60)
    assert said == "responses  [#####...............]  25 %  50 tokens/s  1:00 gone, about 3:00 left"
    assert children.line("check", Progress(), 3725) == "check  1:02:05 gone"


def test_last_words_are_found_before_and_after_a_launchers_own_dated_lines(tmp_path):
    log = tmp_path / "stage.log"
    log.write_text(
        "\n[2026-01-01 10:00:00] old command\nerror: of an earlier start\n\n[2026-01-02 10:00:00] command\n"
        "error: process 1 (pid 7) was killed; run again\n[2026-01-02 10:00:05,123] [ERROR] [launch.py] exits\n"
    )
    for status in (2, 247):  # a launcher makes another status of it
        assert last_words("training", log, status) == "training: process 1 (pid 7) was killed; run again"
    log.write_text(log.read_text() + "\n[2026-01-03 10:00:00] command\nTraceback\n")
    assert last_words("training", log, 1) == f"training ended with status 1; its log is {log}\n  | Traceback"
