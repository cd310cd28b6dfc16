"""The training loop on the toy: against a loop written out by hand, its log, its end, and bad data."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch

from headtrain.data_gen.store import CaptureStore
from headtrain.heads.simulate import accepted_chain, summarize
from headtrain.training.batches import Plan, collate, count_pairs
from headtrain.training.optim import lr_at

EXPECTED_KEYS = {
    "step", "share", "epoch", "lr", "loss", "loss_by_depth", "accuracy", "accuracy_all", "grad_norm", "tokens_per_s",
    "tokens", "supervised", "seconds", "peak_rss_gb", "left_s", "elapsed_s", "skipped",
}  # fmt: skip


def by_hand(toy, run, steps: int, accumulate: int, lr: float, clip: float):
    """The same training with torch alone: one global batch per step, the loss normalised by its own pairs."""
    store = CaptureStore(run / "captures")
    rows = sorted((row for row in store.rows if row.split == "train"), key=lambda row: row.id)
    head = toy.toy_head()
    pairs = count_pairs(store, rows, head.t2d, toy.DEPTHS, 64)
    rows = [row for row, count in zip(rows, pairs[:, 0], strict=True) if count]
    plan = Plan([row.tokens for row in rows], 64, seed=7, parts=accumulate)
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        chosen = [rows[row] for micro in plan.step(step) for row in micro]
        batch = collate([store.read(row) for row in chosen], [row.id for row in chosen])
        batch.count_D = torch.ones(toy.DEPTHS)
        with torch.no_grad():
            batch.count_D = head(batch).count_D
        optimizer.zero_grad()
        head(batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), clip)
        optimizer.param_groups[0]["lr"] = lr * lr_at(step + 1, steps, round(0.1 * steps), "cosine")
        optimizer.step()
    return head


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 3}, {"zero_stage": 1}, {"zero_stage": 2, "accumulate": 2}, {"zero_stage": 3, "accumulate": 2}],
    ids=str,
)
def test_weights_equal_those_of_a_plain_torch_loop_over_the_global_batch(toy, train, weights, tmp_path, options):
    train(tmp_path, steps=6, lr=5e-3, clip=0.5, **options)
    expected = by_hand(toy, tmp_path, 6, options.get("accumulate", 1), lr=5e-3, clip=0.5)
    found = weights(tmp_path)
    for name, tensor in expected.state_dict().items():
        assert torch.allclose(found[name].float(), tensor.float(), atol=2e-5), name


def test_bf16_training_follows_fp32_closely(train, tmp_path):
    fp32 = train(tmp_path / "a", steps=20, precision="fp32", log_every=20)[-2]
    bf16 = train(tmp_path / "b", steps=20, precision="bf16", log_every=20)[-2]
    assert bf16["loss"] == pytest.approx(fp32["loss"], rel=0.02)
    assert bf16["loss"] != fp32["loss"]


@pytest.mark.parametrize("options", [{}, {"zero_stage": 2}, {"zero_stage": 3}], ids=str)
def test_accumulated_bf16_gradients_have_the_size_of_fp32_ones(train, tmp_path, options):
    common = {"steps": 4, "log_every": 1, "accumulate": 3, "lr": 1e-6}  # weights hardly move
    fp32 = [line["grad_norm"] for line in train(tmp_path / "a", **common) if "loss" in line]
    bf16 = train(tmp_path / "b", precision="bf16", **common, **options)
    assert [line["grad_norm"] for line in bf16 if "loss" in line] == pytest.approx(fp32, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_muon_learns_the_toy_language(train, tmp_path, precision):
    log = train(tmp_path, steps=30, optimizer="muon", muon_lr=0.05, lr=2e-2, precision=precision, log_every=10)
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[-1] < losses[0] - 1


def test_the_log_says_everything_and_the_best_head_is_written(toy, train, tmp_path):
    log = train(tmp_path, steps=60, eval_every=20, log_every=10, accumulate=2)
    steps = [line for line in log if "loss" in line]
    assert [line["step"] for line in steps] == [10, 20, 30, 40, 50, 60]
    assert all(set(line) >= EXPECTED_KEYS for line in steps)
    assert set(steps[0]["seconds"]) == {"data", "forward", "backward", "optimizer", "communication"}
    assert steps[-1]["accuracy"][0] > 0.9 > steps[0]["accuracy"][0]
    assert all(a <= b for line in steps for a, b in zip(line["accuracy_all"], line["accuracy"], strict=True))
    assert [line["lr"] for line in steps] == pytest.approx(
        [5e-3 * lr_at(step, 60, 6, "cosine") for step in (10, 20, 30, 40, 50, 60)]
    )
    taus = {line["step"]: line["tau"] for line in log if "tau" in line}
    assert list(taus) == [0, 20, 40, 60]
    best = json.loads((tmp_path / "training" / "best.json").read_text())
    assert best["tau"] == max(taus.values()) == taus[best["step"]] > taus[0]
    assert [p.name for p in (tmp_path / "training" / "best").iterdir()] == [f"step-{best['step']:08d}"]
    # the written head really has the logged τ, by its own drafts on the validation rows
    head = toy.read_head(tmp_path / "head")
    store, accepted = CaptureStore(tmp_path / "captures"), []
    for row in (row for row in store.rows if row.split == "valid"):
        batch = collate([store.read(row)], [row.id])
        with torch.no_grad():
            drafts = head.draft_all(batch, 3)
        accepted += accepted_chain(drafts, batch.argmax_N, batch.supervised_N, batch.cu_R1, 3)
    assert summarize(accepted, 3).tau == pytest.approx(best["tau"])


def test_a_worse_head_does_not_replace_the_best(train, tmp_path):
    log = train(tmp_path, steps=60, eval_every=20, log_every=20, schedule="constant", lr=5e-3)
    good = json.loads((tmp_path / "training" / "best.json").read_text())
    ruined = tmp_path / "ruined"
    log = train(ruined, steps=80, eval_every=10, log_every=20, schedule="constant", lr=0.4)
    taus = {line["step"]: line["tau"] for line in log if "tau" in line}
    best = json.loads((ruined / "training" / "best.json").read_text())
    assert best["tau"] == max(taus.values()) and best["step"] == max(s for s, tau in taus.items() if tau == best["tau"])
    assert good["tau"] > best["tau"]


def test_a_time_budget_is_kept_and_its_schedule_finished(train, tmp_path):
    began = time.monotonic()
    log = train(tmp_path, steps=None, seconds=3.0, eval_every=10**6, save_every=10**6, log_every=1, schedule="linear")
    lines = [line for line in log if "loss" in line]
    assert 2.5 < lines[-1]["elapsed_s"] < 3.5 and time.monotonic() - began < 8
    assert lines[-1]["share"] == 1 and log[-1]["tau"] > 1
    assert lines[-1]["lr"] < 0.05 * 5e-3 < 0.5 * max(line["lr"] for line in lines)
    assert train(tmp_path, steps=None, seconds=3.0)[-1]["step"] == lines[-1]["step"]  # nothing left to do


def test_without_validation_rows_the_last_head_is_written(toy, train, weights, tmp_path):
    toy.make_run(tmp_path, valid=0)
    train(tmp_path, steps=4)
    assert torch.equal(toy.read_head(tmp_path / "head").mix.weight, weights(tmp_path)["mix.weight"])


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"zero_stage": 2}, {"zero_stage": 3}], ids=str)
def test_a_step_with_a_nan_is_skipped_and_counted(toy, train, weights, tmp_path, options):
    toy.make_run(tmp_path, poison=(3,))
    log = train(tmp_path, epochs=2, steps=None, log_every=1, accumulate=2, **options)
    skipped = [line["step"] for line in log if "loss" in line and line["grad_norm"] is None]
    assert len(skipped) == 2  # once per epoch
    assert [line["skipped"] for line in log if "loss" in line][-1] == 2
    assert all(torch.isfinite(tensor.float()).all() for tensor in weights(tmp_path).values())


def test_nan_in_every_step_ends_the_run_and_names_the_rows(toy, train, tmp_path):
    toy.make_run(tmp_path, train=3, poison=(0, 1, 2))
    with pytest.raises(ValueError, match=r"not finite in 5 optimizer steps.*train-00[012]"):
        train(tmp_path, steps=20, batch_tokens=20)


def test_a_loss_that_is_infinite_with_finite_gradients_is_not_stepped_on():
    from headtrain.training.trainer import poisoned

    weight = torch.ones(2, requires_grad=True)
    poisoned(weight.sum() + math.inf).backward()
    assert weight.grad.isnan().all()
    weight.grad = None
    poisoned(3 * weight.sum()).backward()
    assert weight.grad.tolist() == [3, 3]


def test_captures_of_other_taps_are_refused(toy, train, tmp_path, monkeypatch):
    from headtrain.training import trainer

    def other(*_):
        head = toy.toy_head()
        head.config.taps = [1, 3]
        return head

    toy.make_run(tmp_path)
    monkeypatch.setattr(trainer, "build_head", other)
    with pytest.raises(ValueError, match=r"taps \[1, 2\] and the head reads \[1, 3\]"):
        trainer.train(toy.recipe(), tmp_path)


def test_rows_without_a_trained_pair_are_left_out_and_said_so(toy, tmp_path, capsys):
    from headtrain.training import trainer

    toy.make_run(tmp_path)
    head, only = toy.toy_head(), int(toy.row(0, 3, 8).argmax[4])
    head.t2d[:] = torch.arange(toy.VOCAB) == only
    ranks = trainer.Ranks(0, 1, torch.device("cpu"))
    store, rows, valid, counts = trainer.select_rows(toy.recipe(), tmp_path, head, ranks)
    expected = []
    for row in (row for row in store.rows if row.split == "train"):
        choices = store.read(row).argmax[row.first : -1]  # teachers of the slots whose label is still in the answer
        if (choices == only).any():
            expected.append(row.id)
    assert [row.id for row in rows] == expected and 0 < len(rows) < 24 and len(valid) == 6
    assert counts.shape == (len(rows), 3)
    assert f"{24 - len(rows)} of 24 rows have no trained pair" in capsys.readouterr().out


def test_wandb_gets_the_same_numbers_offline(train, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sent = []
    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", lambda _self, data, step: sent.append((step, data)))
    log = train(tmp_path, steps=4, logger="wandb")
    assert [step for step, _ in sent] == [line["step"] for line in log]
    line, data = next((line, data) for line, (_, data) in zip(log, sent, strict=True) if "loss" in line)
    assert data["loss"] == line["loss"] and data["accuracy/1"] == line["accuracy"][1]
    assert data["seconds/forward"] == line["seconds"]["forward"]
    assert list((tmp_path / "training" / "wandb").glob("offline-run-*"))


def test_numbers_that_json_does_not_have_are_null_in_the_log(toy, tmp_path, capsys):
    from headtrain.training.log import TrainLog
    from headtrain.training.ranks import Ranks

    log = TrainLog(toy.recipe(), tmp_path, Ranks(0, 1, torch.device("cpu")), 0)
    log.write({"step": 1, "share": 0.5, "loss": math.nan, "accuracy": [0.25, math.inf], "seconds": {"data": math.nan}})
    line = (tmp_path / "training" / "log.jsonl").read_text()
    assert line == (
        '{"step": 1, "share": 0.5, "loss": null, "accuracy": [0.25, null], "seconds": {"data": null}}\n'
    )
    assert "top-1 25/– %" in capsys.readouterr().out


def test_a_capture_that_is_not_finite_is_refused_by_row_before_anything_is_fitted_to_it(toy, train, tmp_path):
    from headtrain.data_gen import store

    toy.make_run(tmp_path)
    reader = store.CaptureStore(tmp_path / "captures")
    first = reader.rows[5]
    reader._tensors(first.file)["last"][sum(row.tokens for row in reader.rows[:5]) + 1] = float("inf")
    with pytest.raises(ValueError, match=rf"captures-00000\.safetensors has values in `last` of row {first.id}"):
        reader.read(first)
    reader.read(reader.rows[4])


def test_a_best_head_found_by_another_measure_counts_no_more(train, tmp_path):
    train(tmp_path, steps=4, eval_every=2, save_every=4)
    best = tmp_path / "training" / "best.json"
    assert json.loads(best.read_text())["measure"] == {"k": 3, "decode_prompts": 0}
    best.write_text(json.dumps(json.loads(best.read_text()) | {"tau": 99.0}))
    train(tmp_path, steps=6, eval_every=2, save_every=4)
    assert json.loads(best.read_text())["tau"] == 99.0  # the same measure: it stands
    train(tmp_path, steps=8, eval_every=2, save_every=4, k=1)
    assert json.loads(best.read_text())["tau"] < 2.1


@pytest.mark.parametrize("key", ["patience", "decode_prompts"])
def test_choosing_by_validation_rows_without_any_is_refused(toy, tmp_path, monkeypatch, key, train):
    from headtrain.training import trainer

    toy.make_run(tmp_path, valid=0)
    with pytest.raises(ValueError, match=rf"train\.{key}: there are no validation rows; set data\.valid"):
        trainer.train(toy.recipe(**{key: 2}), tmp_path, score=lambda head: 1.0)


def test_the_speed_in_the_log_is_that_of_the_steps_and_not_of_evaluations_between_them(train, tmp_path, monkeypatch):
    from headtrain.training import trainer

    plain = trainer.simulate

    def slow(*args):
        time.sleep(0.5)
        return plain(*args)

    monkeypatch.setattr(trainer, "simulate", slow)
    log = train(tmp_path, steps=8, eval_every=1, log_every=4, save_every=100)
    first, second = (line for line in log if "tokens_per_s" in line)
    stepping = second["tokens"] / second["tokens_per_s"]
    assert stepping < second["elapsed_s"] - first["elapsed_s"] - 1.9  # four evaluations between them take 2 seconds


def test_a_run_whose_time_is_over_before_the_first_step_says_so(train, tmp_path, caplog):
    train(tmp_path, steps=None, seconds=1e-6)
    assert "train.seconds=1e-06 left no time for a step" in caplog.text


def test_training_on_captures_in_eight_bits_goes_as_on_whole_ones(toy, train, tmp_path):
    options = {"steps": 30, "eval_every": 30, "log_every": 10}
    toy.make_run(tmp_path / "b", dtype="float8")
    whole, eight = ([line for line in train(tmp_path / run, **options) if "loss" in line] for run in "ab")
    for ours, theirs in zip(eight, whole, strict=True):
        assert ours["loss"] != theirs["loss"] and ours["loss"] == pytest.approx(theirs["loss"], rel=0.03)
