"""Schedules, the clock, optimizer groups and refused settings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from headtrain.config import TrainConfig
from headtrain.training import optim
from headtrain.training.batches import Plan
from headtrain.training.optim import Clock, check_optimizer, engine_config, lr_at, make_optimizer


def test_the_schedule_counts_optimizer_steps():
    """960 rows, 2 processes, 2 rows per micro-batch, accumulation 4, 3 epochs, 5 % warm-up, cosine to 0."""
    total = Plan([10] * 960, 20, seed=0, parts=2 * 4).steps_of(3)
    assert total == 180 == Plan([10] * 960, 80, seed=0, parts=2).steps_of(3)
    warmup = round(0.05 * total)
    assert warmup == 9
    worked = {1: 1.111111e-05, 9: 1.0e-04, 90: 5.412897e-05, 91: 5.321287e-05, 180: 0.0}
    for step, lr in worked.items():
        assert 1e-4 * lr_at(step, total, warmup, "cosine") == pytest.approx(lr, abs=5e-11)


@pytest.mark.parametrize(
    ("kind", "middle", "end"), [("linear", 0.5, 0.0), ("wsd", 1.0, 0.0), ("constant", 1.0, 1.0), ("cosine", 0.5, 0.0)]
)
def test_schedules_have_their_shape(kind, middle, end):
    assert lr_at(5, 110, 10, kind) == 0.5
    assert lr_at(10, 110, 10, kind) == 1.0
    assert lr_at(60, 110, 10, kind) == pytest.approx(middle)
    assert lr_at(110, 110, 10, kind) == pytest.approx(end)


def test_wsd_falls_linearly_over_the_last_fifth():
    assert [round(lr_at(step, 100, 0, "wsd"), 6) for step in (79, 80, 90, 95, 100)] == [1, 1, 0.5, 0.25, 0]


def test_min_lr_is_the_floor():
    assert lr_at(100, 100, 0, "cosine", 0.1) == pytest.approx(0.1)
    assert lr_at(50, 100, 0, "linear", 0.1) == pytest.approx(0.55)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="cosine, linear, wsd, constant"):
        lr_at(5, 10, 0, "poly")


def test_a_time_budget_drives_the_schedule_to_its_end(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(optim, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = Clock(None, seconds=60, warmup=0.1, elapsed=30.0)  # resumed after half of the time
    assert clock.progress(0) == pytest.approx(0.5)
    now[0] += 15
    assert clock.progress(0) == pytest.approx(0.75)
    assert clock.share(0.75, 1, "linear", 0.0) == pytest.approx(0.25 / 0.9)
    now[0] += 15
    assert clock.progress(0) == 1.0 and clock.share(1.0, 1, "linear", 0.0) == 0.0
    assert clock.elapsed == pytest.approx(60)


def test_steps_and_time_together_end_with_whichever_is_first(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(optim, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = Clock(steps=10, seconds=100, warmup=0.0)
    assert clock.progress(4) == pytest.approx(0.4)
    now[0] = 90
    assert clock.progress(4) == pytest.approx(0.9)
    clock.reserve = 10  # a last evaluation needs ten seconds
    assert clock.progress(4) == 1.0


def test_a_run_without_an_end_is_refused():
    with pytest.raises(ValueError, match="how long to train is not set"):
        Clock(None, None, 0.1)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.lm_head = nn.Linear(4, 4, bias=False), nn.Linear(4, 6, bias=False)
        self.norm = nn.Parameter(torch.ones(4))
        self.fixed = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def test_norms_are_not_decayed_and_frozen_weights_not_trained():
    head = Small()
    optimizer = make_optimizer(head, TrainConfig(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(head.fc.weight): 0.1, id(head.lm_head.weight): 0.1, id(head.norm): 0.0}


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw():
    head = Small()
    optimizer = make_optimizer(head, TrainConfig(optimizer="muon", muon_lr=0.02, lr=0.003))
    found = {id(p): (group["use_muon"], group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    adam = (False, 0.003)
    assert found == {id(head.fc.weight): (True, 0.02), id(head.lm_head.weight): adam, id(head.norm): adam}


def test_settings_that_deepspeed_would_change_are_refused_with_the_reason():
    for stage, precision in ((1, "fp32"), (2, "bf16")):
        with pytest.raises(ValueError, match="clips Muon's orthogonalised update"):
            check_optimizer(TrainConfig(optimizer="muon", zero_stage=stage, precision=precision))
    check_optimizer(TrainConfig(optimizer="muon", zero_stage=1, precision="bf16"))
    with pytest.raises(ValueError, match=r"precision=fp16: DeepSpeed clips Muon"):
        check_optimizer(TrainConfig(optimizer="muon", precision="fp16"))


def test_settings_that_a_cpu_has_no_use_for_are_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"precision=fp16 needs a GPU"):
        check_optimizer(TrainConfig(precision="fp16"), on_gpu=False)
    with pytest.raises(ValueError, match=r"offload=true: on a CPU .* already"):
        check_optimizer(TrainConfig(offload=True, zero_stage=1), on_gpu=False)
    check_optimizer(TrainConfig(precision="fp16", offload=True, zero_stage=1), on_gpu=True)


def test_deepspeed_is_told_the_stage_that_keeps_fp32_masters():
    stages = {(p, z): engine_config(TrainConfig(precision=p, zero_stage=z))["zero_optimization"]["stage"]
              for p in ("fp32", "bf16", "fp16") for z in (0, 3)}  # fmt: skip
    assert stages == {("fp32", 0): 0, ("bf16", 0): 1, ("fp16", 0): 1} | {(p, 3): 3 for p in ("fp32", "bf16", "fp16")}
    settings = engine_config(TrainConfig(offload=True, zero_stage=2))
    assert settings["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert settings["zero_force_ds_cpu_optimizer"] is False


def test_a_clock_that_came_to_its_end_by_time_is_at_its_end_when_it_is_resumed():
    clock = Clock(None, 100.0, 0.1, elapsed=95.0)
    clock.reserve = 10.0
    assert clock.progress(5) == 1.0 and Clock(None, 100.0, 0.1, clock.elapsed).progress(5) == 1.0
    assert Clock(None, 200.0, 0.1, clock.elapsed).progress(5) < 0.51, "a larger budget goes on"
