"""Greedy chain decoding, simulated on captures: how many drafts would have been accepted, without running the target.

Pure functions. N packed positions, R documents (in rank_hits: ranks), K draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headtrain.heads.base import Batch
from headtrain.heads.vocab import trained_pairs


def correct_prefix(drafts_NK: Tensor, argmax_N: Tensor) -> Tensor:
    """Per slot, how many leading drafts are the target's choice: int64 [N].

    Draft d of slot p is right when it equals argmax[p+1+d]; positions past the end count as wrong.
    """
    n, k = drafts_NK.shape
    teacher = torch.arange(n, device=argmax_N.device)[:, None] + 1 + torch.arange(k, device=argmax_N.device)
    right = (drafts_NK == argmax_N.long()[teacher.clamp(max=n - 1)]) & (teacher < n)
    return right.long().cumprod(1).sum(1)


def rank_hits(ranked_NKR: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """How often each of a depth's likeliest tokens is the target's choice, over all supervised pairs (slot, depth).

    ranked_NKR: `Head.ranked`. Returns int64 [K, R] and the number of pairs, int64 [K].
    """
    n, k, _ = ranked_NKR.shape
    _, reach_KN = trained_pairs(batch.supervised_N, batch.argmax_N, None, batch.cu_R1, k)
    teacher_NK = torch.arange(n)[:, None] + 1 + torch.arange(k)
    hit_NKR = ranked_NKR == batch.argmax_N[teacher_NK.clamp(max=n - 1)][..., None]
    return (hit_NKR & reach_KN.T[..., None]).sum(0), reach_KN.sum(1)


def spans(supervised_N: Tensor, cu_R1: Tensor) -> list[tuple[int, int]]:
    """The supervised spans [start, end) of packed documents; a span never crosses a document's border."""
    before = torch.cat([supervised_N.new_zeros(1), supervised_N[:-1]])
    starts_document = torch.zeros_like(supervised_N)
    starts_document[cu_R1[:-1].long().clamp(max=len(supervised_N) - 1)] = True
    starts = torch.nonzero(supervised_N & (~before | starts_document)).flatten().tolist()
    after = torch.cat([supervised_N[1:], supervised_N.new_zeros(1)])
    ends_document = torch.zeros_like(supervised_N)
    ends_document[cu_R1[1:].long() - 1] = True
    ends = torch.nonzero(supervised_N & (~after | ends_document)).flatten().tolist()
    return [(start, end + 1) for start, end in zip(starts, ends, strict=True)]


def accepted_chain(drafts_NK: Tensor, argmax_N: Tensor, supervised_N: Tensor, cu_R1: Tensor, k: int) -> list[int]:
    """Accepted drafts of each decoding step, over all responses of a packed batch.

    drafts_NK: target ids, the greedy chain of every slot (at least k columns). A response's first token comes from the
    prefill, so its first step starts at the last prompt token's slot p; a step that accepts a drafts goes on at slot
    p+1+a. As in a decoder with a token budget, a step never proposes beyond the stored response: with r tokens left it
    drafts min(k, r-1). Responses without a prompt token before them start at their first slot.
    """
    leading = correct_prefix(drafts_NK[:, :k], argmax_N).tolist()
    first = set(cu_R1[:-1].tolist())
    accepted = []
    for start, end in spans(supervised_N, cu_R1):
        slot = start if start in first else start - 1
        while (left := end - slot - 2) > 0:
            accepted.append(min(leading[slot], k, left - 1))
            slot += 1 + accepted[-1]
    return accepted


@dataclass
class Acceptance:
    """Pooled over all steps. `tau` = 1 + accepted / steps; `alpha[i]`: share of steps with more than i accepted."""

    steps: int
    accepted: int
    tau: float
    alpha: list[float]


def summarize(accepted_per_step: list[int] | Tensor, k: int) -> Acceptance:
    """Acceptance from raw counts. No steps at all: tau 1 and alpha 0."""
    counts = torch.as_tensor(accepted_per_step, dtype=torch.long)
    return from_histogram(torch.bincount(counts, minlength=k + 1) if len(counts) else torch.zeros(k + 1).long())


def from_histogram(steps_K1: Tensor) -> Acceptance:
    """Acceptance from the number of steps with 0, 1, … K accepted drafts (what ranks add up)."""
    steps = int(steps_K1.sum())
    at_least = steps_K1.flip(0).cumsum(0).flip(0)[1:].tolist()
    accepted = int(sum(at_least))
    return Acceptance(steps, accepted, 1 + accepted / max(steps, 1), [count / max(steps, 1) for count in at_least])
