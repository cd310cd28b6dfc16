"""Online training on a tiny random target: the same steps as from stored captures, in every place of the target."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from headtrain import configload, pipeline, stages
from headtrain.config import ConfigError
from headtrain.configcheck import validate
from headtrain.data_gen import store
from headtrain.data_gen.online import STATES, States
from headtrain.heads.vocab import trained_pairs
from headtrain.training import trainer
from headtrain.training.apart import Apart, TargetGone
from headtrain.training.batches import Plan
from headtrain.training.launch import TARGET_GPUS, command, processes, target_devices
from headtrain.training.online import Here, OnlineReader
from headtrain.training.parent import start_time
from headtrain.training.ranks import Ranks

CPU, TAPS = torch.device("cpu"), (2, 4, 5)
START = 500  # tokens that a fresh head is fitted to


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """(config, run folder) of a smoke run whose rows are all captured."""
    run = tmp_path_factory.mktemp("offline") / "run"
    more = ["smoke=true", f"run_dir={run}", "data.captures.dtype=float32"]
    config = pipeline.prepared(configload.load("eagle3_llama8b", more))
    job = pipeline.Job(config)
    for stage in ("prompts", "responses", "captures"):
        job.open(stage)
    for stage in ("smoke_target", "check", "prompts", "responses", "captures"):
        stages.STAGES[stage](config, run, {"coming": "prompts,responses,captures,training"})
    config.train.batch_tokens, config.train.eval_every, config.train.save_every, config.train.log_every = 256, 6, 6, 1
    return config, run


@pytest.fixture
def small_start(monkeypatch):
    monkeypatch.setattr(store, "tokens_of_start", lambda taps, hidden: START)


@pytest.fixture
def alone(monkeypatch):
    """Training in this process, which stays a run of one process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(trainer, "leave", lambda: None)


def beside(offline, folder, captures: bool = False, mode: str = "online", **train):
    """(config, run) of another run on the same responses; captures: on the same captures too."""
    config, run = copy.deepcopy(offline[0]), offline[1]
    config.data.captures.mode, config.run_dir = mode, str(folder)
    for key, value in train.items():
        setattr(config.train, key, value)
    folder.mkdir(exist_ok=True)
    for name in ("prompts", "responses", *["captures"] * captures):
        (folder / name).symlink_to(run / name)
    (folder / "config.yaml").write_text(configload.to_yaml(config))
    return config, folder


def trained(config, run) -> list[dict]:
    trainer.train(config, run, None, lambda: stages.target_states(config, run))
    return [json.loads(line) for line in (run / "training" / "log.jsonl").read_text().splitlines()]


def losses(log: list[dict]) -> list[float]:
    return [line["loss"] for line in log if "loss" in line]


def weights(run):
    return load_file(sorted((run / "training" / "checkpoints").glob("step-*"))[-1] / "weights.safetensors")


def test_the_loss_and_tau_are_those_of_training_on_stored_captures(offline, small_start, alone, tmp_path):
    config, run = beside(offline, tmp_path / "on")
    stages.captures(config, run, {})
    kept, rows = store.CaptureStore(run / "captures"), store.ResponseStore(run / "responses").rows
    assert sum(row.split == "train" for row in kept.rows) < sum(row.split == "train" for row in rows) / 2
    on = trained(config, run)
    off = trained(*beside(offline, tmp_path / "off", captures=True, mode="offline"))
    assert losses(on) == pytest.approx(losses(off), rel=1e-5)  # rows share forwards in other groups: rounding
    assert [line["tau"] for line in on if "tau" in line] == [line["tau"] for line in off if "tau" in line]
    assert {line["tokens"] for line in on if "loss" in line} == {line["tokens"] for line in off if "loss" in line}
    spent = [line["seconds"] for line in on if "loss" in line]
    assert all(part["data"] >= 0 and part["target"] > 0 for part in spent)
    assert not any("target" in line["seconds"] for line in off if "loss" in line)


