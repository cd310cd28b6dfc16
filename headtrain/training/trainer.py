"""The training stage: captures in, head out. `train` reads from top to bottom; the rest is what it calls.

Shapes: N packed positions, D unroll depths, K draft tokens, V target vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtrain.config import RecipeConfig
from headtrain.data_gen.store import CaptureStore, ResponseStore
from headtrain.files import fingerprint, fsync_folder, read_json, write_json
from headtrain.heads.base import Batch, Head, HeadOutput, new_head, save_head
from headtrain.heads.simulate import Acceptance, accepted_chain, from_histogram
from headtrain.target import load_parts
from headtrain.training import checkpoint
from headtrain.training.batches import Plan, Reader, collate, count_pairs
from headtrain.training.log import Stopwatch, Tally, TrainLog
from headtrain.training.optim import Clock, Guard, check_optimizer, engine_config, make_optimizer, peak_lr
from headtrain.training.ranks import Ranks, join, leave, quiet

BAD_IN_A_ROW = 5  # optimizer steps with a loss or gradient that is not finite before the run stops


class TrainingFailed(ValueError):
    """Training cannot go on; the message says why and where to look."""


def train(config: RecipeConfig, run: Path) -> None:
    """Trains the head of `run` (a run folder with finished responses and captures) and writes run/head.

    Goes on from the last checkpoint in run/training/checkpoints. Runs as one process or as one of several (RANK,
    WORLD_SIZE, MASTER_*); each must call it. Raises ValueError on settings that do not fit and TrainingFailed when the
    loss stays non-finite.
    """
    check_optimizer(config.train)
    engine_config(config.train)
    ranks = join(config.target.device, config.train.threads)
    _train(config, run, ranks)
    leave()  # not after an error: the others may be waiting in a collective, and the launcher ends them


def _train(config: RecipeConfig, run: Path, ranks: Ranks) -> None:
    t, folder = config.train, run / "training"
    head = build_head(config, run, ranks.device)
    depths, draft_k = head.config.unroll, max(config.eval.k)
    store, rows, valid, counts_RD = select_rows(config, run, head, ranks)
    parts = ranks.world * t.accumulate
    plan = Plan([min(row.tokens, t.batch_tokens) for row in rows], t.batch_tokens, config.seed, parts)
    steps = t.steps or (plan.steps_of(t.epochs) if t.epochs else None)

    engine, guard = start_engine(head, config, ranks)
    expected = {
        "zero_stage": t.zero_stage, "precision": t.precision, "optimizer": t.optimizer, "parts": parts,
        "mapping": checkpoint.mapping_hash(head), "data": data_fingerprint(config, rows),
    }  # fmt: skip
    state = {"step": 0, "elapsed": 0.0, "skipped": 0, "bad": 0, "tau": None}
    place = resume_from(folder / "checkpoints", ranks)
    if place:
        state = checkpoint.load(engine, place, expected, ranks)
    step = state["step"]
    log = TrainLog(config, run, ranks, step)
    log.say(f"{place.name}: going on from step {step}" if place else f"{len(rows)} rows, {len(valid)} for validation")

    clock = Clock(steps, t.seconds, t.warmup, state["elapsed"])
    reader = Reader(store, rows, counts_RD, plan, ranks.rank, ranks.world, first=step)
    best = Best(folder, ranks, engine, torch.bfloat16 if t.precision == "bf16" else torch.float32)
    tally, watch = Tally(depths, ranks.device), Stopwatch(ranks.device)

    def validate(share: float) -> None:
        began = time.monotonic()
        found = evaluate(engine, store, valid, draft_k, t.batch_tokens, ranks)
        if found is None:
            return
        clock.reserve = ranks.agree(time.monotonic() - began)
        best.offer(found, step)
        state["tau"] = found.tau
        log.write({"step": step, "share": share, **vars(found)})

    try:
        if step == 0:
            validate(0.0)
        share = ranks.agree(clock.progress(step))
        while share < 1:
            lr = set_lr(engine, config, clock.share(share, step + 1, t.schedule, t.min_lr))
            watch.exact = (step + 1) % t.log_every == 0
            outputs = optimizer_step(engine, reader, tally, watch, t.accumulate, ranks)
            step += 1
            norm = guard.norm if guard else float(engine.get_global_grad_norm())
            state["bad"] = 0 if math.isfinite(norm) else state["bad"] + 1
            state["skipped"] += not math.isfinite(norm)
            if state["bad"] >= BAD_IN_A_ROW:
                raise TrainingFailed(bad_rows(outputs, step, ranks))
            share = ranks.agree(clock.progress(step))
            if step % t.log_every == 0 or share >= 1:
                facts = {"lr": lr, "epoch": plan.epoch_of(step - 1), "grad_norm": norm if math.isfinite(norm) else None}
                facts |= {"skipped": state["skipped"], "valid_tau": state["tau"], **clock.facts(share)}
                log.write({"step": step, "share": share, **tally.read(ranks), **facts, **watch.read()})
            if share >= 1 or step % t.eval_every == 0:
                validate(share)
            if share >= 1 or step % t.save_every == 0:
                state |= {"step": step, "elapsed": clock.elapsed, **expected}
                checkpoint.save(engine, folder / "checkpoints", state, t.keep, ranks)
        best.finish(step, run / "head")
        log.say(f"{step} steps ({state['skipped']} skipped), best: {best.step}; the head is in {run / 'head'}")
    finally:
        reader.close()
        log.close()


# ------------------------------------------------------------------------------------------------- the start

def build_head(config: RecipeConfig, run: Path, device: torch.device) -> Head:
    """A fresh (or warm-started) head with the target's tensors lent to it, the same on every process."""
    parts = load_parts(config.target)
    sample = first_rows(CaptureStore(run / "captures", config.data.max_length))
    supervised_V, all_V = ResponseStore(run / "responses").token_counts("train", len(parts.lm_head))
    torch.manual_seed(config.seed)
    head = new_head(config, parts, supervised_V, all_V, sample.to(device))
    head.attach(parts.embedding, parts.lm_head)
    return head


