"""Online training (data.captures.mode=online): micro-batches from stored responses and a target that reads them now.

The same batches as from stored captures. How many pairs an optimizer step trains is known once all its micro-batches
have been read, on every process: they are read before its first forward, and the counts are added up by one collective.
Shapes: D depths, V target vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from headtrain.data_gen.store import CaptureRow, ResponseRow, ResponseStore, RowInfo, finite
from headtrain.heads.base import Batch
from headtrain.heads.vocab import trained_pairs
from headtrain.training.batches import Ahead, Plan, collate
from headtrain.training.ranks import Ranks

logger = logging.getLogger(__name__)

States = Callable[[list[Tensor]], list[dict[str, Tensor]]]  # token ids of rows -> the target's states over each


class Here:
    """The target in this process. `inside`: it works while the step waits for it, not beside the step."""

    ahead = 0  # questions that may be asked before the first is answered

    def __init__(self, states: States, device: torch.device):
        self.states, self.device, self.inside = states, device, device.type == "cpu"
        self._asked: list[Tensor] = []

    def ask(self, rows: list[Tensor]) -> None:
        self._asked = rows

    def answer(self) -> tuple[list[dict[str, Tensor]], float]:
        """The states over the rows asked for, and the seconds that they took."""
        began = time.perf_counter()
        return self.states(self._asked), time.perf_counter() - began

    def working(self) -> Any:
        """The context of the thread that asks: on a GPU a stream of its own."""
        if self.device.type == "cpu":
            return contextlib.nullcontext()
        torch.cuda.set_device(self.device)
        return torch.cuda.stream(torch.cuda.Stream())

    def check(self) -> None:
        """Raises when the target is gone."""

    def close(self) -> None:
        pass


class OnlineReader(Ahead):
    """This process's micro-batches from optimizer step `first` on, as Reader's. Every process must ask for each.

    A target in this process on a CPU works when it is asked, elsewhere ahead of the step in the background.
    """

    def __init__(
        self, store: ResponseStore, rows: list[RowInfo], plan: Plan, ranks: Ranks, source: Any, t2d_V: Tensor | None,
        depths: int, first: int = 0,
    ):  # fmt: skip
        """source: Here, or training.apart.Apart. t2d_V: the draft vocabulary, None for the whole one."""
        self.store, self.rows, self.plan, self.ranks, self.source = store, rows, plan, ranks, source
        self.t2d_V, self.depths, self.first = t2d_V, depths, first
        self._step: deque[tuple[Batch, float]] = deque()
        self._unused: set[str] = set()
        self.target_s = 0.0
        if source.inside:
            self._made = self._batches()
        else:
            super().__init__(plan.parts // ranks.world)

    def _batches(self) -> Iterator[tuple[Batch, Tensor, float]]:
        """(micro-batch, its trained pairs [D], seconds that the target took)."""
        asked: deque[tuple[list[RowInfo], list[Any]]] = deque()
        with self.source.working():
            for chosen in self._micros():
                read = [self.store.read(row) for row in chosen]
                self.source.ask([row.ids[: self.plan.budget] for row in read])
                asked.append((chosen, read))
                if len(asked) > self.source.ahead:
                    yield self._captured(*asked.popleft())

    def _micros(self) -> Iterator[list[RowInfo]]:
        number = self.first
        while True:
            for rows in self.plan.step(number)[self.ranks.rank :: self.ranks.world]:
                yield [self.rows[row] for row in rows]
            number += 1

    def _captured(self, chosen: list[RowInfo], read: list[Any]) -> tuple[Batch, Tensor, float]:
        states, seconds = self.source.answer()
        rows = [self._row(info.id, row, own) for info, row, own in zip(chosen, read, states, strict=True)]
        batch = collate(rows, [row.id for row in chosen])
        trained_DN, _ = trained_pairs(batch.supervised_N, batch.argmax_N, self.t2d_V, batch.cu_R1, self.depths)
        return batch, trained_DN.sum(1), seconds

    def _row(self, name: str, row: ResponseRow, own: dict[str, Tensor]) -> CaptureRow:
        """The row with its states; one whose states are not finite trains nothing, and is named once."""
        ids, supervised = row.ids[: self.plan.budget], row.supervised[: self.plan.budget]
        if not all(finite(own[key]) for key in ("taps", "last", "logsumexp")):
            if name not in self._unused:
                self._unused.add(name)
                logger.warning("row %s trains nothing: the target's states over it are not finite", name)
            own, supervised = {key: torch.zeros_like(of) for key, of in own.items()}, torch.zeros_like(supervised)
        return CaptureRow(ids, supervised, **own)

    def next(self) -> Batch:
        if not self._step:
            made = [self._next() for _ in range(self.plan.parts // self.ranks.world)]
            total_D = torch.stack([count_D for _, count_D, _ in made]).sum(0)
            total_D = self.ranks.sum(total_D.to(self.ranks.device)).float()
            for batch, _, seconds in made:
                batch.count_D, batch.parts = total_D, self.plan.parts
                self._step.append((batch, seconds))
        batch, self.target_s = self._step.popleft()
        return batch

    def _next(self) -> tuple[Batch, Tensor, float]:
        if self.source.inside:
            return next(self._made)
        self.source.check()
        return super().next()

    def close(self) -> None:
        if not self.source.inside:
            self._stop.set()
        self.source.close()  # ends a wait of the thread
        if not self.source.inside:
            super().close()
