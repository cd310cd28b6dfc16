"""On NVIDIA GPUs: online training, with the target on the training process's device and on one of its own."""

from __future__ import annotations

import copy
import json
import os
import subprocess

import pytest
import torch

from headtrain import configload, hardware, pipeline, stages
from headtrain.training import launch

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(config, run folder) of a smoke run whose rows are captured, for a GPU."""
    run = tmp_path_factory.mktemp("online") / "run"
    more = ["smoke=true", f"run_dir={run}", "data.captures.dtype=float32"]
    config = pipeline.prepared(configload.load("eagle3_llama8b", more))
    config.target.device = "auto"
    job = pipeline.Job(config)
    for stage in ("prompts", "responses", "captures"):
        job.open(stage)
    for stage in ("smoke_target", "check", "prompts", "responses", "captures"):
        stages.STAGES[stage](config, run, {"coming": "prompts,responses,captures,training"})
    config.train.batch_tokens, config.train.accumulate, config.train.log_every = 256, 2, 1
    return config, run


def losses(made, folder, mode: str, target: str) -> list[float]:
    config = copy.deepcopy(made[0])
    config.data.captures.mode, config.launch.target, config.run_dir = mode, target, str(folder)
    folder.mkdir()
    for name in ("prompts", "responses", "captures"):
        (folder / name).symlink_to(made[1] / name)
    (folder / "config.yaml").write_text(configload.to_yaml(config))
    argv, env = launch.command(config, ["stage", "training", f"run_dir={folder}"], hardware.gpu_ids())
    ended = subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [json.loads(line) for line in (folder / "training" / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("target", ["same", "apart"])
def test_the_loss_is_that_of_training_on_stored_captures(made, tmp_path, target):
    if target == "apart" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    off = losses(made, tmp_path / "off", "offline", "same")
    assert losses(made, tmp_path / "on", "online", target) == pytest.approx(off, rel=1e-3)