def first_rows(store: CaptureStore, tokens: int = 40_000) -> Batch:
    """The first training rows, by id, with so many tokens in all: what a fresh head is fitted to."""
    chosen = []
    for row in sorted((row for row in store.rows if row.split == "train"), key=lambda row: row.id):
        if tokens <= 0:
            break
        chosen.append(row)
        tokens -= row.tokens
    if not chosen:
        raise ValueError(f"{store.folder}: no row of split `train` to train on")
    return collate([store.read(row) for row in chosen], [row.id for row in chosen])


def select_rows(config: RecipeConfig, run: Path, head: Head, ranks: Ranks) -> tuple[CaptureStore, list, list, Tensor]:
    """(store, training rows, validation rows, trained pairs [R, D] of the training rows).

    Rows without a single trained pair are left out; every process counts its share of the rows.
    """
    store = CaptureStore(run / "captures", config.data.max_length)
    if list(store.taps) != list(head.config.taps):
        raise ValueError(
            f"{store.folder} holds the taps {store.taps} and the head reads {head.config.taps}: "
            f"set head.taps={store.taps} or capture again"
        )
    chosen = sorted((row for row in store.rows if row.split == "train"), key=lambda row: row.id)
    t2d_V = None if bool(head.t2d.all()) else head.t2d.cpu()
    counts_RD = torch.zeros(len(chosen), head.config.unroll, dtype=torch.long, device=ranks.device)
    mine = slice(ranks.rank, None, ranks.world)
    if chosen[mine]:
        counts_RD[mine] = count_pairs(store, chosen[mine], t2d_V, head.config.unroll, config.train.batch_tokens).to(
            ranks.device
        )
    counts_RD = ranks.sum(counts_RD).cpu()
    useful = counts_RD[:, 0] > 0
    rows = [row for row, keep in zip(chosen, useful.tolist(), strict=True) if keep]
    if len(rows) < len(chosen) and ranks.first:
        print(f"{len(chosen) - len(rows)} of {len(chosen)} rows have no trained pair and are left out", flush=True)
    valid = sorted((row for row in store.rows if row.split == "valid"), key=lambda row: row.id)
    return store, rows, valid[: config.train.eval_rows], counts_RD[useful]


def data_fingerprint(config: RecipeConfig, rows: list) -> str:
    """Of everything that decides which rows a step sees."""
    return fingerprint([config.seed, config.train.batch_tokens, [(row.id, row.tokens) for row in rows]])


def start_engine(head: Head, config: RecipeConfig, ranks: Ranks) -> tuple[Any, Guard | None]:
    """The DeepSpeed engine around the head alone; at stage 0 in fp32 also the guard that clips and skips."""
    import deepspeed

    settings = engine_config(config.train)
    head.to(ranks.device)
    head.register_forward_hook(lambda _head, _inputs, output: tuple(vars(output).values()))  # see optimizer_step
    if config.train.optimizer == "muon" and ranks.device.type == "cpu":
        torch.compiler.set_stance("force_eager")  # DeepSpeed compiles Muon, on a CPU with a C++ compiler and for long
    optimizer = make_optimizer(head, config.train)
    with quiet():
        engine, *_ = deepspeed.initialize(model=head, optimizer=optimizer, config=settings)
    return engine, None if settings["zero_optimization"]["stage"] else Guard(optimizer, config.train.clip)


def resume_from(folder: Path, ranks: Ranks) -> Path | None:
    found = checkpoint.latest(folder, lambda text: print(text, flush=True)) if ranks.first else None
    return ranks.agree(found)


# ------------------------------------------------------------------------------------------------- the loop

def set_lr(engine: Any, config: RecipeConfig, share: float) -> float:
    """Sets the learning rate of every group to `share` of its peak; returns AdamW's."""
    for group in engine.optimizer.param_groups:
        group["lr"] = share * peak_lr(group, config.train)
    return share * config.train.lr