def test_it_is_the_same_to_the_bit_where_the_stored_captures_are_of_the_same_forwards(
    offline, small_start, alone, tmp_path
):
    config, run = beside(offline, tmp_path / "on", steps=5)
    responses = store.ResponseStore(run / "responses")
    train = sorted((row for row in responses.rows if row.split == "train"), key=lambda row: row.id)
    plan = Plan([row.tokens for row in train], config.train.batch_tokens, config.seed, 1)
    assert plan.steps_of(1) >= 5  # within the epoch whose micro-batches are captured here
    read = States(config, TAPS)
    units = [[train[n] for n in micro] for micro in plan.epoch(0)]
    units.append([row for row in responses.rows if row.split == "valid"])
    infos, parts = [], []
    for rows in units:
        known = [responses.read(row) for row in rows]
        found = read([row.ids for row in known])
        infos += rows
        parts += [{**vars(row), **states} for row, states in zip(known, found, strict=True)]
    flat = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    facts = {"norm": "post_norm", "taps": list(TAPS), "hidden": 64, "dtype": "float32"}
    store.write_unit(run / "captures", "captures", 0, infos, flat, **facts)
    store.write_index(run / "captures", "captures", 1)
    on = trained(config, run)
    other = copy.deepcopy(config)
    other.data.captures.mode = "offline"
    (tmp_path / "off").mkdir()
    for name in ("prompts", "responses", "captures"):
        (tmp_path / "off" / name).symlink_to(run / name)
    off = trained(other, tmp_path / "off")
    assert losses(on) == losses(off)
    assert all(torch.equal(tensor, weights(tmp_path / "off")[name]) for name, tensor in weights(run).items())


def test_a_resumed_run_ends_with_the_same_weights(offline, small_start, alone, tmp_path):
    common = {"schedule": "constant", "warmup": 0.0, "accumulate": 2, "save_every": 3}
    whole = beside(offline, tmp_path / "whole", captures=True, steps=6, **common)
    trained(*whole)
    config, run = beside(offline, tmp_path / "parts", captures=True, steps=3, **common)
    trained(config, run)
    config.train.steps = 6
    trained(config, run)
    assert all(torch.equal(tensor, weights(run)[name]) for name, tensor in weights(whole[1]).items())


def test_a_target_in_training_learns_the_same(offline, small_start, alone, tmp_path):
    """Medusa-2: what the target said before comes from the frozen target beside it."""
    section = configload.load("medusa2_llama8b", ["smoke=true", "head.medusa2.rank=4", "head.draft_vocab=full"]).head
    found = []
    for mode in ("offline", "online"):
        config, run = beside((with_head(offline[0], section), offline[1]), tmp_path / mode, mode=mode, steps=4)
        stages.captures(config, run, {})
        found.append(trained(config, run))
    assert losses(found[1]) == pytest.approx(losses(found[0]), rel=1e-5)


def with_head(config, section):
    config = copy.deepcopy(config)
    config.head = section
    return config


def test_two_processes_with_targets_beside_them_train_as_one_with_its_own(offline, alone, tmp_path, free_port):
    one = trained(*beside(offline, tmp_path / "one", captures=True, accumulate=2, steps=4))
    config, run = beside(offline, tmp_path / "two", captures=True, steps=4, zero_stage=3)
    config.launch.gpus, config.launch.master_port, config.launch.target = 2, free_port, "apart"
    (run / "config.yaml").write_text(configload.to_yaml(config))
    argv, env = command(config, ["stage", "training", f"run_dir={run}"])
    ended = subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    two = [json.loads(line) for line in (run / "training" / "log.jsonl").read_text().splitlines()]
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert [line["tokens"] for line in two if "loss" in line] == [line["tokens"] for line in one if "loss" in line]


# ------------------------------------------------------------------------------------------------- counts

def reader_of(offline, t2d_V, parts: int = 1, source=None):
    """A reader of a run of one process, and the rows it deals."""
    config, run = offline
    responses = store.ResponseStore(run / "responses")
    rows = sorted((row for row in responses.rows if row.split == "train"), key=lambda row: row.id)
    plan = Plan([row.tokens for row in rows], 256, 0, parts)
    ranks = Ranks(0, 1, CPU)
    return OnlineReader(responses, rows, plan, ranks, source or Here(States(config, TAPS), CPU), t2d_V, 3)


def test_a_step_is_counted_over_all_its_micro_batches_before_the_first_is_used(offline):
    reader, t2d_V = reader_of(offline, None, parts=3), torch.arange(384) % 3 > 0
    reader.t2d_V = t2d_V
    try:
        for _ in range(2):
            batches = [reader.next() for _ in range(3)]
            total = sum(
                trained_pairs(b.supervised_N, b.argmax_N, t2d_V, b.cu_R1, 3)[0].sum(1) for b in batches
            )
            assert all(batch.count_D.tolist() == total.tolist() and batch.parts == 3 for batch in batches)
            assert total[0] > 0
    finally:
        reader.close()


