"""What all drafters that copy from text share: one record per request, and a chain of what each record found.

Shapes: B requests, K draft tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headtrain.eval.decoder.drafters.base import Drafter, News
from headtrain.tree import DraftTree


class Record(Protocol):
    """The text of one request, searchable."""

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens to the text."""

    def continuation(self, k: int) -> list[int]:
        """At most k tokens that may follow the text; empty when it says nothing about them."""


class LookupDrafter(Drafter):
    """Chains from the requests' own records. Every token is a choice, not a draw (its q is a point mass)."""

    def record(self, first: int) -> Record:
        """A record of a text that begins with the token `first`."""
        raise NotImplementedError

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        self._rows = [self.record(prompt[0]) for prompt in prompts]

    def observe(self, news: News) -> None:
        self._device = news.tokens_BL.device
        for row, tokens in zip(self._rows, news.tokens, strict=True):
            row.extend(tokens)

    def propose(self, k: int, uniform_BK: Tensor | None = None) -> DraftTree:
        found = [row.continuation(k) for row in self._rows]
        width = max(map(len, found))
        tokens_BK = torch.tensor([f + [0] * (width - len(f)) for f in found], dtype=torch.long, device=self._device)
        counts_B = torch.tensor([len(f) for f in found], dtype=torch.long, device=self._device)
        return DraftTree.chain(tokens_BK.view(len(found), width), counts_B)

    def select(self, rows: Tensor) -> None:
        self._rows = [self._rows[i] for i in rows.tolist()]
