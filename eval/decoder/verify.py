"""Which draft tokens the target keeps. Pure functions on tensors; the decoder calls nothing else to decide.

Position i of a row is the target's answer after the row's i-th new token: position 0 follows the last accepted token,
position i follows draft token (or tree node) i-1. A step keeps the accepted draft tokens and adds one *bonus* token of
the target. Every rule but `typical_tree` leaves the target's distribution unchanged. Nothing here waits for a device.
p and q are distributions after `sampling.probabilities`, q over the target's vocabulary (zero outside the draft vocab),
or None when every draft was a choice, not a draw. A draft to which its own q gives no probability is rejected.
accept and bonus are independent uniform numbers in [0, 1).
Shapes: B rows, K draft tokens, N tree nodes, L = K + 1 or N + 1 positions, V vocabulary.
Sources: Leviathan et al. 2023 (alg. 1) and Chen et al. 2023 for the sampled chain; Miao et al. 2024 (SpecInfer, alg. 2)
for children drawn independently; Sun et al. 2024 (arXiv 2403.10444, alg. 2) for block verification; Cai et al. 2024
(Medusa, section 2.3.1) for typical acceptance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from headtrain.eval.decoder.sampling import draw


@dataclass
class Verdict:
    """accepted_B: int64, how many leading draft tokens stay; bonus_B: int64, the target's own token after them."""

    accepted_B: Tensor
    bonus_B: Tensor


@dataclass
class TreeVerdict(Verdict):
    """path_BD: int64, the accepted nodes from the root down, -1 after the last; D = N (no shape depends on data)."""

    path_BD: Tensor


def ratio(p_V: Tensor, drafts: Tensor, q_V: Tensor | None) -> Tensor:
    """p/q at each draft token: [..., V] and int64 [...] give [...]. q None: the draft was a choice, its q is 1."""
    p = p_V.gather(-1, drafts[..., None])[..., 0]
    if q_V is None:
        return p
    q = q_V.gather(-1, drafts[..., None])[..., 0]
    return torch.where(q > 0, p / q, 0)


def residual(p_BV: Tensor, drafts_B: Tensor, q_BV: Tensor | None) -> Tensor:
    """[B, V]: what a rejected draft leaves of the target, max(0, p - q) normalised; p where that is all zero."""
    rest_BV = p_BV.scatter(1, drafts_B[:, None], 0) if q_BV is None else (p_BV - q_BV).clamp_min(0)
    mass_B1 = rest_BV.sum(-1, keepdim=True)
    return torch.where(mass_B1 > 0, rest_BV / mass_B1, p_BV)


def greedy_chain(choice_BL: Tensor, drafts_BK: Tensor, counts_B: Tensor) -> Verdict:
    """choice_BL: the target's argmax per position. Accepts leading drafts equal to it; row b drafted counts_B[b]."""
    kept_BK = (drafts_BK == choice_BL[:, :-1]) & _real(drafts_BK, counts_B)
    accepted_B = kept_BK.long().cumprod(1).sum(1)
    return Verdict(accepted_B, choice_BL.gather(1, accepted_B[:, None])[:, 0])


def greedy_tree(choice_BL: Tensor, tokens_BN: Tensor, parents: Tensor, counts_B: Tensor) -> TreeVerdict:
    """The longest path from the root on which every token is the target's argmax after its parent.

    choice_BL: int64 [B, N+1], argmax after the root (0) and after each node (node i at i+1). parents: [N] or [B, N],
    -1 = root, parents before children. A chain is the special case parents = -1, 0, 1, …
    """
    parents_BN = parents.expand(tokens_BN.shape)
    right_BN = (tokens_BN == choice_BL.gather(1, parents_BN + 1)) & _real(tokens_BN, counts_B)
    accepted_B, end_B = _depth_where(right_BN, parents_BN).max(1)
    return TreeVerdict(accepted_B, choice_BL.gather(1, end_B[:, None])[:, 0], _path(end_B, accepted_B, parents_BN))


