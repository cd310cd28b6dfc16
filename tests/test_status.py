"""`headtrain status`: of runs at work, killed, finished; by what their processes leave."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from headtrain import children, cli, identity, status
from headtrain.children import Progress
from headtrain.data_gen import claims, respond
from headtrain.files import Manifest, claimed, held, write_json

PLAN = [[["a", 10, 100], ["b", 10, 100]], [["c", 8, 50], ["d", 6, 50]], [["e", 5, 40]]]


@pytest.fixture
def run(tmp_path):
    """A run that answers three batches: the first is done, the second under way, three prompts did not fit."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text(
        "target: {shape: {hidden: 64}}\nhead: {taps: [1, 2]}\ndata: {captures: {dtype: bfloat16}}\n"
    )
    Manifest(run / "prompts").open("p", {})
    Manifest(run / "prompts").finish({"read": 12, "prompts": 5}, {"duplicate": 7})
    Manifest(run / "responses").open("r", {"responses": {"backend": "local"}})
    Manifest(run / "captures").open("c", {})
    (run / "responses" / "claims").mkdir()
    write_json(run / "responses" / "plan.json", {"backend": "local", "batches": PLAN, "left_out": {"too_long": 3}})
    first = claims.Meter(run / "responses", 0, None, 200)
    first.add(120)
    first.tell(left_out={"turns_beyond_data.max_length": 2})
    (run / "responses" / claims.file_name("responses", 0)).write_bytes(b"x" * 10)
    second = claims.Meter(run / "responses", 1, None, 100)
    second.add(30)
    second.tell()
    return run


def note(run, name, **changes):
    path = run / "responses" / "claims" / f"{name}.json"
    write_json(path, {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None})


def responses(run):
    return status.Watch(run).look()["stages"]["responses"]


def test_answers_under_way_are_counted_and_the_rest_is_expected_as_long_as_those_so_far(run):
    note(run, 0, rate=1.0, at=time.time() - 5)  # the same process told more of itself later
    note(run, 1, rate=8.0)
    with claimed(run / ".lock"):
        state = responses(run)
    assert state.state == "under way" and state.what == "2 of 5 prompts"
    assert (state.tokens, state.tokens_per_s) == (150, 8.0)
    assert state.total == 120 + (340 - 200) * 120 / 200 == 204  # answers are 0.6 of what they may be, so far
    assert state.seconds_left == (204 - 150) / 8.0
    assert state.left_out == {"too_long": 3, "turns_beyond_data.max_length": 2}


def test_paces_of_different_processes_add_up_and_old_ones_do_not_count(run):
    note(run, 0, pid=1, rate=5.0, at=time.time() - 2)
    note(run, 1, pid=2, rate=8.0)
    with claimed(run / ".lock"):
        assert responses(run).tokens_per_s == 13.0
        note(run, 0, at=time.time() - 2 * claims.FRESH)
        assert responses(run).tokens_per_s == 8.0


def test_notes_of_older_versions_are_read(run):
    for name in (0, 1):
        note(run, name, at=None, rate=None, left_out=None)
    with claimed(run / ".lock"):
        state = responses(run)
    assert (state.tokens, state.tokens_per_s, state.seconds_left, state.total) == (150, None, None, 204)


def test_a_killed_run_says_that_nobody_works_and_what_it_ended_with(run, capsys):
    log = run / "logs" / "captures-0.log"
    log.write_text(
        "[2030-01-01 10:00:00] one\nerror: of an earlier start\n"
        "[2030-01-01 11:00:00] two\nnoise\nerror: the disk is full\n"
    )
    assert cli.main(["status", f"run_dir={run}"]) == 0
    said = capsys.readouterr().out
    assert "no headtrain process is working in it; the same command goes on with its responses" in said
    assert "tokens/s" not in said and " left\n" not in said and "2 of 5 prompts, 150 tokens" in said
    assert "stopped by: the disk is full" in said and "earlier" not in said
    with claimed(run / ".lock"):
        assert cli.main(["status", f"run_dir={run}"]) == 0
    said = capsys.readouterr().out
    assert "a headtrain process is working in it" in said and "stopped by" not in said and " left;" in said


