"""A damaged store: what is damaged is named where it is read, and the next start makes exactly that again."""

from __future__ import annotations

import shutil

import pytest
import torch

from headtrain import configload, pipeline, stages
from headtrain.config import ConfigError
from headtrain.data_gen import store, sums
from headtrain.data_gen.store import CaptureStore, ResponseStore, StoreError
from headtrain.files import Manifest, read_json, write_json

KINDS = {"responses": ResponseStore, "captures": CaptureStore}


def in_process(job, names, environments, missing):
    """Instead of Job.start: the stages right here."""
    job.open("captures")
    for name in names:
        stages.STAGES[name](job.config, job.run, {"coming": ",".join(missing)})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run of four batches or more."""
    run = tmp_path_factory.mktemp("made") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.Job, "start", in_process)
        job_of(run).run_missing(pipeline.DATA)
    assert len(list((run / "captures").glob("*.safetensors"))) >= 4
    return run


@pytest.fixture
def run(made, tmp_path, monkeypatch):
    """A copy of it, in which stages run in this process."""
    monkeypatch.setattr(pipeline.Job, "start", in_process)
    shutil.copytree(made, tmp_path / "run")  # with the times of the files
    return tmp_path / "run"


def job_of(run, *more):
    asked = configload.load("eagle3_llama8b", [
        "smoke=true", f"run_dir={run}", f"target.model={run.parent / 'target'}", "data.responses.batch_tokens=600",
        "data.responses.max_new_tokens=4", "data.captures.dtype=float32", *more,
    ])  # fmt: skip
    job = pipeline.Job(pipeline.prepared(asked))
    job.config.data.responses.batch_tokens, job.config.data.responses.max_new_tokens = 600, 4
    return pipeline.Job(job.config)


def contents(run, kind):
    """Row id -> copies of what the store gives for it (a file is damaged in its place, mapped or not)."""
    opened = KINDS[kind](run / kind)
    return {row.id: {name: t.clone() for name, t in vars(opened.read(row)).items()} for row in opened.rows}


def written(run):
    return {path: path.stat().st_mtime_ns for kind in KINDS for path in (run / kind).glob("*.safetensors")}


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def header_end(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


DAMAGE = {
    "a byte of the header's length": lambda path: flip(path, 1),
    "a byte of the header": lambda path: flip(path, 40),
    "a byte of the last row's name": lambda path: flip(path, path.read_bytes().rindex(b'\\"split\\"') - 10),
    "a byte of the first tensor": lambda path: flip(path, header_end(path) + 3),
    "a byte of the last tensor": lambda path: flip(path, -3),
    "cut in the data": lambda path: path.write_bytes(path.read_bytes()[:-50]),
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}  # fmt: skip


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_one_damaged_file_is_named_and_made_again_and_nothing_else(kind, how, finished, run, capsys):
    before, places = {kind: contents(run, kind) for kind in KINDS}, written(run)
    if not finished:  # as if it had been stopped before the end
        (run / kind / "index.json").unlink()
        Manifest(run / kind).reopen()
    path = run / kind / f"{kind}-00002.safetensors"
    DAMAGE[how](path)
    if finished:
        with pytest.raises(StoreError, match=rf"{path.name} .*`headtrain generate` with the run's arguments makes it"):
            contents(run, kind)
    job_of(run).run_missing(pipeline.DATA)
    said = capsys.readouterr().out
    assert all(Manifest(run / kind).data["complete"] for kind in KINDS)
    if finished or how != "gone":
        assert f"{kind}: {path.name} is " in said and "making it again" in said
    again = {path, run / "captures" / "captures-00002.safetensors"}
    assert {path for path, time in written(run).items() if places[path] != time} == again
    for kind, rows in before.items():
        found = contents(run, kind)
        assert found.keys() == rows.keys()
        for name, row in rows.items():
            torch.testing.assert_close(found[name], row, atol=1e-4, rtol=1e-4)
    times = written(run)
    job_of(run).run_missing(pipeline.DATA)
    assert not capsys.readouterr().out and written(run) == times


INDEX = {
    "a digit of a checksum": lambda text: text.replace('"sha256": "', '"sha256": "0')[:-1],
    "a file's name": lambda text: text.replace("-00001.", "-00009."),
    "a fact": lambda text: text.replace('"version": 1', '"version": 3'),
    "not JSON": lambda text: text.replace("{", "(", 1),
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "of another kind": lambda text: "[]",
}


@pytest.mark.parametrize("how", [*INDEX, "gone"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_index_is_made_again_from_whole_files(kind, how, run, capsys):
    places, index = written(run), run / kind / "index.json"
    text = index.read_text()
    if how == "gone":
        index.unlink()
    else:
        index.write_text(INDEX[how](text))
    with pytest.raises(ConfigError, match=rf"{kind} is missing, unfinished, damaged.*`headtrain generate` makes it"):
        job_of(run).need(pipeline.DATA)
    job_of(run).run_missing(pipeline.DATA)
    assert f"{kind}: index.json " in capsys.readouterr().out
    assert index.read_text() == text and written(run) == places
    job_of(run).need(pipeline.DATA)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_cannot_be_read_is_made_again_and_no_file_is(kind, text, run, capsys, monkeypatch):
    monkeypatch.setattr(store, "tokens_of_start", lambda taps, hidden: 10)  # not every batch has rows to capture
    online = "data.captures.mode=online"
    job_of(run, online).run_missing(pipeline.DATA)
    places, plan = written(run), run / kind / "plan.json"
    before = plan.read_text()
    assert len(list((run / "captures").glob("*.safetensors"))) < len(list((run / "responses").glob("*.safetensors")))
    plan.write_text(text, encoding="latin-1")
    capsys.readouterr()
    job_of(run, online).run_missing(pipeline.DATA)
    assert f"{kind}: plan.json cannot be read; making it again" in capsys.readouterr().out
    assert plan.read_text() == before and written(run) == places
    job_of(run, online).need(pipeline.DATA)


def test_a_damaged_file_is_found_although_the_index_is_gone(run, capsys):
    before = contents(run, "captures")
    (run / "captures" / "index.json").unlink()
    flip(run / "captures" / "captures-00001.safetensors", -3)
    job_of(run).run_missing(pipeline.DATA)
    assert "captures-00001.safetensors is damaged" in capsys.readouterr().out
    torch.testing.assert_close(contents(run, "captures"), before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["taps", "last", "logsumexp"])
def test_a_row_that_is_read_as_not_finite_is_named_and_captured_again(name, run, capsys):
    from safetensors.torch import load_file

    folder, before, places = run / "captures", contents(run, "captures"), written(run)
    path = folder / "captures-00001.safetensors"
    rows, facts = store.read_header(path)
    tensors = load_file(path)
    tensors[name].view(-1)[-1] = float("nan")
    del tensors["offsets"]
    store.write_unit(folder, "captures", 1, rows, tensors, **facts)
    index = store.write_index(folder, "captures", len(read_json(folder / "index.json")["files"]))
    Manifest(folder).finish({}, index=sums.sha256_file(folder / "index.json"))
    assert index["files"][1]["file"] == path.name
    job_of(run).run_missing(pipeline.DATA)
    assert not capsys.readouterr().out  # nobody has read it yet
    with pytest.raises(StoreError, match=rf"{path.name} has values in `{name}` of row {rows[-1].id} that are not fin"):
        contents(run, "captures")
    job_of(run).run_missing(pipeline.DATA)
    assert f"captures: {path.name} has values in `{name}` of row {rows[-1].id}" in capsys.readouterr().out
    torch.testing.assert_close(contents(run, "captures"), before, atol=1e-4, rtol=1e-4)
    assert [path.name for path, time in written(run).items() if places[path] != time] == [path.name]


def test_what_a_store_says_of_its_files_may_be_damaged_or_gone_too(run, capsys):
    for place, text in zip(sorted((run / "captures" / "sums").iterdir()), ("", "[]", '{"sha256": 1}'), strict=False):
        place.write_text(text)
    shutil.rmtree(run / "responses" / "sums")
    assert contents(run, "captures") and contents(run, "responses")
    times = written(run)
    job_of(run).run_missing(pipeline.DATA)
    assert written(run) == times and not capsys.readouterr().out


def test_a_store_that_is_only_read_is_read(run, monkeypatch):
    def refuse(path, value):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(sums, "write_json", refuse)
    shutil.rmtree(run / "captures" / "sums")
    assert contents(run, "captures")


def test_many_bytes_to_compare_are_announced(run, monkeypatch, capsys):
    monkeypatch.setattr(sums, "MUCH", 1000)
    shutil.rmtree(run / "captures" / "sums")
    job_of(run).run_missing(pipeline.DATA)
    assert "captures: comparing 0 GB with their checksums" in capsys.readouterr().out
    write_json(run / "captures" / "x.json", {})
    job_of(run).run_missing(pipeline.DATA)
    assert not capsys.readouterr().out
