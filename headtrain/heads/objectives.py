"""Objectives: pure functions of one chunk of rows, with the gradients in closed form; and position weights.

A row is a trained pair (slot, depth); the rows of one slot are a chain. Shapes: m rows, U teacher positions (several
rows share one: the same text position at several depths), V draft vocabulary, H hidden, C chains, D depths.
Sources: EAGLE (arXiv 2401.15077), EAGLE-3 (2503.01840), LK losses (2602.23881), D-PACE (2605.18810), VAT (2608.30135).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

LK_SHARPNESS = 3.0  # of lk_hybrid: λ = exp(-3 α)
DPACE_FLOOR = 0.5  # of dpace: a draft's probability p counts as 0.5 p + 0.5


@dataclass
class Rows:
    """One chunk: `x` [m, H] hidden after the head's norm, `which` int64 [m] the teacher position of each row, `label`
    int64 [m] the draft id of the teacher's choice, `lse_U` float32 [U] logsumexp of the teacher over its *full*
    vocabulary, and `weigh`, which makes the rows' weights, float32 [m], from how likely their labels are under the
    head, float32 [m], and whether they are its first choice, bool [m]."""

    x: Tensor
    which: Tensor
    label: Tensor
    lse_U: Tensor
    weigh: Callable[[Tensor, Tensor], Tensor]


@dataclass
class Graded:
    """`loss` float32 [m], unweighted; `hit` bool [m]: the label has the highest logit; `weight` float32 [m]; `dx`
    [m, H] and `dw` [V, H]: the gradients of Σ weight · loss, None where not asked for."""

    loss: Tensor
    hit: Tensor
    weight: Tensor
    dx: Tensor | None
    dw: Tensor | None


@dataclass
class Draft:
    """The head's side of a chunk: logits [m, V] softmaxed, their logsumexp, the label's probability, and hits."""

    q: Tensor
    lse: Tensor
    chosen: Tensor
    hit: Tensor


def _draft(rows: Rows, lm_head_VH: Tensor) -> Draft:
    z = rows.x @ lm_head_VH.T
    top = z.amax(-1)
    label = z.gather(1, rows.label[:, None])[:, 0]
    q = torch.softmax(z, -1)
    lse = top.float() - q.amax(-1).float().log()
    return Draft(q, lse, (label.float() - lse).exp(), label >= top)


def soft_ce(
    rows: Rows, lm_head_VH: Tensor, teacher_UV: Tensor, hard: float = 0.0, needs_x: bool = True, needs_w: bool = True
) -> Graded:
    """Cross-entropy against the teacher renormalised over the draft vocabulary, Σ_v p_v · (lse − z_v) with z = W x.

    With `hard` > 0 the teacher is a mixture: that share of it is its choice alone. The teacher enters only through W'p,
    which is made once per position, not once per row: Σ p z = x · W'p, and the gradients are W'q − W'p and q'x − p'x.
    `teacher_UV` are logits. The same gradients as KL(p‖q), whose value is smaller by the teacher's entropy.
    """
    x, draft = rows.x, _draft(rows, lm_head_VH)
    p = torch.softmax(teacher_UV, -1)
    if hard:  # every row of a position has the same label
        label_U = rows.label.new_zeros(len(p)).scatter_(0, rows.which, rows.label)
        p.mul_(1 - hard).scatter_add_(1, label_U[:, None], p.new_full((len(p), 1), hard))
    p = p.to(x.dtype)
    mean = (p @ lm_head_VH)[rows.which]
    loss = draft.lse - (x.float() * mean.float()).sum(-1)
    weight = rows.weigh(draft.chosen, draft.hit)
    narrow = weight.to(x.dtype)[:, None]
    dx = (draft.q @ lm_head_VH - mean) * narrow if needs_x else None
    dw = None
    if needs_w:
        weighted = x * narrow
        shared = torch.zeros(len(p), x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, rows.which, weighted)
        dw = (draft.q.T @ weighted).addmm_(p.T, shared, alpha=-1)
    return Graded(loss, draft.hit, weight, dx, dw)


def _acceptance(rows: Rows, draft: Draft, teacher_UV: Tensor) -> tuple[Tensor, Tensor]:
    """α = Σ_v min(p_v, q_v) [m], the chance that a draft is accepted, and dα/dz [m, V], both float32.

    p is the teacher's probability in its full vocabulary: what lies outside the draft vocabulary is lost.
    """
    q = draft.q.float()
    p = (teacher_UV - rows.lse_U[:, None]).exp()[rows.which]
    below = q * (q < p)
    return torch.minimum(p, q).sum(-1), below - q * below.sum(-1, keepdim=True)


def _with_gradient(loss: Tensor, dz: Tensor, rows: Rows, draft: Draft, lm_head_VH, hard, needs_x, needs_w) -> Graded:
    """Adds the hard share to a loss [m] with gradient dz [m, V], and takes the gradient through z = W x."""
    if hard:
        loss = (1 - hard) * loss - hard * draft.chosen.clamp(min=1e-30).log()
        dz = (1 - hard) * dz + hard * draft.q
        dz.scatter_add_(1, rows.label[:, None], dz.new_full((len(dz), 1), -hard))
    weight = rows.weigh(draft.chosen, draft.hit)
    dz = (dz * weight[:, None]).to(rows.x.dtype)
    dx = dz @ lm_head_VH if needs_x else None
    return Graded(loss, draft.hit, weight, dx, dz.T @ rows.x if needs_w else None)


def tv(
    rows: Rows, lm_head_VH: Tensor, teacher_UV: Tensor, hard: float = 0.0, needs_x: bool = True, needs_w: bool = True
) -> Graded:
    """Total variation 1 − α: the chance that a draft is rejected when both sides sample."""
    draft = _draft(rows, lm_head_VH)
    alpha, dalpha = _acceptance(rows, draft, teacher_UV)
    return _with_gradient(1 - alpha, -dalpha, rows, draft, lm_head_VH, hard, needs_x, needs_w)


def lk_alpha(
    rows: Rows, lm_head_VH: Tensor, teacher_UV: Tensor, hard: float = 0.0, needs_x: bool = True, needs_w: bool = True
) -> Graded:
    """−log α."""
    draft = _draft(rows, lm_head_VH)
    alpha, dalpha = _acceptance(rows, draft, teacher_UV)
    alpha = alpha.clamp(min=1e-6)
    return _with_gradient(-alpha.log(), -dalpha / alpha[:, None], rows, draft, lm_head_VH, hard, needs_x, needs_w)


def lk_hybrid(
    rows: Rows, lm_head_VH: Tensor, teacher_UV: Tensor, hard: float = 0.0, needs_x: bool = True, needs_w: bool = True
) -> Graded:
    """λ · KL(p‖q) + (1 − λ) · (1 − α), λ = exp(−3 α) without gradient: KL far from the teacher, TV close to it.

    KL is taken against the teacher renormalised over the draft vocabulary.
    """
    draft = _draft(rows, lm_head_VH)
    alpha, dalpha = _acceptance(rows, draft, teacher_UV)
    log_p = torch.log_softmax(teacher_UV, -1)
    p = log_p.exp()
    z_minus_lse = (rows.x.float() * (p @ lm_head_VH.float())[rows.which]).sum(-1) - draft.lse
    kl = (p * log_p).sum(-1)[rows.which] - z_minus_lse
    share = (-LK_SHARPNESS * alpha).exp()
    dz = share[:, None] * (draft.q.float() - p[rows.which]) - (1 - share[:, None]) * dalpha
    loss = share * kl + (1 - share) * (1 - alpha)
    return _with_gradient(loss, dz, rows, draft, lm_head_VH, hard, needs_x, needs_w)


OBJECTIVES = {"soft_ce": soft_ce, "lk_alpha": lk_alpha, "lk_hybrid": lk_hybrid, "tv": tv}


def smooth_l1(x_MH: Tensor, teacher_MH: Tensor) -> Tensor:
    """Distance of the head's hidden state from the target's, float32 [m]: the mean over H of Huber's loss, β = 1."""
    return F.smooth_l1_loss(x_MH.float(), teacher_MH.float(), reduction="none").mean(-1)