def optimizer_step(
    engine: Any, reader: Reader, tally: Tally, watch: Stopwatch, accumulate: int, ranks: Ranks
) -> list[tuple[Tensor, list[str]]]:
    """Runs the micro-batches of one optimizer step; returns the loss and row ids of each.

    DeepSpeed prepares its backward pass by hooks on the forward's output, and finds the tensors of a tuple but not
    those of a dataclass; without them bf16 gradients of earlier micro-batches count again. So the head answers the
    engine with a tuple.
    """
    outputs, dtype = [], next(engine.module.parameters()).dtype
    watch.mark(None)
    for _ in range(accumulate):
        batch = reader.next().to(ranks.device, dtype)
        watch.mark("data")
        output = HeadOutput(*engine(batch))
        watch.mark("forward")
        engine.backward(poisoned(output.loss))
        watch.mark("backward")
        engine.step()
        watch.mark("optimizer")
        tally.add(output, batch)
        outputs.append((output.loss.detach(), batch.rows))
    tally.steps += 1
    return outputs


def poisoned(loss: Tensor) -> Tensor:
    """The loss; where it is not finite, one with NaN gradients on every weight, so that no process takes the step."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)


def bad_rows(outputs: list[tuple[Tensor, list[str]]], step: int, ranks: Ranks) -> str:
    bad = [row for loss, rows in outputs if not bool(loss.isfinite()) for row in rows]
    suspects = [row for rows in ranks.gather(bad or [row for _, rows in outputs for row in rows]) for row in rows]
    return (
        f"the loss or its gradient was not finite in {BAD_IN_A_ROW} optimizer steps in a row, up to step {step}; "
        f"rows of the last one: {', '.join(suspects[:20])}. Check these captures, or lower train.lr"
    )


@contextlib.contextmanager
def resting(engine: Any) -> Iterator[Head]:
    """The head in eval mode and without gradients."""
    head = engine.module
    head.eval()
    try:
        with torch.no_grad():
            yield head
    finally:
        head.train()


def evaluate(
    engine: Any, store: CaptureStore, rows: list, k: int, batch_tokens: int, ranks: Ranks
) -> Acceptance | None:
    """Simulated greedy chain decoding with k drafts over validation rows, shared by the processes; None without any."""
    if not rows:
        return None
    steps_K1 = torch.zeros(k + 1, dtype=torch.long)
    with resting(engine) as head:
        for chosen in packed(rows[ranks.rank :: ranks.world], batch_tokens):
            batch: Batch = collate([store.read(row) for row in chosen], [row.id for row in chosen])
            on_device = batch.to(ranks.device, next(head.parameters()).dtype)
            drafts_NK = head.draft_all(on_device, k).cpu()
            accepted = accepted_chain(drafts_NK, batch.argmax_N, batch.supervised_N, batch.cu_R1, k)
            steps_K1 += torch.bincount(torch.tensor(accepted, dtype=torch.long), minlength=k + 1)
    return from_histogram(ranks.sum(steps_K1.to(ranks.device)).cpu())


def packed(rows: list, budget: int) -> Iterator[list]:
    """Rows in order, in groups of at most `budget` tokens (a longer row is a group of its own)."""
    group: list = []
    for row in rows:
        if group and sum(r.tokens for r in group) + row.tokens > budget:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


class Best:
    """The head with the highest simulated τ: training/best/step-N, named by training/best.json."""

    def __init__(self, folder: Path, ranks: Ranks, engine: Any, dtype: torch.dtype):
        self.folder, self.ranks, self.engine, self.dtype = folder, ranks, engine, dtype
        self.path = folder / "best.json"
        known = ranks.agree(read_json(self.path) if ranks.first and self.path.is_file() else None)
        self.step, self.tau = (known["step"], known["tau"]) if known else (None, None)

    def offer(self, found: Acceptance, step: int) -> None:
        """Keeps the present head when it is at least as good as the best so far. Every process must call it."""
        if self.tau is not None and (found.tau or 0) < self.tau:
            return
        self._keep(step, vars(found))

    def _keep(self, step: int, facts: dict[str, Any]) -> None:
        place = self.folder / "best" / f"step-{step:08d}"
        if self.ranks.first:
            save_head(self.engine.module, place, self.dtype)
        self.step, self.tau = step, facts["tau"]
        if self.ranks.first:
            write_json(self.path, {"step": step, **facts, "folder": str(place.relative_to(self.folder))})
            for old in place.parent.iterdir():
                if old != place:
                    shutil.rmtree(old)

    def finish(self, step: int, head_folder: Path) -> None:
        """Writes run/head: the best head, or without validation rows the last one. Every process must call it."""
        if self.tau is None:
            self._keep(step, {"tau": None, "alpha": None})
        if self.ranks.first:
            copy_head(self.folder / read_json(self.path)["folder"], head_folder)
        self.ranks.barrier()


def copy_head(source: Path, folder: Path) -> None:
    """Copies a head folder file by file, each whole or absent; config.json last."""
    from headtrain.files import writing

    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: path.name == "config.json"):
        with writing(folder / path.name) as part:
            shutil.copyfile(path, part)
    fsync_folder(folder)