def sampled_chain(
    p_BLV: Tensor, drafts_BK: Tensor, counts_B: Tensor, q_BKV: Tensor | None, accept_BK: Tensor, bonus_B: Tensor
) -> Verdict:
    """`sampled_tree` for a chain, with all drafts tested at once.

    The bonus comes from the residual of the first rejected draft, or from p after the last one when all were kept.
    """
    k = drafts_BK.shape[1]
    kept_BK = (accept_BK < ratio(p_BLV[:, :k], drafts_BK, q_BKV)) & _real(drafts_BK, counts_B)
    accepted_B = kept_BK.long().cumprod(1).sum(1)
    rows = torch.arange(len(drafts_BK), device=drafts_BK.device)
    left_BV = p_BLV[rows, accepted_B]
    if k:
        at_B = accepted_B.clamp_max(k - 1)
        rest_BV = residual(left_BV, drafts_BK[rows, at_B], None if q_BKV is None else q_BKV[rows, at_B])
        left_BV = torch.where((accepted_B < counts_B)[:, None], rest_BV, left_BV)
    return Verdict(accepted_B, draw(left_BV, bonus_B))


def sampled_tree(
    p_BLV: Tensor, tokens_BN: Tensor, parents: Tensor, counts_B: Tensor, q_BNV: Tensor | None, accept_BN: Tensor,
    bonus_B: Tensor,
) -> TreeVerdict:  # fmt: skip
    """Tries a node's children in order: each is kept with min(1, p/q), else p becomes the normalised max(0, p - q).

    When one is kept its own children are next; when none is left the bonus comes from what p has become. Each node has
    its own q, so that one rule serves children drawn independently from one distribution, children that were chosen
    (a point mass each, or q_BNV = None), and trees that hold both. A draw may not depend on its siblings' tokens.
    """
    parents_BN = parents.expand(tokens_BN.shape)
    at_B, accepted_B, left_BV = torch.zeros_like(counts_B), torch.zeros_like(counts_B), p_BLV[:, 0]
    for node, after_BV in enumerate(p_BLV[:, 1:].unbind(1)):
        token_B, q_BV = tokens_BN[:, node], None if q_BNV is None else q_BNV[:, node]
        tried_B = (parents_BN[:, node] + 1 == at_B) & (node < counts_B)
        kept_B = tried_B & (accept_BN[:, node] < ratio(left_BV, token_B, q_BV))
        left_BV = torch.where(tried_B[:, None], residual(left_BV, token_B, q_BV), left_BV)
        left_BV = torch.where(kept_B[:, None], after_BV, left_BV)
        at_B, accepted_B = torch.where(kept_B, node + 1, at_B), accepted_B + kept_B
    return TreeVerdict(accepted_B, draw(left_BV, bonus_B), _path(at_B, accepted_B, parents_BN))


def block_chain(
    p_BLV: Tensor, drafts_BK: Tensor, counts_B: Tensor, q_BKV: Tensor | None, accept_BK: Tensor, bonus_B: Tensor
) -> Verdict:
    """Block verification: tests prefixes of the chain instead of tokens; keeps as many as `sampled_chain` or more.

    With w_i = min(1, w_{i-1} p/q), the chance that all of the first i drafts could be kept, and
    left_i = max(0, w_i p_i - q_i), where q = 0 after the last draft: prefix i passes with left / (left + 1 - w), its
    masses summed over V; the longest that passes is kept, and the bonus comes from its left_i.
    """
    k, real_BK = drafts_BK.shape[1], _real(drafts_BK, counts_B)
    odds_BK = ratio(p_BLV[:, :k], drafts_BK, q_BKV)
    weights = [torch.ones_like(p_BLV[:, 0, 0])]
    for odds_B in odds_BK.unbind(1):
        weights.append((weights[-1] * odds_B).clamp_max(1))
    weight_BL = torch.stack(weights, 1)
    left_BLV = weight_BL[..., None] * p_BLV
    if q_BKV is None:
        drafted_BK1 = left_BLV[:, :k].gather(2, drafts_BK[..., None])
        left_BLV[:, :k].scatter_(2, drafts_BK[..., None], drafted_BK1.masked_fill(real_BK[..., None], 0))
    else:
        left_BLV[:, :k] -= q_BKV.masked_fill(~real_BK[..., None], 0)
    mass_BL = left_BLV.clamp_min_(0).sum(-1)
    # 0 of 0 (q equals p there) counts as "not here": a longer prefix is then certain to pass.
    passes_BL = mass_BL / (mass_BL + 1 - weight_BL).clamp_min(torch.finfo(mass_BL.dtype).tiny)
    passed_BK = (accept_BK < passes_BL[:, 1:]) & real_BK
    accepted_B = pad(passed_BK * torch.arange(1, k + 1, device=drafts_BK.device), (1, 0)).amax(1)
    rows = torch.arange(len(drafts_BK), device=drafts_BK.device)
    left_BV = left_BLV[rows, accepted_B]
    return Verdict(accepted_B, draw(torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, p_BLV[:, 0]), bonus_B))


