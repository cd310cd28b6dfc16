"""Steps that are not taken, averaged weights, and the end by patience."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from headtrain.training import trainer
from headtrain.training.guard import FEWEST, Guard
from headtrain.training.weights import Answer, Shards, answer

STAGES = [{"zero_stage": stage, "precision": p} for p in ("fp32", "bf16") for stage in (0, 1, 2, 3)]
STAGES += [{"zero_stage": stage, "precision": "bf16", "offload": True} for stage in (2, 3)]


@pytest.fixture
def job(toy, train, tmp_path, monkeypatch):
    """job(**options) -> (engine, shards, guard, step): a toy engine, and a function that runs one step.

    fp16 and offload, which runs refuse on a CPU, are tried here nevertheless: DeepSpeed does not mind.
    """

    def make(**options):
        from headtrain.data_gen.store import CaptureStore
        from headtrain.training.batches import collate

        toy.make_run(tmp_path)
        config, ranks = toy.recipe(**options), trainer.join("cpu")
        from deepspeed.accelerator import get_accelerator

        monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _self: True)
        engine = trainer.start_engine(Answer(toy.toy_head(config)), config, ranks)
        shards, guard = Shards(engine, ranks), Guard(engine, config.train, ranks)
        store = CaptureStore(tmp_path / "captures")
        batch = collate([store.read(row) for row in store.rows[:4]], ["a", "b", "c", "d"])
        batch.count_D = torch.full((toy.DEPTHS,), 30.0)
        batch = batch.to(ranks.device, next(engine.module.parameters()).dtype)

        def step(scale: float = 1.0):
            guard.reset()
            engine.backward(answer(engine, batch).loss * scale)
            engine.step()
            guard.settle()

        return engine, shards, guard, step

    return make


def everything(engine, shards) -> list[torch.Tensor]:
    moments = [t for kind in shards.moments().values() for t in kind if t is not None]
    weights = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]  # with ZeRO 3, this process's part
    return [t.detach().clone() for t in (*shards.flats, *moments, *weights)]


@pytest.mark.parametrize("options", STAGES, ids=lambda o: "-".join(map(str, o.values())))
def test_a_spike_leaves_weights_moments_and_step_count_untouched_at_every_stage(job, options):
    engine, shards, guard, step = job(spike=10.0, clip=0.5, **options)
    for _ in range(FEWEST):
        step()
        assert guard.reason is None
    usual, before, updates = guard.norm, everything(engine, shards), shards.steps
    for scale, reason in ((100.0, "a spike"), (math.nan, "not finite")):
        step(scale)
        assert guard.reason == reason
        assert all(map(torch.equal, everything(engine, shards), before)) and shards.steps == updates == FEWEST
    step()
    assert guard.reason is None and 0.5 * usual < guard.norm < 2 * usual  # nothing of the dropped gradients is left
    assert not torch.equal(everything(engine, shards)[0], before[0]) and shards.steps == updates + 1
    assert list(guard.norms)[-1] == guard.norm and len(guard.norms) == FEWEST + 1


def test_fp16_overflows_count_against_the_run_only_when_the_loss_scale_can_fall_no_further(job):
    engine, shards, guard, step = job(precision="fp16", spike=2.0, clip=0.5)
    step()
    scales = []
    for _ in range(20):
        step(math.nan)
        scales.append(guard.scaler.cur_scale)
        assert guard.reason == "not finite" and guard.failing is (scales[-1] == 1.0)
    assert scales[0] == scales[-1] * 2**16 == 2**16 and shards.steps == 1  # DeepSpeed forgives the first one
    state = guard.state()
    guard.norms.extend([1e-6] * FEWEST)
    before = everything(engine, shards)
    step()
    assert guard.reason == "a spike" and guard.state()["scale"] == state["scale"]
    assert all(map(torch.equal, everything(engine, shards), before)) and shards.steps == 1
    guard.scaler.cur_scale = 8.0
    guard.restore(state)
    assert guard.scaler.cur_scale == 1.0


def louder_after(monkeypatch, toy, micro_batches: int) -> None:
    """The toy's loss is a thousand times its size from that micro-batch on."""
    original, seen = toy.ToyHead.forward, []

    def forward(self, batch):
        output = original(self, batch)
        seen.append(1)
        output.loss = output.loss * (1000 if len(seen) > micro_batches else 1)
        return output

    monkeypatch.setattr(toy.ToyHead, "forward", forward)