@pytest.mark.parametrize("name", ["taps", "last", "logsumexp"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_whose_states_are_not_finite_trains_nothing_and_is_named_once(name, value, offline, caplog):
    states, spoilt = States(offline[0], TAPS), []

    def spoil(rows):
        found = states(rows)
        spoilt[:] = spoilt or [int(rows[-1].sum())]  # the last row of the first micro-batch, always
        for row, own in zip(rows, found, strict=True):
            if int(row.sum()) == spoilt[0]:
                own[name] = own[name].clone()
                own[name].view(-1)[3] = value
        return found

    reader = reader_of(offline, None, source=Here(spoil, CPU))
    batches = [reader.next() for _ in range(reader.plan.steps_of(2))]
    reader.close()
    seen = 0
    for batch in batches:
        assert all(bool(part.isfinite().all()) for part in (batch.taps_NAT, batch.last_NT, batch.logsumexp_N))
        for n, (a, b) in enumerate(zip(batch.cu_R1[:-1].tolist(), batch.cu_R1[1:].tolist(), strict=True)):
            bad = int(batch.ids_N[a:b].sum()) == spoilt[0]
            assert bool(batch.supervised_N[a:b].any()) is not bad
            seen += bad
            assert not bad or batch.rows[n] in caplog.text
    assert seen > 1 and caplog.text.count("trains nothing") == 1


@pytest.mark.parametrize("kind", ["eagle3_llama8b", "eagle_llama8b", "medusa_llama8b", "mtp_smollm2", "peagle_llama8b"])
def test_a_step_without_a_trained_pair_is_no_division_by_zero(kind, offline):
    """With every type of head: no choice of the target is in the draft vocabulary; no token is supervised."""
    from headtrain.heads.base import new_head
    from headtrain.target import load_parts

    config = copy.deepcopy(offline[0])
    config.head = configload.load(kind, ["smoke=true"]).head
    config.head.taps, config.head.start = list(TAPS), "random"
    config.head.draft_vocab = "full" if config.head.type == "eagle" else 128
    config.head.init_from = "scratch" if config.head.type == "mtp" else None
    reader = reader_of(offline, torch.zeros(384, dtype=torch.bool))
    batch = reader.next()
    reader.close()
    assert batch.count_D.tolist() == [0, 0, 0]
    parts = load_parts(config.target)
    counts = torch.arange(384).flip(0)
    head = new_head(config, parts, counts, counts, batch)
    head.attach(parts.embedding, parts.lm_head)
    nowhere = replace(batch, argmax_N=torch.full_like(batch.argmax_N, 383))
    for empty in (nowhere, replace(batch, supervised_N=torch.zeros_like(batch.supervised_N))):
        if config.head.type == "eagle" and empty is nowhere:
            continue  # it has the whole vocabulary
        head.zero_grad()
        output = head(empty)
        output.loss.backward()
        assert float(output.loss.detach()) == 0 and not output.count_D.any()
        assert all(p.grad is not None and not p.grad.any() for p in head.parameters() if p.requires_grad)


# ------------------------------------------------------------------------------------------------- the process apart

@pytest.fixture
def apart(offline, tmp_path):
    source = Apart(beside(offline, tmp_path / "run", captures=True)[1], [])
    yield source
    source.close()


def alive(pid: int) -> bool:
    return start_time(pid) is not None


def test_the_process_apart_answers_what_the_target_here_does_and_ends_when_it_is_closed(offline, apart):
    rows = [torch.arange(5, 5 + n, dtype=torch.int32) for n in (40, 3, 25)]
    apart.ask(rows)
    apart.ask(rows[1:])
    expected = States(offline[0], TAPS)
    for asked in (rows, rows[1:]):
        found, seconds = apart.answer()
        assert seconds > 0
        for own, other in zip(found, expected(asked), strict=True):
            assert all(torch.equal(own[name], other[name]) for name in STATES)
    apart.check()
    apart.close()
    assert not alive(apart.process.pid)


def test_its_errors_come_with_their_message(apart):
    apart.ask([torch.tensor([1, 2, 10**6], dtype=torch.int32)])
    with pytest.raises(TargetGone, match=r"the target's process: .*(out of range|out of bounds)"):
        apart.answer()


def test_when_it_is_killed_training_ends_in_seconds_and_says_so(offline, apart):
    reader = reader_of(offline, None, source=apart)
    reader.next()
    os.kill(apart.process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(TargetGone, match=rf"\(pid {apart.process.pid}\) was killed by signal 9"):
        while True:
            reader.next()
    reader.close()
    assert time.monotonic() - began < 5


def test_it_ends_with_the_training_process_even_when_that_is_killed(offline, tmp_path):
    _, run = beside(offline, tmp_path / "run", captures=True)
    code = (
        "import sys, time; from pathlib import Path; from headtrain.training.apart import Apart; "
        "print(Apart(Path(sys.argv[1]), []).process.pid, flush=True); time.sleep(100)"
    )
    trainer_ = subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, text=True)
    pid = int(trainer_.stdout.readline())
    assert alive(pid)
    trainer_.kill()
    trainer_.wait()
    deadline = time.monotonic() + 100  # it looks when its libraries are imported
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(pid)


# ------------------------------------------------------------------------------------------------- where

def test_on_gpus_every_training_process_gets_a_device_and_its_target_another():
    recipe = configload.load("eagle3_llama8b", ["data.captures.mode=online", "launch.target=apart"])
    gpus = ["0", "2", "4", "6", "7"]
    assert processes(recipe, gpus) == 2 and processes(recipe) == 1
    env = command(recipe, ["stage"], gpus)[1]
    assert env[TARGET_GPUS] == "4,6"
    assert [target_devices(env, [], rank, 2, 1) for rank in range(2)] == [["4"], ["6"]]
    recipe.target.gpus = 2
    assert processes(recipe, gpus) == 1 and command(recipe, ["stage"], gpus)[1][TARGET_GPUS] == "2,4"
    recipe.target.gpus = 1
    recipe.launch.gpus = 3
    with pytest.raises(ValueError, match=r"launch\.gpus=3 with launch\.target=apart takes 6: this machine has 5 CUDA"):
        command(recipe, ["stage"], gpus)


def test_under_another_launcher_the_targets_take_the_devices_that_training_leaves():
    assert [target_devices({}, ["0", "1", "2", "3"], rank, 2, 1) for rank in range(2)] == [["2"], ["3"]]
    assert [target_devices({}, own, rank, 4, 1) for rank, own in ((0, ["0", "1"]), (3, ["6", "7"]))] == [["1"], ["6"]]
    assert target_devices({}, list("abcdef"), 1, 2, 2) == ["e", "f"]
    with pytest.raises(ValueError, match="2 training processes of this machine and their targets take 4 CUDA devices"):
        target_devices({}, ["0", "1", "2"], 0, 2, 1)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["launch.target=apart"], r"launch\.target=apart: training has no target"),
        (["launch.target=apart", "data.captures.mode=online", "launch.hostfile=hosts"], "with launch.hostfile"),
        (["target.gpus=2", "data.captures.mode=online"], r"target\.gpus=2 .*: set launch\.target=apart too"),
        (["target.split=tensor", "target.gpus=2", "data.captures.mode=online"], r"target\.split=tensor with"),
        (["data.captures.mode=later"], r"data\.captures\.mode=later: not allowed; allowed: offline, online"),
        (["launch.target=far"], r"launch\.target=far: not allowed; allowed: same, apart"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        validate(configload.load("eagle3_llama8b", overrides))


def test_a_trainer_without_a_target_says_so(offline, tmp_path, alone):
    config, run = beside(offline, tmp_path / "run", captures=True)
    with pytest.raises(ValueError, match="no target was handed to the trainer"):
        trainer.train(config, run)


def test_the_targets_seconds_are_a_part_of_their_own(monkeypatch):
    from headtrain.training.timing import Stopwatch

    watch = Stopwatch(CPU, SimpleNamespace(exact=False, take=lambda: 0.0))
    watch.exact = True
    watch.parts["data"] = 5.0
    watch.of_target(4.0, inside=True)
    watch.of_target(2.0, inside=False)
    watch.end_step()
    assert (found := watch.read())["target"] == 6.0 and found["data"] == 1.0
