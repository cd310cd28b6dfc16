"""The learning-rate schedule counts optimizer steps: 960 rows, 3 epochs, accumulation, warm-up 5 %, cosine to 0.

The curve itself is worked out in tests/training/test_optim.py; here it is what a run under DeepSpeed logs and resumes.
"""

import json

import pytest

from headtrain.training.batches import Plan

WORKED = {1: 1.111111e-05, 9: 1.0e-04, 90: 5.412897e-05, 91: 5.321287e-05, 180: 0.0}
ROW = ([1, 2], [3, 7, 3, 8, 12, 3, 7, 8])  # 10 tokens


class Stopped(Exception):
    """Ends a run from outside."""


@pytest.fixture
def planned(recipe):
    """planned(rows of a micro-batch, accumulation): the recipe of the case, at lr 1e-4."""

    def make(rows: int, accumulate: int):
        t = recipe.train
        recipe.head.unroll = 1
        t.batch_tokens, t.accumulate, t.epochs = 10 * rows, accumulate, 3
        t.lr, t.warmup, t.schedule, t.log_every, t.save_every = 1e-4, 0.05, "cosine", 1, 90
        return recipe

    return make


def test_two_processes_with_accumulation_4_make_240_micro_batches_each_and_60_steps_per_epoch():
    plan = Plan([10] * 960, 20, seed=0, parts=2 * 4)
    per_process = len(plan.epoch(0)) // 2
    assert (per_process, per_process // 4) == (240, 60)
    assert [plan.steps_of(epochs) for epochs in (1, 2, 3)] == [60, 120, 180]


# one process here takes the rows of two: 16 rows make an optimizer step either way
@pytest.mark.parametrize(("rows", "accumulate"), [(4, 4), (16, 1)])
def test_a_run_and_its_continuation_follow_the_curve_once_per_optimizer_step(
    planned, rows, accumulate, make_run, train, tmp_path, monkeypatch
):
    from headtrain.training import checkpoint

    recipe, run = planned(rows, accumulate), make_run(tmp_path, [ROW] * 960)
    save = checkpoint.save

    def save_and_stop(*arguments, **more):
        save(*arguments, **more)
        raise Stopped

    monkeypatch.setattr(checkpoint, "save", save_and_stop)
    with pytest.raises(Stopped):
        train(recipe, run)
    first = [json.loads(line) for line in (run / "training" / "log.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in first) == 90
    monkeypatch.setattr(checkpoint, "save", save)

    lr = {line["step"]: line["lr"] for line in train(recipe, run) if "lr" in line}
    assert sorted(lr) == list(range(1, 181))
    assert {step: lr[step] for step in WORKED} == pytest.approx(WORKED, abs=5e-11)
    assert {step: line["lr"] for line in first if "lr" in line for step in [line["step"]]} == {
        step: lr[step] for step in range(1, 91)
    }
