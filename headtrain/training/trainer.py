"""The training stage: captures in, head out. `train` reads from top to bottom; the rest is what it calls.

Shapes: N packed positions, D unroll depths, K draft tokens, V target vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtrain.config import RecipeConfig
from headtrain.data_gen.store import CaptureStore, ResponseStore
from headtrain.facts import made_for
from headtrain.heads.base import Head, new_head, save_head
from headtrain.target import load_parts
from headtrain.training import checkpoint
from headtrain.training.apart import Apart, target_source
from headtrain.training.batches import Plan, Reader
from headtrain.training.guard import Guard
from headtrain.training.log import Tally, TrainLog, memory
from headtrain.training.lora import Factors
from headtrain.training.medusa2 import FOLDER as ADAPTER
from headtrain.training.medusa2 import Student
from headtrain.training.online import Here, OnlineReader, States
from headtrain.training.optim import Clock, check_optimizer, engine_config, make_optimizer, peak_lr
from headtrain.training.ranks import Ranks, join, leave, quiet
from headtrain.training.rows import data_fingerprint, draft_mask, first_rows, select_online, select_rows
from headtrain.training.select import Best, simulate
from headtrain.training.timing import Collectives, Stopwatch
from headtrain.training.weights import Answer, Average, Shards, Snapshot, answer

logger = logging.getLogger(__name__)
BAD_IN_A_ROW = 5  # optimizer steps not taken before the run stops
SEEDS = 1_000_003  # apart, so that the random numbers of runs with neighbouring seeds do not overlap soon
Score = Callable[[Head], float]  # τ of really decoding with a head


class TrainingFailed(ValueError):
    """Training cannot go on; the message says why and where to look."""


def train(
    config: RecipeConfig, run: Path, score: Score | None = None, load_states: Callable[[], States] | None = None
) -> None:
    """Trains the head of `run` (a run folder with finished responses and captures) and writes run/head.

    Goes on from the last checkpoint in run/training/checkpoints. Runs as one process or as one of several (RANK,
    WORLD_SIZE, MASTER_*); each must call it. score: needed with train.decode_prompts; the first process calls it.
    load_states: the target, of data.captures.mode=online in this process; training rows then have no captures.
    Raises ValueError on settings that do not fit and TrainingFailed when the loss stays non-finite, or when another
    process has ended.
    """
    if config.train.decode_prompts and score is None:
        raise ValueError("train.decode_prompts: no score was handed to the trainer")
    check_optimizer(config.train, config.target.device != "cpu" and torch.cuda.is_available())
    ranks = join(config.target.device, config.train.threads)
    ranks.say_when_terminated()
    watching = ranks.watch()
    try:
        with contextlib.ExitStack() as ending:
            source = None
            if config.data.captures.mode == "online":
                source = target_source(config, run, ranks, load_states)
                ending.callback(source.close)
            _train(config, run, ranks, score, source)
    except RuntimeError as error:
        if ended := ranks.ended(wait=2.0):
            raise TrainingFailed(ended) from error
        raise
    watching.set()
    leave()  # not after an error: the others may be waiting in a collective, and the launcher ends them


def _train(config: RecipeConfig, run: Path, ranks: Ranks, score: Score | None, source: Here | Apart | None) -> None:
    folder = run / "training"
    place = resume_from(folder / "checkpoints", ranks)
    if place:
        accumulate = checkpoint.accumulation(place, config.train.accumulate, ranks.world)
        config = replace(config, train=replace(config.train, accumulate=accumulate))
    t = config.train
    head = build_head(config, run, ranks.device)
    factors = Factors(head, config.head.lora, config.seed) if config.head.lora.rank else None
    student = Student.load(config) if config.head.medusa2.rank else None
    model = Answer(head, factors, student)
    store, rows, valid, found = (select_online if source else select_rows)(config, run, head, ranks)
    for key in ("decode_prompts", "patience"):
        if getattr(t, key) and not valid:
            raise ValueError(f"train.{key}: there are no validation rows; set data.valid, or leave it out")
    parts = ranks.world * t.accumulate
    plan = Plan([min(row.tokens, t.batch_tokens) for row in rows], t.batch_tokens, config.seed, parts)
    steps = t.steps or (plan.steps_of(t.epochs) if t.epochs else None)

    expected = {
        "precision": t.precision, "optimizer": t.optimizer, "ema": t.ema, "mapping": checkpoint.mapping_hash(head),
        "data": data_fingerprint(config, rows),
    }  # fmt: skip
    state: dict[str, Any] = {
        "step": 0, "elapsed": 0.0, "skipped": 0, "spikes": 0, "bad": 0, "tau": None, "best": None, "stale": 0,
    }  # fmt: skip
    if place:
        state = checkpoint.check(place, expected)
        checkpoint.load_weights(model, place)
    snapshot = Snapshot(model)
    engine = start_engine(model, config, ranks)
    shards, guard = Shards(engine, ranks), Guard(engine, t, ranks)
    average = Average(shards, t.ema) if t.ema else None
    if place:
        checkpoint.load_moments(place, state["updates"], shards, average)
        guard.restore(state["guard"])
    step = state["step"]
    log = TrainLog(config, run, ranks, step)
    log.say(f"{place.name}: going on from step {step}" if place else f"{len(rows)} rows, {len(valid)} for validation")
    if place and state["world"] != ranks.world:
        log.say(f"written by {state['world']} processes, now {ranks.world} with train.accumulate={t.accumulate}")

    clock = Clock(steps, t.seconds, t.warmup, state["elapsed"])
    if source:
        reader = OnlineReader(found, rows, plan, ranks, source, draft_mask(head), head.config.unroll, first=step)
    else:
        reader = Reader(store, rows, found, plan, ranks.rank, ranks.world, first=step)
    dtype = torch.bfloat16 if t.precision == "bf16" else torch.float32
    measure = {"k": max(config.eval.k), "decode_prompts": t.decode_prompts}

    def write(head: Head, place: Path) -> None:
        save_head(head, place, dtype)
        if student:
            student.save(place / ADAPTER, snapshot.adapter)

    best = Best(folder, ranks, write, measure)
    if best.tau is None:
        state.update(best=None, stale=0)
    tally, watch = Tally(head.config, t, ranks.device), Stopwatch(ranks.device, Collectives(ranks.device))

    def validate(share: float) -> None:
        if not valid:
            return
        began = time.monotonic()
        with snapshot.of(engine, shards, average) as served:
            followed = student.followed if student else None
            facts = vars(simulate(served, store, valid, max(config.eval.k), t.batch_tokens, ranks, followed))
            tau = facts["tau"]
            if score and t.decode_prompts:
                tau = facts["decoded_tau"] = ranks.agree(score(served) if ranks.first else None)
            best.offer(served, facts, tau, step)
        clock.reserve = ranks.agree(time.monotonic() - began)
        tally.leave_out(clock.reserve)
        better = state["best"] is None or tau > state["best"]
        state.update(tau=tau, best=tau if better else state["best"], stale=0 if better else state["stale"] + 1)
        log.write({"step": step, "share": share, **facts})

    def progress() -> float:
        return 1.0 if t.patience and state["stale"] >= t.patience else ranks.agree(clock.progress(step))

    try:
        if step == 0:
            validate(0.0)
        share = progress()
        while share < 1:
            lr = set_lr(engine, config, clock.share(share, step + 1, t.schedule, t.min_lr), share)
            if student:
                student.joint = share >= config.head.medusa2.heads_first
            watch.exact = (step + 1) % t.log_every == 0
            guard.reset()
            first = step * parts + ranks.rank  # this process's first micro-batch of the step, of all in the run
            seeds = [config.seed * SEEDS + first + n * ranks.world for n in range(t.accumulate)]
            outputs = optimizer_step(engine, reader, tally, watch, seeds, ranks)
            guard.settle()
            step += 1
            count_skipped(state, guard)
            if state["bad"] >= BAD_IN_A_ROW:
                raise TrainingFailed(bad_rows(outputs, step, guard.reason, ranks))
            if average and guard.reason is None:
                average.update(step - state["skipped"])
            share = ranks.agree(clock.progress(step))
            if step % t.log_every == 0 or share >= 1:
                norm = guard.norm if math.isfinite(guard.norm) else None
                facts = {"lr": lr, "epoch": plan.epoch_of(step - 1), "grad_norm": norm, "valid_tau": state["tau"]}
                facts |= {key: state[key] for key in ("skipped", "spikes")} | clock.facts(share)
                log.write({"step": step, "share": share, **tally.read(ranks), **facts, "seconds": watch.read(),
                           **memory(ranks.device)})
            if share >= 1 or step % t.eval_every == 0:
                validate(share)
                if share < 1 and progress() == 1:
                    share = 1.0
                    log.say(f"{t.patience} evaluations in a row without a better τ (train.patience): stopping here")
            if share >= 1 or step % t.save_every == 0:
                began = time.monotonic()
                state |= {"step": step, "elapsed": clock.elapsed, "parts": parts, "guard": guard.state(), **expected}
                with snapshot.of(engine, shards, average) as served:
                    checkpoint.save(
                        folder / "checkpoints", state, served, snapshot.fixed, write, shards, average, t.keep, ranks
                    )
                tally.leave_out(time.monotonic() - began)
        if step == 0:
            logger.warning("train.seconds=%g left no time for a step after the first evaluation", t.seconds or 0)
        with snapshot.of(engine, shards, average) as served:
            best.finish(served, step, run / "head")
        log.say(f"{step} steps ({state['skipped']} skipped), best: {best.step}; the head is in {run / 'head'}")
    finally:
        reader.close()
        log.close()
        watch.collectives.release()


# ------------------------------------------------------------------------------------------------- the start

def build_head(config: RecipeConfig, run: Path, device: torch.device) -> Head:
    """A fresh (or warm-started) head with the target's tensors lent to it, the same on every process."""
    parts = load_parts(config.target)
    sample = first_rows(CaptureStore(run / "captures", config.data.max_length))
    supervised_V, all_V = ResponseStore(run / "responses").token_counts("train", len(parts.lm_head))
    torch.manual_seed(config.seed)
    head = new_head(config, parts, supervised_V, all_V, sample.to(device))
    head.attach(parts.embedding, parts.lm_head)
    more = {"draft_vocab": checkpoint.mapping_hash(head), "family": getattr(parts.config, "model_type", None)}
    head.config.made_for = made_for(config.target, run, parts.texts) | more
    return head


