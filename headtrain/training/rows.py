"""Which rows a run trains on, validates on, and fits a fresh head to.

Shapes: R rows, D depths, V target vocabulary.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from headtrain.config import RecipeConfig
from headtrain.data_gen.store import CaptureStore, ResponseStore, rows_of_start
from headtrain.files import fingerprint
from headtrain.heads.base import Batch, Head
from headtrain.training.batches import collate, count_pairs
from headtrain.training.ranks import Ranks

logger = logging.getLogger(__name__)


def first_rows(store: CaptureStore) -> Batch:
    """The training rows that a fresh head is fitted to."""
    chosen = rows_of_start(store.rows, len(store.taps), store.hidden)
    if not chosen:
        raise ValueError(f"{store.folder}: no row of split `train` to train on")
    return collate([store.read(row) for row in chosen], [row.id for row in chosen])


def select_rows(config: RecipeConfig, run: Path, head: Head, ranks: Ranks) -> tuple[CaptureStore, list, list, Tensor]:
    """(store, training rows, validation rows, trained pairs [R, D] of the training rows).

    Rows without a single trained pair are left out; every process counts its share of the rows.
    """
    store = captures_of(config, run, head)
    chosen, t2d_V = of_split(store, "train"), draft_mask(head)
    counts_RD = torch.zeros(len(chosen), head.config.unroll, dtype=torch.long, device=ranks.device)
    mine = slice(ranks.rank, None, ranks.world)
    if chosen[mine]:
        counts_RD[mine] = count_pairs(store, chosen[mine], t2d_V, head.config.unroll, config.train.batch_tokens).to(
            ranks.device
        )
    counts_RD = ranks.sum(counts_RD).cpu()
    useful = counts_RD[:, 0] > 0
    rows = [row for row, keep in zip(chosen, useful.tolist(), strict=True) if keep]
    say_what_is_lost(rows, len(chosen), config, ranks)
    return store, rows, of_split(store, "valid")[: config.train.eval_rows], counts_RD[useful]


def select_online(
    config: RecipeConfig, run: Path, head: Head, ranks: Ranks
) -> tuple[CaptureStore, list, list, ResponseStore]:
    """(store of the validation rows, training rows, validation rows, store of the training rows).

    Which pairs are trained shows when the target reads a row; left out are rows that cannot have any.
    """
    store, responses = captures_of(config, run, head), ResponseStore(run / "responses", config.data.max_length)
    chosen, limit = of_split(responses, "train"), config.train.batch_tokens
    rows = [row for row in chosen if row.supervised > 1 and row.first + 1 < limit]
    say_what_is_lost(rows, len(chosen), config, ranks)
    return store, rows, of_split(store, "valid")[: config.train.eval_rows], responses


def captures_of(config: RecipeConfig, run: Path, head: Head) -> CaptureStore:
    """The run's captures. ValueError when the head reads other taps."""
    store = CaptureStore(run / "captures", config.data.max_length)
    if list(store.taps) != list(head.config.taps):
        raise ValueError(
            f"{store.folder} holds the taps {store.taps} and the head reads {head.config.taps}: "
            f"set head.taps={store.taps} or capture again"
        )
    return store


def of_split(store: CaptureStore | ResponseStore, split: str) -> list:
    return sorted((row for row in store.rows if row.split == split), key=lambda row: row.id)


def draft_mask(head: Head) -> Tensor | None:
    """The target tokens that the head can draft, bool [V]; None where it can draft all."""
    return None if bool(head.t2d.all()) else head.t2d.cpu()


def say_what_is_lost(rows: list, of: int, config: RecipeConfig, ranks: Ranks) -> None:
    if len(rows) < of and ranks.first:
        print(f"{of - len(rows)} of {of} rows have no trained pair and are left out", flush=True)
    if cut := sum(row.tokens > config.train.batch_tokens for row in rows):
        logger.warning("%d of %d rows are longer than train.batch_tokens=%d and are cut to it", cut, len(rows),
                    config.train.batch_tokens)  # fmt: skip


def data_fingerprint(config: RecipeConfig, rows: list) -> str:
    """Of everything that decides which rows a step sees."""
    return fingerprint([config.seed, config.train.batch_tokens, [(row.id, row.tokens) for row in rows]])
