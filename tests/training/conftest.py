"""Fixtures of the trainer's tests: the toy of toy.py, trained in this process (which stays a run of one process)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

TOY = Path(__file__).with_name("toy.py")


def _load_toy():
    spec = importlib.util.spec_from_file_location("headtrain_toy", TOY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def toy():
    return _load_toy()


@pytest.fixture
def train(toy, monkeypatch):
    """train(run, **options): makes the toy run when it is missing, trains it here; returns the log's lines."""
    from headtrain.training import trainer

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")  # so that what the trainer sets is taken back after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(trainer, "build_head", toy.toy_head)
    monkeypatch.setattr(trainer, "leave", lambda: None)  # the process group serves all tests of this process

    def run_it(run: Path, **options):
        if not (run / "captures").is_dir():
            toy.make_run(run)
        trainer.train(toy.recipe(**options), run)
        return [json.loads(line) for line in (run / "training" / "log.jsonl").read_text().splitlines()]

    return run_it


@pytest.fixture
def weights():
    """weights(run): the fp32 weights and the buffers in the newest checkpoint."""
    from safetensors.torch import load_file

    def read(run: Path):
        return load_file(sorted((run / "training" / "checkpoints").glob("step-*"))[-1] / "weights.safetensors")

    return read


@pytest.fixture
def free_port() -> int:
    from headtrain.training.ranks import free_port

    return int(free_port())
