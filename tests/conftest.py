"""Helpers for the tests at the top of this folder: the command line in a child process, small recipes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment of every child: one thread, no network."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "COLUMNS": "200"}


@pytest.fixture
def headtrain(environment, tmp_path):
    """headtrain(*arguments) -> CompletedProcess of `python -m headtrain …` in an empty folder."""

    def call(*arguments: str, **more) -> subprocess.CompletedProcess:
        options = {"cwd": tmp_path, "env": environment, "timeout": 400} | more
        return subprocess.run(
            [sys.executable, "-m", "headtrain", *arguments], capture_output=True, text=True, check=False, **options
        )

    return call


@pytest.fixture
def recipe(tmp_path) -> Path:
    """A recipe of a tiny llama with three prompts of its own."""
    rows = [{"messages": [{"role": "user", "content": f"Count to {n}."}]} for n in range(3, 6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "target:\n  model: ./model\n  family: llama\n"
        "  shape: {layers: 8, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, intermediate: 128, vocab: 384}\n"
        f"data:\n  prompts: [{tmp_path / 'prompts.jsonl'}]\n"
        "head: {draft_vocab: 128}\ntrain: {steps: 4}\n"
    )
    return path


@pytest.fixture(scope="session")
def mtp_targets():
    """The module mtp_targets.py: tiny targets with an MTP module."""
    place = Path(__file__).with_name("mtp_targets.py")
    spec = importlib.util.spec_from_file_location("headtrain_mtp_targets", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
