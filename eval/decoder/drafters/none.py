"""Plain decoding: a drafter that proposes nothing, so that the baseline runs on the same path as everything else."""

from __future__ import annotations

import torch
from torch import Tensor

from headtrain.eval.decoder.drafters.base import Drafter, News
from headtrain.tree import DraftTree


class NoDrafter(Drafter):
    name = "none"

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        self._rows = len(prompts)

    def observe(self, news: News) -> None:
        self._device = news.tokens_BL.device

    def propose(self, k: int, uniform_BK: Tensor | None = None) -> DraftTree:
        return DraftTree.chain(torch.zeros(self._rows, 0, dtype=torch.long, device=self._device))

    def select(self, rows: Tensor) -> None:
        self._rows = len(rows)