def typical_tree(
    p_BLV: Tensor, tokens_BN: Tensor, parents: Tensor, counts_B: Tensor, bonus_B: Tensor, epsilon: float = 0.09,
    delta: float = 0.3,
) -> TreeVerdict:  # fmt: skip
    """Lossy: typical acceptance. The text is *not* distributed as the target's own.

    A token is kept where p > min(epsilon, delta · exp(-entropy of p)), whatever the drafter thought of it; of the
    longest paths of kept tokens the likeliest stays. The bonus is drawn from p after it. Defaults: Medusa's.
    """
    parents_BN = parents.expand(tokens_BN.shape)
    bar_BL = (delta * torch.special.entr(p_BLV).sum(-1).neg().exp()).clamp_max(epsilon)
    rows = torch.arange(len(tokens_BN), device=tokens_BN.device)
    p_BN = p_BLV[rows[:, None], parents_BN + 1, tokens_BN]
    typical_BN = (p_BN > bar_BL.gather(1, parents_BN + 1)) & _real(tokens_BN, counts_B)
    depth_BL = _depth_where(typical_BN, parents_BN)
    likelihood_BL = _along(pad(p_BN.log(), (1, 0)), parents_BN, torch.add)
    accepted_B = depth_BL.amax(1)
    end_B = likelihood_BL.masked_fill(depth_BL < accepted_B[:, None], float("-inf")).argmax(1)
    return TreeVerdict(accepted_B, draw(p_BLV[rows, end_B], bonus_B), _path(end_B, accepted_B, parents_BN))


# ------------------------------------------------------------------------------------------------- walks in a tree

def _real(tokens_BN: Tensor, counts_B: Tensor) -> Tensor:
    return torch.arange(tokens_BN.shape[1], device=tokens_BN.device) < counts_B[:, None]


def _along(values_BL: Tensor, parents_BN: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Joins every position's value with those of all positions above it. The root's must be the neutral one."""
    up_BL = pad(parents_BN + 1, (1, 0))
    for _ in range(parents_BN.shape[1].bit_length()):  # each round doubles how far up a position has looked
        values_BL, up_BL = join(values_BL, values_BL.gather(1, up_BL)), up_BL.gather(1, up_BL)
    return values_BL


def _depth_where(good_BN: Tensor, parents_BN: Tensor) -> Tensor:
    """int64 [B, L]: tokens from the root down to a position, -1 where one of them is not good."""
    good_BL = _along(pad(good_BN, (1, 0), value=True), parents_BN, torch.logical_and)
    depth_BL = _along(pad(torch.ones_like(parents_BN), (1, 0)), parents_BN, torch.add)
    return torch.where(good_BL, depth_BL, -1)


def _path(end_B: Tensor, accepted_B: Tensor, parents_BN: Tensor) -> Tensor:
    """int64 [B, N]: the nodes from the root down to position end_B, accepted_B many, then -1."""
    up_BL, climb = pad(parents_BN + 1, (1, 0)), end_B[:, None]
    for _ in range(parents_BN.shape[1].bit_length()):
        climb, up_BL = torch.cat([climb, up_BL.gather(1, climb)], 1), up_BL.gather(1, up_BL)
    level_BN = accepted_B[:, None] - 1 - torch.arange(parents_BN.shape[1], device=end_B.device)
    return torch.where(level_BN >= 0, climb.gather(1, level_BN.clamp_min(0)) - 1, -1)