def test_disk_that_is_used_and_needed(run):
    found = status.Watch(run).look()
    rows, captures = found["stages"]["responses"], found["stages"]["captures"]
    assert rows.bytes == sum(path.stat().st_size for path in (run / "responses").rglob("*") if path.is_file())
    prompts, answers = 10 + 10 + 8 + 6 + 5, 204
    assert captures.needs == (prompts + answers) * 3 * 64 * 2  # before there are any: by the shape
    (run / "captures" / "captures-00000.safetensors").write_bytes(bytes(14 << 20))
    captures = status.Watch(run).look()["stages"]["captures"]
    done = 20 + 120
    assert captures.needs == round(captures.bytes / done * (prompts + answers - done))  # then by those that there are
    assert "captures need about 10.8 MB more" in status.text(status.Watch(run).look())


def test_servers_have_a_line_each(run):
    servers = [
        {"ready": True, "busy": 4, "answered": 1200, "failed": 0, "reason": ""},
        {"ready": False, "busy": 0, "answered": 7, "failed": 2, "reason": "cannot be reached"},
    ]
    (run / "config.yaml").write_text(
        "target: {model: x/y}\ndata: {responses: {backend: server, urls: [http://a:1, http://b:2]}}\n"
    )
    told = {"pid": 3, "tokens": 90, "seconds": 9, "at": time.time(), "rate": 10.0, "prompts": 3, "settled": 180,
            "left_out": {"server_timeout": 1}, "servers": servers}  # fmt: skip
    write_json(run / "responses" / "claims" / "servers.json", told)
    with claimed(run / ".lock"):
        found = status.Watch(run).look()
    state, said = found["stages"]["responses"], status.text(found)
    assert (state.what, state.tokens, state.total) == ("3 of 5 prompts", 90, 90 + (340 - 180) / 2)
    assert state.left_out == {"too_long": 3, "server_timeout": 1}
    assert "http://a:1: ready, 4 requests under way, 1,200 answered\n" in said
    assert "http://b:2: away, 7 answered, 2 failed (cannot be reached)\n" in said


