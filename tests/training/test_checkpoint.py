"""Checkpoints: whole or absent, bit-identical resume, clear refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headtrain.training.checkpoint import CheckpointError, damage, latest

TOY = str(Path(__file__).with_name("toy.py"))


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16", "accumulate": 2},
        {"zero_stage": 1},
        {"zero_stage": 2, "precision": "bf16"},
        {"optimizer": "muon"},
        {"optimizer": "muon", "precision": "bf16"},
    ],
    ids=str,
)
def test_a_resumed_run_ends_with_the_weights_of_an_unbroken_one(train, weights, tmp_path, options):
    options = {"steps": 9, "save_every": 3, "eval_every": 4, "log_every": 1} | options
    unbroken = train(tmp_path / "a", **options)
    train(tmp_path / "b", **options)
    for step in (6, 9):  # as if killed after step 5
        shutil.rmtree(tmp_path / "b" / "training" / "checkpoints" / f"step-{step:08d}")
    early = _saved_early(train, tmp_path, options)
    shutil.copytree(early, tmp_path / "b" / "training" / "checkpoints", dirs_exist_ok=True)
    resumed = train(tmp_path / "b", **options)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    for key in ("step", "loss", "lr", "tau", "epoch"):
        assert [line.get(key) for line in unbroken] == [line.get(key) for line in resumed]


def _saved_early(train, tmp_path, options):
    """The checkpoint folder of the same run as it was after step 3."""
    train(tmp_path / "c", **(options | {"keep": 9}))
    folder = tmp_path / "c" / "training" / "checkpoints"
    for step in (6, 9):
        shutil.rmtree(folder / f"step-{step:08d}")
    return folder


def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(toy, train, weights, tmp_path, capsys):
    options = {"steps": 8, "save_every": 2, "seed": 3}
    toy.make_run(tmp_path / "b")
    killed = subprocess.run(
        [sys.executable, TOY, str(tmp_path / "b"), json.dumps(options | {"kill_at": 6})],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "b" / "training" / "checkpoints" / ".step-00000006.part").is_dir()
    train(tmp_path / "a", **options)
    capsys.readouterr()
    train(tmp_path / "b", **options)
    said = capsys.readouterr().out
    assert "ignoring the half-written checkpoint step-00000006" in said
    assert "step-00000004: going on from step 4" in said
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not list((tmp_path / "b" / "training" / "checkpoints").glob(".*"))


def test_only_the_last_checkpoints_are_kept(train, tmp_path):
    train(tmp_path, steps=10, save_every=2, keep=3)
    names = sorted(p.name for p in (tmp_path / "training" / "checkpoints").iterdir())
    assert names == ["step-00000006", "step-00000008", "step-00000010"]


def test_a_finished_run_writes_the_same_head_again(train, tmp_path):
    train(tmp_path, steps=4)
    before = (tmp_path / "head" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "head")
    train(tmp_path, steps=4)
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("harm", ["missing", "shorter", "unreadable"])
def test_a_damaged_checkpoint_is_passed_over_with_a_message(train, tmp_path, harm):
    train(tmp_path, steps=4, save_every=2)
    folder = tmp_path / "training" / "checkpoints"
    newest = folder / "step-00000004"
    if harm == "missing":
        next((newest / "engine").iterdir()).unlink()
    elif harm == "shorter":
        with open(newest / "head.safetensors", "r+b") as handle:
            handle.truncate(50)
    else:
        (newest / "state.json").write_text("{")
    said = []
    assert latest(folder, said.append).name == "step-00000002"
    assert len(said) == 1 and "step-00000004" in said[0]
    assert damage(folder / "step-00000002") is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_holds_the_head_and_nothing_of_the_target(toy, train, tmp_path, precision):
    train(tmp_path, steps=2, precision=precision)
    place = next((tmp_path / "training" / "checkpoints").iterdir())
    head = toy.toy_head()
    held = load_file(place / "head.safetensors")
    assert held.keys() == head.state_dict().keys()
    assert all(held[name].dtype == torch.float32 for name, _ in head.named_parameters())
    parameters = sum(p.numel() for p in head.parameters())
    names = ("*_states.pt", "head.safetensors")
    size = sum(path.stat().st_size for name in names for path in place.rglob(name))
    assert 12 * parameters < size < 20 * parameters + 40_000  # the rest: headers, generator states


def test_another_number_of_processes_is_refused_with_a_way_out(train, tmp_path):
    train(tmp_path, steps=2, save_every=2)
    path = tmp_path / "training" / "checkpoints" / "step-00000002" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"world": 2}))
    with pytest.raises(CheckpointError, match=r"written by 2 processes and this run has 1.*gpus=2.*head.init_from"):
        train(tmp_path, steps=4)


def test_another_draft_vocab_or_other_rows_are_refused(toy, train, tmp_path, monkeypatch):
    train(tmp_path, steps=2, save_every=2)
    with pytest.raises(CheckpointError, match="written with data = "):
        train(tmp_path, steps=4, seed=8)
    original = toy.toy_head

    def other(*_):
        head = original()
        head.t2d[:] = head.t2d.flip(0)
        return head

    monkeypatch.setattr(toy, "toy_head", other)
    from headtrain.training import trainer

    monkeypatch.setattr(trainer, "build_head", other)
    with pytest.raises(CheckpointError, match="written with mapping = "):
        trainer.train(toy.recipe(steps=4), tmp_path)