def test_spikes_without_end_stop_the_run_and_name_the_rows(toy, train, tmp_path, monkeypatch):
    louder_after(monkeypatch, toy, FEWEST)
    with pytest.raises(ValueError, match=r"norm was a spike \(train.spike\) in 5 .* up to step 21; rows .*train-0"):
        train(tmp_path, steps=40, spike=20.0, log_every=1, eval_every=100)
    lines = [json.loads(line) for line in (tmp_path / "training" / "log.jsonl").read_text().splitlines()]
    assert (lines[-1]["skipped"], lines[-1]["spikes"]) == (4, 4)


@pytest.mark.parametrize("options", [{}, {"zero_stage": 3, "precision": "bf16"}], ids=str)
def test_the_average_follows_its_formula_and_is_what_is_measured_and_saved(toy, train, tmp_path, options):
    train(tmp_path, steps=4, save_every=1, keep=9, ema=0.2, eval_every=100, **options)
    expected = {name: p.detach().clone() for name, p in toy.toy_head().named_parameters()}
    if options:
        expected = {name: p.bfloat16().float() for name, p in expected.items()}  # DeepSpeed starts its masters there
    places = sorted((tmp_path / "training" / "checkpoints").iterdir())
    for step, place in enumerate(places, 1):
        decay, weights = min(0.2, (1 + step) / (10 + step)), load_file(place / "weights.safetensors")
        expected = {name: decay * value + (1 - decay) * weights[name] for name, value in expected.items()}
    average = load_file(places[-1] / "ema.safetensors")
    assert all(torch.allclose(average[name], expected[name], atol=1e-6) for name in expected)
    for folder in (places[-1] / "head", tmp_path / "head"):  # the best is the last one here
        found, tolerance = toy.read_head(folder).mix.weight, 4e-3 if options else 1e-6  # saved in bf16, or in fp32
        assert torch.allclose(found, average["mix.weight"], atol=tolerance)


def test_a_run_without_a_better_tau_stops_and_stays_stopped(train, tmp_path):
    options = {"steps": 40, "lr": 1e-9, "eval_every": 2, "patience": 3, "save_every": 100}
    log = train(tmp_path, **options)
    assert [line["step"] for line in log if "tau" in line] == [0, 2, 4, 6] and log[-1]["step"] == 6
    assert (tmp_path / "head" / "model.safetensors").is_file()
    assert train(tmp_path, **options)[-1]["step"] == 6


def test_the_decoded_tau_picks_the_best_head_where_it_is_asked_for(toy, train, tmp_path, monkeypatch):
    decoded, heads = iter([1.5, 2.5, 2.0]), []

    def score(head) -> float:
        heads.append(head.mix.weight.clone())
        return next(decoded)

    plain = trainer.train
    monkeypatch.setattr(trainer, "train", lambda config, run: plain(config, run, score))
    log = train(tmp_path, steps=20, eval_every=10, log_every=5, decode_prompts=2)
    assert [line["decoded_tau"] for line in log if "tau" in line] == [1.5, 2.5, 2.0]
    assert [line["valid_tau"] for line in log if "loss" in line] == [1.5, 1.5, 2.5, 2.5]
    best = json.loads((tmp_path / "training" / "best.json").read_text())
    assert (best["step"], best["decoded_tau"]) == (10, 2.5) and 1 <= best["tau"] < 2.5
    assert torch.equal(toy.read_head(tmp_path / "head").mix.weight, heads[1])
