"""A disk without room: one line that names the file, whole files, and the same call goes on after room is made.

On a small file system in memory where this process may mount one, and everywhere by a limit of the files' size.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from headtrain import cli
from headtrain.data_gen import capture, prompts, respond, server, sums
from headtrain.data_gen.store import CaptureStore, ResponseStore
from headtrain.files import DiskFull, Manifest, room_for, write_json, writing


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a few pages; .grow(bytes) makes room."""
    place, size = tmp_path / "small", 0
    place.mkdir()

    def mount(options):
        return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True)

    def grow(more):
        nonlocal size
        size += more
        done = mount(f"remount,size={size}")
        assert done.returncode == 0, done.stderr

    if os.geteuid() != 0 or (done := mount("size=4096")).returncode:
        pytest.skip(f"no file system can be mounted here: {'not root' if os.geteuid() else done.stderr.strip()}")
    yield SimpleNamespace(place=place, grow=grow)
    subprocess.run(["umount", "-l", place], check=True)


@contextmanager
def files_up_to(size):
    """Writing beyond `size` bytes of a file fails, as on a full disk (another error number)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(autouse=True)
def free_space_is_not_known(monkeypatch):
    """As with a quota, or other users of the disk: the watch before a batch sees nothing."""
    monkeypatch.setattr(capture, "free_bytes", lambda folder: 10**12)
    monkeypatch.setattr(respond, "free_bytes", lambda folder: 10**12)


def generate(recipe, target, run):
    folders = [run / name for name in ("prompts", "responses", "captures")]
    if not Manifest(folders[0]).data.get("complete"):
        Manifest(folders[0]).open("p", {})
        prompts.gather(recipe, folders[0])
    for folder in folders[1:]:
        Manifest(folder).open("r", {})
    respond.work(recipe, target, *folders, (1, 2, 4))
    if not Manifest(folders[1]).data.get("complete"):
        respond.finish(recipe, *folders[1:])
    if not Manifest(folders[2]).data.get("complete"):
        capture.finish(recipe, *folders[1:])


def check_whole(run):
    assert not list(run.rglob("*.part"))
    for kind in ("responses", "captures"):
        for path in (run / kind).glob("*.safetensors"):
            assert sums.damage(path, None) == ""
    for path in run.rglob("*.json"):
        assert path.read_text().endswith("\n"), path


def same_data(one, other):
    assert (one / "prompts" / "prompts.jsonl").read_bytes() == (other / "prompts" / "prompts.jsonl").read_bytes()
    for kind, opens in (("responses", ResponseStore), ("captures", CaptureStore)):
        ours, theirs = opens(one / kind), opens(other / kind)
        assert [row.id for row in ours.rows] == [row.id for row in theirs.rows]
        assert Manifest(one / kind).data["counts"] == Manifest(other / kind).data["counts"]
        for a, b in zip(ours.rows, theirs.rows, strict=True):
            found, expected = vars(ours.read(a)), vars(theirs.read(b))
            assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_a_run_that_finds_no_room_again_and_again_ends_as_on_a_large_disk(
    dtype, recipe, tiny_target, small_disk, tmp_path
):
    recipe.data.captures.dtype = dtype
    generate(recipe, tiny_target, tmp_path / "large")
    run, named = small_disk.place / "run", set()
    for _ in range(400):
        small_disk.grow(12 << 10)
        try:
            generate(recipe, tiny_target, run)
            break
        except OSError as error:
            assert cli.is_users(error) and error.errno == errno.ENOSPC
            if isinstance(error, DiskFull):
                named.add(os.path.basename(error.filename).rstrip("0123456789-.safetnor") or error.filename)
                assert "the disk is full; make room and run the same command again" in str(error)
        check_whole(run)
    else:
        pytest.fail("it never ended")
    same_data(run, tmp_path / "large")
    assert len(named) >= 3, named
    assert {name for name in named if name.startswith("captures-")}


@pytest.mark.parametrize("size", [500, 3000, 20_000])
def test_a_limit_of_the_files_size_is_said_and_when_it_is_lifted_the_run_goes_on(size, recipe, tiny_target, tmp_path):
    generate(recipe, tiny_target, tmp_path / "large")
    run = tmp_path / "run"
    with files_up_to(size), pytest.raises(DiskFull) as error:
        generate(recipe, tiny_target, run)
    assert error.value.errno == errno.EFBIG and error.value.filename.startswith(str(run))
    assert "no larger file is allowed here (ulimit -f, the file system); allow it and run the same" in str(error.value)
    check_whole(run)
    generate(recipe, tiny_target, run)
    same_data(run, tmp_path / "large")


def answers(journal):
    return {key: (ids.tolist(), finish) for key, (ids, finish) in journal.known.items()}


@pytest.mark.parametrize("limit", [0, 1, 100, 333])
def test_an_answer_that_found_no_room_costs_no_other(limit, tmp_path):
    """`limit` bytes more than the first three answers take; a shorter answer may still find room."""
    path, everyone = tmp_path / server.JOURNAL, {f"p{n}" for n in range(9)}
    journal = server.Journal(path, everyone)
    for n in range(3):
        journal.add(f"p{n}", 0, list(range(50)), "stop")
    with files_up_to(path.stat().st_size + limit):
        with pytest.raises(DiskFull, match=r"answers\.jsonl: no larger file is allowed here.*the same command again"):
            journal.add("p3", 0, list(range(1000)), "stop")
        if limit > 60:
            journal.add("p4", 0, [1], "stop")
    journal.close()
    assert path.read_bytes().endswith(b"\n")
    again = server.Journal(path, everyone)
    expected = {(f"p{n}", 0): (list(range(50)), "stop") for n in range(3)}
    expected |= {("p4", 0): ([1], "stop")} if limit > 60 else {}
    assert answers(again) == expected and again.answers == len(expected)
    again.add("p3", 0, list(range(1000)), "length")
    again.close()
    assert answers(server.Journal(path, everyone)) == expected | {("p3", 0): (list(range(1000)), "length")}


def test_the_answers_on_a_full_disk(small_disk):
    small_disk.grow(8 << 10)
    path, everyone = small_disk.place / server.JOURNAL, {f"p{n}" for n in range(999)}
    journal, kept = server.Journal(path, everyone), 0
    with pytest.raises(DiskFull, match=r"answers\.jsonl: the disk is full; make room"):
        for n in range(999):
            journal.add(f"p{n}", 0, list(range(50)), "stop")
            kept += 1
    journal.close()
    assert kept > 10
    small_disk.grow(64 << 10)
    again = server.Journal(path, everyone)
    assert again.answers == kept
    again.add(f"p{kept}", 0, [1], "stop")
    again.close()
    assert server.Journal(path, everyone).answers == kept + 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_whoever_wrote_it_no_room_is_one_kind_of_error_and_all_others_stay(number, tmp_path, capsys, monkeypatch):
    from safetensors import SafetensorError

    for error in (OSError(number, "x"), SafetensorError(f"I/O error: something (os error {number})")):
        with pytest.raises(DiskFull) as found, room_for(tmp_path / "a"), room_for(tmp_path / "b"):
            raise error
        assert str(found.value).startswith(f"{tmp_path / 'b'}: ") and found.value.errno == number
    for error in (OSError(errno.EACCES, "x"), ValueError("os error 28"), KeyError(number)):
        with pytest.raises(type(error)), room_for(tmp_path / "a"):
            raise error

    def fail(argv):
        raise OSError(number, "x", "/some/file")

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: /some/file: ") and said.endswith("which goes on from here\n")
    assert said.count("\n") == 1


def test_a_file_that_finds_no_room_leaves_the_old_one(tmp_path):
    write_json(tmp_path / "a.json", {"old": 1})
    with files_up_to(100), pytest.raises(DiskFull):
        write_json(tmp_path / "a.json", {"new": "x" * 1000})
    with pytest.raises(DiskFull), writing(tmp_path / "a.json"), open("/dev/full", "w") as handle:
        handle.write("x" * 100_000)
    assert (tmp_path / "a.json").read_text() == '{\n "old": 1\n}\n' and len(list(tmp_path.iterdir())) == 1
