"""Drafting token by token with a language model: the chain, its distributions, and where it stops.

Shapes: B requests, K draft tokens, L tokens of a text, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headtrain.eval.decoder.drafters.base import Drafter, News
from headtrain.eval.decoder.sampling import Sampling, adjust, draw, probabilities
from headtrain.tree import DraftTree


class UnrolledDrafter(Drafter):
    """The likeliest token at temperature 0, above it one drawn from the model's distribution, warped as the target's.

    One more token is drafted only while the product of the confidences of those before it (what the model gives them,
    warped too) is at least `min_confidence`. That no token's own draw decides on its drafting keeps sampling exact.
    """

    def __init__(self, sampling: Sampling, min_confidence: float = 0.0):
        self.sampling, self.min_confidence = sampling, min_confidence
        self.text: list[list[int]] = []  # each request's true tokens

    def first(self, k: int) -> tuple[Tensor, Tensor | None]:
        """Logits [B, V] of the token after the text, when k tokens are to be drafted; bool [B], false where the model
        has none to offer (None: it has everywhere)."""
        raise NotImplementedError

    def further(self, tokens_B: Tensor) -> tuple[Tensor, Tensor | None]:
        """The same after one more draft token."""
        raise NotImplementedError

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        self.text = [prompt[:1] for prompt in prompts]

    def observe(self, news: News) -> None:
        self._device = news.tokens_BL.device
        for text, tokens in zip(self.text, news.tokens, strict=True):
            text += tokens

    def select(self, rows: Tensor) -> None:
        self.text = [self.text[i] for i in rows.tolist()]

    def propose(self, k: int, uniform_BK: Tensor | None = None) -> DraftTree:
        tokens, q = [torch.zeros(len(self.text), 0, dtype=torch.long, device=self._device)], []
        counts_B = torch.zeros(len(self.text), dtype=torch.long, device=self._device)
        going_B, confidence_B, seen_BV = counts_B == 0, 1.0, None
        for depth in range(k):
            logits_BV, offered_B = self.further(tokens[-1][:, 0]) if depth else self.first(k)
            if self.sampling.repetition_penalty != 1:
                seen_BV = self._seen(logits_BV) if seen_BV is None else seen_BV.scatter(1, tokens[-1], True)
            if self.sampling.greedy:
                logits_BV = adjust(logits_BV, self.sampling, seen_BV)
                tokens.append(logits_BV.argmax(-1, keepdim=True))
            else:
                q.append(probabilities(logits_BV, self.sampling, seen_BV))
                tokens.append(draw(q[-1], uniform_BK[:, depth])[:, None])
            going_B = going_B if offered_B is None else going_B & offered_B
            counts_B = counts_B + going_B
            if self.min_confidence:
                chances_BV = q[-1] if q else logits_BV.softmax(-1)
                confidence_B = confidence_B * chances_BV.gather(1, tokens[-1])[:, 0]
                going_B = going_B & (confidence_B >= self.min_confidence)
                if not going_B.any():
                    break
        return DraftTree.chain(torch.cat(tokens, 1), counts_B, torch.stack(q, 1) if q else None)

    def _seen(self, logits_BV: Tensor) -> Tensor:
        """bool [B, V]: the tokens of each request's text."""
        width = max(map(len, self.text))
        ids_BL = torch.tensor([text + text[:1] * (width - len(text)) for text in self.text], device=logits_BV.device)
        return torch.zeros_like(logits_BV, dtype=torch.bool).scatter_(1, ids_BL, True)
