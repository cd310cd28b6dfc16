"""Checkpoints: whole or absent, bit-identical resume, clear refusals."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headtrain.files import DiskFull
from headtrain.training.checkpoint import VERSION, CheckpointError, accumulation, damage, latest

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
        {"zero_stage": 3, "accumulate": 2},
        {"zero_stage": 3, "freeze_lm_head": True},
        {"zero_stage": 3, "precision": "bf16", "ema": 0.9},
        {"ema": 0.9, "noise": 0.1, "spike": 1.5},
        {"lora": 4},
        {"lora": 4, "precision": "bf16", "zero_stage": 2, "accumulate": 2},
        {"lora": 4, "precision": "bf16", "zero_stage": 3, "ema": 0.9},
        {"optimizer": "muon"},
        {"optimizer": "muon", "precision": "bf16"},
    ],
    ids=str,
)
def test_a_resumed_run_ends_with_the_weights_of_an_unbroken_one(toy, train, tmp_path, options):
    options = {"steps": 9, "save_every": 3, "keep": 9, "eval_every": 4, "log_every": 1} | options
    unbroken = train(tmp_path / "a", **options)
    toy.make_run(tmp_path / "b")
    shutil.copytree(tmp_path / "a" / "training", tmp_path / "b" / "training")  # as if killed after step 5
    for step in (6, 9):
        shutil.rmtree(tmp_path / "b" / "training" / "checkpoints" / f"step-{step:08d}")
    resumed = train(tmp_path / "b", **options)
    for file in ("weights", "exp_avg", "momentum_buffer", "ema"):
        held = [tmp_path / run / "training" / "checkpoints" / "step-00000009" / f"{file}.safetensors" for run in "ab"]
        assert held[0].is_file() == held[1].is_file()
        assert not held[0].is_file() or same(*map(load_file, held)), file
    for key in ("step", "loss", "lr", "tau", "epoch", "grad_norm"):
        assert [line.get(key) for line in unbroken] == [line.get(key) for line in resumed]


def test_a_checkpoint_that_finds_no_room_leaves_the_one_before_and_the_run_goes_on(toy, train, weights, tmp_path):
    options = {"steps": 9, "save_every": 3, "keep": 9, "eval_every": 100, "log_every": 3}
    train(tmp_path / "a", **options)
    toy.make_run(tmp_path / "b")
    shutil.copytree(tmp_path / "a" / "training", tmp_path / "b" / "training")  # as if stopped after step 3
    folder = tmp_path / "b" / "training" / "checkpoints"
    for step in (6, 9):
        shutil.rmtree(folder / f"step-{step:08d}")
    most = (folder / "step-00000003" / "exp_avg.safetensors").stat().st_size - 1
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))  # a full disk's portable relative
    try:
        with pytest.raises(DiskFull, match=r"step-00000006.*: no larger file is allowed here.*the same command again"):
            train(tmp_path / "b", **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    train(tmp_path / "b", **options)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(toy, train, weights, tmp_path, capsys):
    options = {"steps": 40, "save_every": 10, "log_every": 20, "seed": 7}
    toy.make_run(tmp_path / "b")
    killed = subprocess.run(
        [sys.executable, TOY, str(tmp_path / "b"), json.dumps(options | {"kill_at": 30})],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "b" / "training" / "checkpoints" / ".step-00000030.part").is_dir()
    train(tmp_path / "a", **options)
    capsys.readouterr()
    train(tmp_path / "b", **options)
    said = capsys.readouterr().out
    assert "ignoring the half-written checkpoint step-00000030" in said
    assert "step-00000020: going on from step 20" in said
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
        (newest / "exp_avg.safetensors").unlink()
    elif harm == "shorter":
        with open(newest / "head" / "model.safetensors", "r+b") as handle:
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
    held = {path.stem: load_file(path) for path in place.glob("*.safetensors")}
    parameters = {name for name, _ in head.named_parameters()}
    assert set(held) == {"weights", "exp_avg", "exp_avg_sq"}
    assert held["weights"].keys() == head.state_dict().keys()
    assert held["exp_avg"].keys() == held["exp_avg_sq"].keys() == parameters
    assert all(tensors[name].dtype == torch.float32 for tensors in held.values() for name in parameters)
    count = sum(p.numel() for p in head.parameters())
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    assert size < (14 if precision == "bf16" else 16) * count + 16_000  # the rest: headers, buffers, config


def test_the_head_in_a_checkpoint_is_the_trained_one_in_the_layout_that_is_served(toy, train, weights, tmp_path):
    train(tmp_path, steps=3, save_every=3)
    served = toy.read_head(next((tmp_path / "training" / "checkpoints").iterdir()) / "head")
    held = weights(tmp_path)
    assert torch.equal(served.fc.weight, held["fc.weight"] * held["feature_scale"])
    assert torch.equal(served.lm_head.weight, held["lm_head.weight"])


def test_a_number_of_processes_that_cannot_share_the_micro_batches_is_refused_with_a_way_out(tmp_path):
    place = tmp_path / "step-00000002"
    place.mkdir()
    (place / "state.json").write_text(json.dumps({"version": VERSION, "world": 4, "parts": 8}))
    assert [accumulation(place, 2, world) for world in (1, 2, 4, 8)] == [8, 4, 2, 1]
    with pytest.raises(CheckpointError, match=r"4 processes with 8 micro-batches .* 3 processes .*divides 8"):
        accumulation(place, 2, 3)
    with pytest.raises(CheckpointError, match=r"set train.accumulate=2"):
        accumulation(place, 1, 4)


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


@pytest.mark.parametrize("name", ["weights.safetensors", "exp_avg_sq.safetensors", "head/model.safetensors"])
@pytest.mark.parametrize("where", [10, -3])
def test_a_checkpoint_with_one_wrong_byte_is_passed_over_for_an_older_one(train, tmp_path, name, where):
    train(tmp_path, steps=4, save_every=2)
    older, newest = sorted((tmp_path / "training" / "checkpoints").glob("step-*"))
    data = bytearray((newest / name).read_bytes())
    data[where] ^= 1
    (newest / name).write_bytes(data)
    said = []
    assert latest(newest.parent, said.append) == older
    assert said == [f"ignoring the checkpoint {newest.name}: {name} is damaged (its checksum differs)"]