# ---------------------------------------------------------------------------------------------------- position weights


def fixed(chosen_CD: Tensor, hit_CD: Tensor, decay: float) -> Tensor:
    """decay^d at depth d, float32 [C, D]."""
    depth = torch.arange(chosen_CD.shape[1], device=chosen_CD.device)
    return (decay**depth).float().expand(chosen_CD.shape)


def dpace(chosen_CD: Tensor, hit_CD: Tensor, decay: float) -> Tensor:
    """Σ_{m ≥ d} Π_{i ≤ m} p̃_i with p̃ = (p + 1) / 2: how much of the expected accepted length hangs on depth d.

    chosen_CD: the label's probability under the head, 0 where there is no row. `decay` is not used.
    """
    reached = (DPACE_FLOOR * chosen_CD + 1 - DPACE_FLOOR).cumprod(1)
    return reached.flip(1).cumsum(1).flip(1)


def vat(chosen_CD: Tensor, hit_CD: Tensor, decay: float) -> Tensor:
    """1 up to the chain's first rejection, and decay^(depths after it) from there on.

    hit_CD: the draft is the target's choice; false where there is no row.
    """
    depth = torch.arange(hit_CD.shape[1], device=hit_CD.device)
    first_C1 = hit_CD.long().cumprod(1).sum(1, keepdim=True)
    return (decay ** (depth - first_C1).clamp(min=0)).float()


WEIGHTS = {"decay": fixed, "dpace": dpace, "vat": vat}
