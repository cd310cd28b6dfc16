"""A folder that is replaced is whole at any moment, also when the process ends in the middle."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from headtrain.files import replacing


def put(folder, text, end=None):
    with replacing(folder) as part:
        (part / "a").write_text(text)
        if end:
            end()


def killed_between_the_renames(folder):
    rename, count = Path.rename, []

    def once(path, target):
        if count:
            os._exit(9)
        count.append(1)
        return rename(path, target)

    Path.rename = once
    put(folder, "new")


def names(folder):
    return sorted(path.name for path in folder.parent.iterdir())


@pytest.mark.parametrize("how", [lambda folder: put(folder, "new", lambda: os._exit(9)), killed_between_the_renames])
def test_a_killed_process_loses_nothing_and_the_next_one_clears_up(how, tmp_path):
    folder = tmp_path / "a[b]"
    put(folder, "old")
    child = multiprocessing.get_context("fork").Process(target=how, args=(folder,))
    child.start()
    child.join()
    assert child.exitcode == 9 and len(names(folder)) > 1
    with pytest.raises(KeyError):
        put(folder, "newer", lambda: {}["no"])
    assert names(folder) == ["a[b]"] and (folder / "a").read_text() == "old"


def test_a_swap_that_fails_puts_the_old_folder_back(tmp_path, monkeypatch):
    folder, rename = tmp_path / "x", Path.rename
    put(folder, "old")

    def refuse(path, target):
        if path.name.endswith(".part"):
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no"):
        put(folder, "new")
    assert names(folder) == ["x"] and (folder / "a").read_text() == "old"


def test_what_a_living_process_writes_is_left_alone(tmp_path):
    other = tmp_path / f".x.{os.getppid()}.part"
    other.mkdir()
    put(tmp_path / "x", "new")
    assert other.is_dir()