def start_engine(model: Answer, config: RecipeConfig, ranks: Ranks) -> Any:
    """The DeepSpeed engine around the head alone."""
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules

    settings = engine_config(config.train)
    model.to(ranks.device)
    if config.train.optimizer == "muon" and ranks.device.type == "cpu":
        torch.compiler.set_stance("force_eager")  # DeepSpeed compiles Muon, on a CPU with a C++ compiler and for long
    optimizer = make_optimizer(model, config.train)
    with quiet():
        set_z3_leaf_modules(model, [Answer])  # a head computes with its weights outside of the modules they belong to
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def resume_from(folder: Path, ranks: Ranks) -> Path | None:
    found = checkpoint.latest(folder, lambda text: print(text, flush=True)) if ranks.first else None
    return ranks.agree(found)


# ------------------------------------------------------------------------------------------------- the loop

def set_lr(engine: Any, config: RecipeConfig, share: float, done: float) -> float:
    """Sets the learning rate of every group to `share` of its peak; returns AdamW's. done: share of the run.

    The target's factors (head.medusa2) wait for the heads, and then have a warm-up of their own.
    """
    joint = config.head.medusa2
    for group in engine.optimizer.param_groups:
        peak = peak_lr(group, config.train)
        if group.get("of_target"):
            waited = (done - joint.heads_first) / max(config.train.warmup, 1e-9)
            peak = (joint.lr or config.train.lr / 4) * min(1.0, max(0.0, waited))
        group["lr"] = share * peak
    return share * config.train.lr


