"""Two drafters in one: where the text repeats itself, prompt lookup (free and long); elsewhere the head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headtrain.eval.decoder.drafters.base import Drafter, News
from headtrain.eval.decoder.drafters.head import HeadDrafter
from headtrain.eval.decoder.drafters.ngram import NgramDrafter
from headtrain.tree import DraftTree


class HybridDrafter(Drafter):
    """A request takes the n-gram's chain when a long enough suffix was seen before, else the head's.

    Which one is taken depends on the text so far only, so the output keeps the target's distribution.
    """

    name = "head+ngram"

    def __init__(self, head: HeadDrafter, ngram: NgramDrafter):
        self.head, self.ngram, self.taps = head, ngram, head.taps

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        self.head.start(prompts, capacity)
        self.ngram.start(prompts, capacity)

    def observe(self, news: News) -> None:
        self.head.observe(news)
        self.ngram.observe(news)

    def propose(self, k: int, uniform_BK: Tensor | None = None) -> DraftTree:
        copied = self.ngram.propose(k)
        copied_B1 = copied.counts[:, None] > 0
        if bool(copied_B1.all()):
            return copied
        drafted = self.head.propose(k, uniform_BK)
        if copied.tokens.shape[1] == 0:
            return drafted
        width = drafted.tokens.shape[1]
        tokens_BK = nn.functional.pad(copied.tokens, (0, width - copied.tokens.shape[1]))
        q_BKV = drafted.q
        if q_BKV is not None:  # a copied token is a point mass
            point_BKV = torch.zeros_like(q_BKV).scatter_(2, tokens_BK[..., None], 1)
            q_BKV = torch.where(copied_B1[..., None], point_BKV, q_BKV)
        return DraftTree.chain(
            torch.where(copied_B1, tokens_BK, drafted.tokens),
            torch.where(copied_B1[:, 0], copied.counts, drafted.counts),
            q_BKV,
        )

    def select(self, rows: Tensor) -> None:
        self.head.select(rows)
        self.ngram.select(rows)
