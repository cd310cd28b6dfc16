"""A trained head as a drafter: chains, the likeliest token at temperature 0, drawn from the head's distribution above.

Shapes: B requests, K draft tokens, H head hidden, W draft vocab, V target vocab.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headtrain.eval.decoder.drafters.base import Drafter, News
from headtrain.eval.decoder.sampling import Sampling, draw, probabilities
from headtrain.heads.base import Head
from headtrain.tree import DraftTree


class HeadDrafter(Drafter):
    name = "head"

    def __init__(self, head: Head, sampling: Sampling):
        self.head, self.sampling = head, sampling
        self.taps = tuple(head.config.taps)

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        self._state = self.head.start(len(prompts), capacity)

    def observe(self, news: News) -> None:
        self._logits_BW, self._hidden_BH = self.head.extend(
            self._state, news.tokens_BL, news.taps_BLAH, news.last_BLH, news.counts_B
        )

    def propose(self, k: int, uniform_BK: Tensor | None = None) -> DraftTree:
        logits_BW, hidden_BH = self._logits_BW, self._hidden_BH
        tokens, q = [], []
        for depth in range(k):
            if depth:
                logits_BW, hidden_BH = self.head.expand(self._state, tokens[-1], hidden_BH)
            if self.sampling.greedy:
                ids_B = logits_BW.argmax(-1)
            else:
                q_BW = probabilities(logits_BW, self.sampling)
                ids_B = draw(q_BW, uniform_BK[:, depth])
                q.append(self._widen(q_BW))
            tokens.append(self.head.to_target_ids(ids_B))
        if not tokens:
            return DraftTree.chain(torch.zeros(len(logits_BW), 0, dtype=torch.long, device=logits_BW.device))
        return DraftTree.chain(torch.stack(tokens, 1), q_BKV=torch.stack(q, 1) if q else None)

    def _widen(self, q_BW: Tensor) -> Tensor:
        """The same distribution over the target's vocabulary, zero outside the draft vocab."""
        ids_W = self.head.to_target_ids(torch.arange(q_BW.shape[1], device=q_BW.device))
        return q_BW.new_zeros(len(q_BW), self.head.config.vocab_size).index_copy_(1, ids_W, q_BW)

    def select(self, rows: Tensor) -> None:
        self.head.select(self._state, rows)
