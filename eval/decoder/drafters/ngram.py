"""Prompt lookup: what followed the same few tokens the last time, in the prompt or the text so far. Needs no network.

Source: Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headtrain.eval.decoder.drafters.base import Drafter, News
from headtrain.tree import DraftTree


class History:
    """The tokens of one request, and for every n-gram in them where its latest continuation begins."""

    def __init__(self, first: int, shortest: int, longest: int):
        self.tokens = [first]
        self.lengths = range(longest, shortest - 1, -1)
        self.after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens; the n-grams that end just before each of them now point at it."""
        for token in tokens:
            end = len(self.tokens)
            for n in self.lengths:
                if n <= end:
                    self.after[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def continuation(self, k: int) -> list[int]:
        """The k tokens that followed the longest known suffix when it last occurred; empty when none did.

        Where the copy runs into the end of the text it goes on into itself, so that a loop is continued.
        """
        tokens = self.tokens
        for n in self.lengths:
            start = self.after.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if start is not None:
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(k)]
        return []


class NgramDrafter(Drafter):
    """Looks for suffixes of `longest` down to `shortest` tokens."""

    name = "ngram"

    def __init__(self, shortest: int = 1, longest: int = 3):
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-gram lengths {shortest} … {longest}: needs 1 ≤ shortest ≤ longest")
        self.shortest, self.longest = shortest, longest

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        self._rows = [History(prompt[0], self.shortest, self.longest) for prompt in prompts]

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
