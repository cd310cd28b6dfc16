"""From logits to the next token's distribution, for the target and for drafters alike.

Order and meaning are those of `transformers.generate`: logit bias, repetition penalty, then, above temperature 0,
temperature, top-k, top-p, min-p. Shapes: B rows, V vocabulary, W columns of a draft vocab.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the target's next token is chosen. temperature 0: its argmax (then top_p, top_k and min_p play no part)."""

    temperature: float = 0.0
    top_p: float = 1.0  # keep the smallest set of tokens whose probabilities reach this; 1: all
    top_k: int = 0  # keep this many tokens; 0: all
    min_p: float = 0.0  # keep tokens at least this likely relative to the likeliest; 0: all
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen so far, multiplies negative ones
    logit_bias: dict[int, float] | None = None  # target token id → added to its logit; -inf forbids the token

    def __post_init__(self):
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or not 0 <= self.min_p <= 1:
            raise ValueError(f"{self}: needs temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0 and 0 ≤ min_p ≤ 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"{self}: needs repetition_penalty > 0 (1: none)")
        for token, bias in (self.logit_bias or {}).items():
            if token < 0 or not bias < math.inf:
                raise ValueError(f"logit_bias {token}: {bias}: needs a token id ≥ 0 and a number or -inf")

    greedy = property(lambda self: self.temperature == 0)


def adjust(logits: Tensor, sampling: Sampling, seen: Tensor | None = None, ids_W: Tensor | None = None) -> Tensor:
    """float32, shaped as `logits` [..., V]: logit bias, then repetition penalty; greedy decoding takes its argmax.

    seen: bool [..., V], the tokens of the text before each position, prompt included; None: none yet.
    ids_W: int64 [W], where the logits' columns are a draft vocab: their target ids (`seen` stays over V).
    Raises ValueError for a biased token that the vocabulary lacks.
    """
    logits = logits.float()
    if sampling.logit_bias:
        width = logits.shape[-1] if ids_W is None else None
        bias_V = _bias(tuple(sampling.logit_bias.items()), width, logits.device)
        logits = logits + (bias_V if ids_W is None else _columns(bias_V, ids_W))
    if sampling.repetition_penalty != 1 and seen is not None:
        penalty = sampling.repetition_penalty
        seen = seen if ids_W is None else seen[..., ids_W]
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    return logits


@lru_cache(maxsize=16)
def _bias(items: tuple[tuple[int, float], ...], width: int | None, device: torch.device) -> Tensor:
    """float32 [width] (None: up to the last biased token), kept on the device, so that a step copies nothing to it."""
    last = max(token for token, _ in items)
    if width is not None and last >= width:
        raise ValueError(f"logit_bias names token {last}, but the vocabulary ends at {width - 1}")
    bias = torch.zeros(width or last + 1)
    for token, value in items:
        bias[token] = value
    return bias.to(device)


def _columns(bias_V: Tensor, ids_W: Tensor) -> Tensor:
    last = len(bias_V) - 1
    return bias_V[ids_W.clamp_max(last)].masked_fill(ids_W > last, 0)


def probabilities(
    logits: Tensor, sampling: Sampling, seen: Tensor | None = None, ids_W: Tensor | None = None
) -> Tensor:
    """float32 [..., V]: `adjust`, softmax at the temperature, top-k, top-p, min-p, renormalised. temperature > 0."""
    logits = adjust(logits, sampling, seen, ids_W) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        lowest = logits.topk(sampling.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    p = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = p.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        drop = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        p = p.masked_fill(drop, 0)
    if sampling.min_p > 0:
        p = p.masked_fill(p < sampling.min_p * p.amax(-1, keepdim=True), 0)
    return p / p.sum(-1, keepdim=True) if sampling.top_p < 1 or sampling.min_p > 0 else p


def draw(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """int64 [B]: one token per row in proportion to its weight (≥ 0, not all 0), by inverting the cumulated weights."""
    cumulated = weights_BV.double().cumsum(-1)
    wanted = uniform_B.double() * cumulated[:, -1]
    token_B = torch.searchsorted(cumulated, wanted[:, None], right=True)[:, 0]
    last_B = (cumulated < cumulated[:, -1:]).sum(-1)  # the last token with a weight above 0: a guard against rounding
    return torch.minimum(token_B, last_B)