def optimizer_step(
    engine: Any, reader: Reader | OnlineReader, tally: Tally, watch: Stopwatch, seeds: list[int], ranks: Ranks
) -> list[tuple[Tensor, list[str]]]:
    """Runs the micro-batches of one optimizer step; returns the loss and row ids of each.

    seeds: one per micro-batch, of the random numbers a head draws. They go by the micro-batch's number in the run, so
    that these do not depend on the process that has it, nor on where the run was resumed.
    """
    outputs, dtype = [], next(engine.module.parameters()).dtype
    watch.mark(None)
    for seed in seeds:
        batch = reader.next().to(ranks.device, dtype)
        torch.manual_seed(seed % 2**63)
        watch.mark("data")
        if reader.target_s is not None:
            watch.of_target(reader.target_s, reader.source.inside)
        output = answer(engine, batch)
        watch.mark("forward")
        engine.backward(poisoned(output.loss))
        watch.mark("backward")
        engine.step()
        watch.mark("optimizer")
        tally.add(output, batch)
        outputs.append((output.loss.detach(), batch.rows))
    tally.steps += 1
    watch.end_step()
    return outputs


def poisoned(loss: Tensor) -> Tensor:
    """The loss; where it is not finite, one with NaN gradients on every weight, so that no process takes the step."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)


def count_skipped(state: dict[str, Any], guard: Guard) -> None:
    state["bad"] = 0 if guard.reason is None else state["bad"] + guard.failing
    state["skipped"] += guard.reason is not None
    state["spikes"] += guard.reason == "a spike"


def bad_rows(outputs: list[tuple[Tensor, list[str]]], step: int, reason: str | None, ranks: Ranks) -> str:
    """The message of a run that stops; names the rows of non-finite losses, else all of the last step."""
    bad = [row for loss, rows in outputs if not bool(loss.isfinite()) for row in rows]
    found = ranks.gather((bad, [row for _, rows in outputs for row in rows]))
    suspects = [row for bad, _ in found for row in bad] or [row for _, rows in found for row in rows]
    what = (
        "the gradient's norm was a spike (train.spike)" if reason == "a spike"
        else "the loss or its gradient was not finite"
    )  # fmt: skip
    return (
        f"{what} in {BAD_IN_A_ROW} optimizer steps in a row, up to step {step}; "
        f"rows of the last one: {', '.join(suspects[:20])}. Check these captures, or lower train.lr"
    )
