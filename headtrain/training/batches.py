"""From stored captures to packed micro-batches: the plan of a run, the same for any number of processes; its reader.

The plan is one endless sequence of micro-batches, epoch after epoch, that depends on the seed alone. Optimizer step s
takes the next `parts` = processes x accumulation of them, so every process has the same number of micro-batches by
construction, each row is used once per epoch, and a process finds its place again from the step number.
Shapes: N packed positions, R rows, D depths, V target vocabulary.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headtrain.heads.base import Batch
from headtrain.heads.vocab import trained_pairs

OPEN_BINS = 64  # micro-batches being filled at a time; keeps packing linear in the rows
AHEAD = 2  # micro-batches prepared while the step runs


def pack(lengths: Sequence[int], budget: int, seed: int, epoch: int) -> list[list[int]]:
    """Shuffles rows by (seed, epoch) and packs them first-fit into micro-batches of at most `budget` tokens.

    Every row appears exactly once. lengths: tokens per row, each at most `budget`.
    """
    order = list(range(len(lengths)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    done: list[list[int]] = []
    open_bins: list[tuple[list[int], int]] = []
    for row in order:
        length = lengths[row]
        for i, (rows, used) in enumerate(open_bins):
            if used + length <= budget:
                rows.append(row)
                open_bins[i] = (rows, used + length)
                break
        else:
            if len(open_bins) == OPEN_BINS:
                done.append(open_bins.pop(0)[0])
            open_bins.append(([row], length))
    return done + [rows for rows, _ in open_bins]


class Plan:
    """The sequence of micro-batches of a run, epochs planned when they are reached."""

    def __init__(self, lengths: Sequence[int], budget: int, seed: int, parts: int):
        if not lengths:
            raise ValueError("no row to train on: the captures hold no row of split `train` with a trained pair")
        self.lengths, self.budget, self.seed, self.parts = list(lengths), budget, seed, parts
        self._starts = [0]  # number of the first micro-batch of each epoch planned so far
        self._epochs: dict[int, list[list[int]]] = {}

    def epoch(self, number: int) -> list[list[int]]:
        """The micro-batches of one epoch, each a list of row numbers."""
        if number not in self._epochs:
            packed = pack(self.lengths, self.budget, self.seed, number)
            while len(self._epochs) >= 2:
                self._epochs.pop(min(self._epochs))
            self._epochs[number] = packed
        if number + 1 == len(self._starts):
            self._starts.append(self._starts[-1] + len(self._epochs[number]))
        return self._epochs[number]

    def micro(self, index: int) -> tuple[int, list[int]]:
        """(epoch, rows) of the run's micro-batch number `index`."""
        while self._starts[-1] <= index:
            self.epoch(len(self._starts) - 1)
        number = max(e for e, start in enumerate(self._starts) if start <= index)
        return number, self.epoch(number)[index - self._starts[number]]

    def step(self, number: int) -> list[list[int]]:
        """The `parts` micro-batches of optimizer step `number` (0, 1, …); process r of W takes r, r+W, …"""
        return [self.micro(number * self.parts + i)[1] for i in range(self.parts)]

    def epoch_of(self, step: int) -> int:
        return self.micro(step * self.parts)[0]

    def steps_of(self, epochs: float) -> int:
        """Whole optimizer steps in so many epochs, at least 1."""
        whole = int(epochs)
        while len(self._starts) <= whole + 1:
            self.epoch(len(self._starts) - 1)
        micro = self._starts[whole] + (epochs - whole) * (self._starts[whole + 1] - self._starts[whole])
        return max(1, int(micro) // self.parts)


def collate(rows: Sequence[Any], ids: Sequence[str], limit: int | None = None) -> Batch:
    """Packs capture rows (ids, supervised, taps, last, argmax, logsumexp) end to end, each cut at `limit` tokens."""

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(row, name)[:limit] for row in rows])

    lengths = [len(row.ids[:limit]) for row in rows]
    return Batch(
        ids_N=joined("ids").long(),
        positions_N=torch.cat([torch.arange(length) for length in lengths]),
        cu_R1=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        supervised_N=joined("supervised").bool(),
        taps_NAT=joined("taps"),
        last_NT=joined("last"),
        argmax_N=joined("argmax").long(),
        logsumexp_N=joined("logsumexp").float(),
        rows=list(ids),
    )


def count_pairs(store: Any, rows: Sequence[Any], t2d_V: Tensor | None, depths: int, limit: int) -> Tensor:
    """Trained pairs of every row per depth: int64 [R, D]. Reads token ids and choices only."""
    counts = torch.zeros(len(rows), depths, dtype=torch.long)
    for i, row in enumerate(rows):
        read = store.read(row)
        supervised_N = read.supervised[:limit].bool()
        cu_R1 = torch.tensor([0, len(supervised_N)])
        counts[i] = trained_pairs(supervised_N, read.argmax[:limit], t2d_V, cu_R1, depths)[0].sum(1)
    return counts


class Ahead:
    """Iterates over `_batches()`, made ahead in a background thread.

    An error there is raised where a batch is asked for.
    """

    def __init__(self, ahead: int):
        """ahead: batches that may wait for the step."""
        self._queue: queue.Queue = queue.Queue(ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="batches")
        self._thread.start()

    def _batches(self) -> Iterator[Any]:
        raise NotImplementedError

    def _work(self) -> None:
        try:
            for batch in self._batches():
                self._put(batch)
                if self._stop.is_set():
                    return
        except Exception as error:  # handed over to the training thread, which raises it
            self._put(error)

    def _put(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue

    def next(self) -> Any:
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)


class Reader(Ahead):
    """This process's micro-batches from optimizer step `first` on, from stored captures.

    Each batch carries `count_D`, the trained pairs of its whole optimizer step over all processes, and `parts`.
    """

    target_s: float | None = None  # seconds that the target took for the last batch; stored states need none

    def __init__(
        self, store: Any, rows: Sequence[Any], counts_RD: Tensor, plan: Plan, rank: int, world: int, first: int = 0
    ):
        self.store, self.rows, self.counts_RD, self.plan = store, rows, counts_RD, plan
        self.rank, self.world, self.first = rank, world, first
        super().__init__(AHEAD)

    def _batches(self) -> Iterator[Batch]:
        number = self.first
        while True:
            micros = self.plan.step(number)
            count_D = self.counts_RD[[row for rows in micros for row in rows]].sum(0).float()
            for rows in micros[self.rank :: self.world]:
                chosen = [self.rows[row] for row in rows]
                batch = collate([self.store.read(row) for row in chosen], [row.id for row in chosen], self.plan.budget)
                batch.count_D, batch.parts = count_D, self.plan.parts
                yield batch
            number += 1