def test_json_says_the_same(run, capsys):
    assert cli.main(["status", f"run_dir={run}", "json=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["working"] is False and found["stages"]["responses"]["tokens"] == 150
    assert found["stages"]["prompts"]["left_out"] == {"duplicate": 7} and found["free_bytes"] > 0
    assert found["stages"]["export"]["state"] == "not started"


def test_watching_ends_when_nobody_works_any_more(run, capsys):
    def work():
        with claimed(run / ".lock"):
            ready.set()
            time.sleep(0.5)

    ready, began = threading.Event(), time.monotonic()
    worker = threading.Thread(target=work)
    worker.start()
    ready.wait()
    assert cli.main(["status", f"run_dir={run}", "watch=0.1"]) == 0
    said = capsys.readouterr().out
    assert said.count("run: ") > 2 and said.count("no headtrain process is working") == 1
    assert time.monotonic() - began < 20
    worker.join()


@pytest.fixture
def restless(run):
    """Files and folders of a stage come and go meanwhile."""
    Manifest(run / "training").open("t", {})
    stop = threading.Event()

    def work():
        while not stop.is_set():
            place = run / "training" / "checkpoints" / "step-1"
            place.mkdir(parents=True)
            for n in range(20):
                (place / f"{n}.part").write_bytes(bytes(10))
            shutil.rmtree(run / "training" / "checkpoints")

    worker = threading.Thread(target=work)
    worker.start()
    yield
    stop.set()
    worker.join()


def test_files_may_come_and_go_while_they_are_counted(run, restless):
    watch, sizes = status.Watch(run), set()
    for _ in range(60):
        sizes.add(watch.look()["stages"]["training"].bytes)
    assert len(sizes) > 1


def test_nothing_heavy_is_imported(run, environment):
    script = "import sys; from headtrain.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    call = [sys.executable, "-c", script, "status", f"run_dir={run}"]
    done = subprocess.run(call, capture_output=True, text=True, env=environment, check=False)
    assert "2 of 5 prompts" in done.stdout and done.stdout.endswith("False\n"), done.stderr


@pytest.mark.parametrize("words", [["watch=0"], ["watch=soon"], ["watch=nan"], ["watch=inf"], ["json=yes"]])
def test_wrong_words_are_one_line(words, run, capsys):
    assert cli.main(["status", f"run_dir={run}", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and words[0] in said and said.count("\n") == 1


@pytest.mark.parametrize("content", [(), ("report.json",)])
def test_a_folder_that_is_no_run_is_refused(content, tmp_path, capsys):
    for name in content:
        (tmp_path / name).write_text("{}")
    assert cli.main(["status", f"run_dir={tmp_path}"]) == 2
    assert "no run folder (no config.yaml)" in capsys.readouterr().err


def test_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    for n, stage in enumerate(identity.STAGES):
        said = status.text(status.Watch(tmp_path).look())
        assert said.count("under way") == n and said.count("not started") == len(identity.STAGES) - n
        Manifest(tmp_path / stage).open("mark", {})
    assert status.text(status.Watch(tmp_path).look()).count("under way") == len(identity.STAGES)


def test_status_does_not_keep_a_run_from_starting(tmp_path):
    lock = tmp_path / ".lock"
    assert not held(lock) and not lock.exists()
    with claimed(lock) as mine:
        assert mine and held(lock)
    assert not held(lock)


def test_rows_that_are_read_are_counted_meanwhile(tmp_path, monkeypatch):
    from headtrain.config import DataConfig, PromptSource, RecipeConfig
    from headtrain.data_gen import prompts

    source = tmp_path / "rows.jsonl"
    source.write_text("".join(f'{{"prompt": "What is {n}?"}}\n' if n % 3 else "{}\n" for n in range(40)))
    Manifest(tmp_path / "run" / "prompts").open("p", {})
    (tmp_path / "run" / "config.yaml").write_text("{}")
    monkeypatch.setattr(prompts, "TOLD", 10)
    seen, original = [], prompts.write_json

    def told(path, value):
        original(path, value)
        seen.append(status.Watch(tmp_path / "run").look()["stages"]["prompts"])

    monkeypatch.setattr(prompts, "write_json", told)
    config = RecipeConfig(data=DataConfig(prompts=[PromptSource(str(source))]))
    prompts.gather(config, tmp_path / "run" / "prompts")
    assert [state.what for state in seen] == ["10 rows read"]  # the next would be due two seconds later
    assert sum(seen[0].left_out.values()) == 3  # 0, 3 and 6 (9 is not looked at yet)
    assert not (tmp_path / "run" / "prompts" / prompts.READING).exists()


def test_training_and_report_under_way(run):
    (run / "training").mkdir()
    Manifest(run / "training").open("t", {})
    row = {"step": 40, "share": 0.25, "loss": 2.5, "tau": 1.6, "tokens_per_s": 900.0, "left_s": 75.0, "skipped": 2}
    (run / "training" / "log.jsonl").write_text(json.dumps(row) + "\n")
    Manifest(run / "report").open("u", {})
    write_json(run / "report" / "plan.json", {"units": 10})
    (run / "report" / "units").mkdir()
    for n in range(4):
        (run / "report" / "units" / f"{n}.json").write_text("{}")
        os.utime(run / "report" / "units" / f"{n}.json", (1000 + 20 * n, 1000 + 20 * n))
    with claimed(run / ".lock"):
        found = status.Watch(run).look()
    said = status.text(found)
    assert "training   under way 25 %  step 40, loss 2.500, tau 1.600, 900 tokens/s, about 1:15 left" in said
    assert "; left out: skipped 2" in said
    assert "report     under way 40 %  unit 4/10, about 2:00 left" in said


# ------------------------------------------------------------------------------------------------- what is noted

def test_the_pace_is_that_of_the_last_minute(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: now[0])
    pace = claims.Pace()
    for _ in range(100):  # slow, 10 tokens/s
        now[0] += 2
        pace.add(20)
    assert pace.rate() == pytest.approx(10)
    for _ in range(40):  # then fast, 50 tokens/s
        now[0] += 2
        pace.add(100)
    assert pace.rate() == pytest.approx(50)
    now[0] += 60
    assert pace.rate() < 30  # nothing for a minute
    assert len(pace.counts) < 40


def test_many_small_steps_keep_the_pace_small_in_memory(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: now[0])
    pace = claims.Pace()
    for _ in range(20000):
        now[0] += 0.01
        pace.add(3)
    assert pace.rate() == pytest.approx(300, rel=0.05) and len(pace.counts) <= claims.WINDOW + 3


def test_what_is_finished_is_read_once(run, monkeypatch):
    memory = {}
    before, read = respond.status(run / "responses", memory), []
    original = claims.read_json
    monkeypatch.setattr(claims, "read_json", lambda path: read.append(path.name) or original(path))
    monkeypatch.setattr(respond, "read_json", lambda path: read.append(path.name))
    assert respond.status(run / "responses", memory) == before
    assert read == ["1.json"]


def test_a_progress_line_shows_the_time_left_that_is_known():
    assert children.line("responses", Progress(10, 100, "x", 600.0), 5).endswith("0:05 gone, about 10:00 left")
    assert children.line("responses", Progress(10, 100, "x"), 5).endswith("0:05 gone, about 0:45 left")
    assert children.line("responses", Progress(100, 100, "x", 0.0), 5).endswith("0:05 gone")
