"""Objectives: pure functions of one chunk of rows, with the gradients in closed form.

m rows (trained pairs), U teacher positions (several rows share one: the same text position at several depths), V draft
vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Rows:
    """One chunk: `x` [m, H] hidden after the head's norm, `which` int64 [m] the teacher position of each row, `label`
    int64 [m] the draft id of the teacher's choice, `weight` float32 [m]."""

    x: Tensor
    which: Tensor
    label: Tensor
    weight: Tensor


@dataclass
class Graded:
    """`loss` float32 [m], unweighted; `hit` bool [m]: the label has the highest logit; `dx` [m, H] and `dw` [V, H]: the
    gradients of Σ weight · loss, None where not asked for."""

    loss: Tensor
    hit: Tensor
    dx: Tensor | None
    dw: Tensor | None


def soft_ce(rows: Rows, lm_head_VH: Tensor, teacher_UV: Tensor, needs_x: bool = True, needs_w: bool = True) -> Graded:
    """Cross-entropy against the teacher renormalised over the draft vocabulary, Σ_v p_v · (lse − z_v) with z = W x.

    The teacher enters only through W'p, which is made once per position, not once per row: Σ p z = x · W'p, and the
    gradients are W'q − W'p and q'x − p'x. `teacher_UV` are logits.
    """
    x, weight = rows.x, rows.weight.to(rows.x.dtype)[:, None]
    z = x @ lm_head_VH.T
    top = z.amax(-1)
    hit = z.gather(1, rows.label[:, None])[:, 0] >= top
    q = torch.softmax(z, -1)
    p = torch.softmax(teacher_UV, -1).to(x.dtype)
    mean_UH = p @ lm_head_VH
    mean = mean_UH[rows.which]
    lse = top.float() - q.amax(-1).float().log()
    loss = lse - (x.float() * mean.float()).sum(-1)
    dx = (q @ lm_head_VH - mean) * weight if needs_x else None
    dw = None
    if needs_w:
        weighted = x * weight
        shared = torch.zeros(len(p), x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, rows.which, weighted)
        dw = q.T @ weighted - p.T @ shared
    return Graded(loss, hit, dx, dw)


OBJECTIVES = {"soft_ce": soft_ce}
