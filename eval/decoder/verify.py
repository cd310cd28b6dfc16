"""Which draft tokens the target keeps. Pure functions on tensors; the decoder calls nothing else to decide.

Position i of a row is the target's answer after the row's i-th new token: position 0 follows the last accepted token,
position i follows draft token i-1. A step keeps the accepted draft tokens and adds one *bonus* token of the target.
Shapes: B rows, K draft tokens, L = K + 1 positions, N tree nodes, V vocabulary.
Sources: Leviathan et al. 2023 (alg. 1) and Chen et al. 2023 for the sampled chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headtrain.eval.decoder.sampling import draw


@dataclass
class Verdict:
    """accepted_B: int64, how many leading draft tokens stay; bonus_B: int64, the target's own token after them."""

    accepted_B: Tensor
    bonus_B: Tensor


@dataclass
class TreeVerdict(Verdict):
    """path_BD: int64, the accepted nodes from the root down, -1 after the last; D is the tree's depth at most."""

    path_BD: Tensor


def acceptance(p_BKV: Tensor, drafts_BK: Tensor, q_BKV: Tensor | None) -> Tensor:
    """float32 [B, K]: min(1, p/q) at each draft token. q None: the draft was a choice, not a draw, so its q is 1."""
    p_BK = p_BKV.gather(2, drafts_BK[..., None])[..., 0]
    if q_BKV is None:
        return p_BK
    q_BK = q_BKV.gather(2, drafts_BK[..., None])[..., 0]
    return (p_BK / q_BK.clamp_min(torch.finfo(q_BK.dtype).tiny)).clamp_max(1)


def residual(p_BV: Tensor, drafts_B: Tensor, q_BV: Tensor | None) -> Tensor:
    """[B, V]: what a rejected draft leaves of the target, max(0, p - q), not normalised; p where that is all zero."""
    if q_BV is None:
        rest_BV = p_BV.scatter(1, drafts_B[:, None], 0)
    else:
        rest_BV = (p_BV - q_BV).clamp_min(0)
    return torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV)


def greedy_chain(choice_BL: Tensor, drafts_BK: Tensor, counts_B: Tensor) -> Verdict:
    """choice_BL: the target's argmax per position. Accepts leading drafts equal to it; row b drafted counts_B[b]."""
    real_BK = torch.arange(drafts_BK.shape[1], device=drafts_BK.device) < counts_B[:, None]
    accepted_B = ((drafts_BK == choice_BL[:, :-1]) & real_BK).long().cumprod(1).sum(1)
    return Verdict(accepted_B, choice_BL.gather(1, accepted_B[:, None])[:, 0])


def greedy_tree(choice_BL: Tensor, tokens_BN: Tensor, parents: Tensor, counts_B: Tensor) -> TreeVerdict:
    """The longest path from the root on which every token is the target's argmax after its parent.

    choice_BL: int64 [B, N+1], argmax after the root (0) and after each node (node i at i+1). parents: [N] or [B, N],
    -1 = root, parents before children. A chain is the special case parents = -1, 0, 1, …
    """
    batch, nodes = tokens_BN.shape
    parents_BN = parents.expand(batch, nodes)
    right_BN = tokens_BN == choice_BL.gather(1, parents_BN + 1)
    right_BN &= torch.arange(nodes, device=tokens_BN.device) < counts_B[:, None]
    depth_BL = tokens_BN.new_zeros(batch, nodes + 1)  # accepted tokens on the way to a node; entry 0 is the root
    for node in range(nodes):
        above_B = depth_BL.gather(1, parents_BN[:, node : node + 1] + 1)[:, 0]
        reached_B = right_BN[:, node] & ((above_B > 0) | (parents_BN[:, node] < 0))
        depth_BL[:, node + 1] = torch.where(reached_B, above_B + 1, 0)
    accepted_B, end_B = depth_BL.max(1)
    path_BD = tokens_BN.new_full((batch, int(accepted_B.max()) if nodes else 0), -1)
    at_B = end_B.clone()
    for level in range(path_BD.shape[1] - 1, -1, -1):
        on_B = accepted_B > level
        path_BD[:, level] = torch.where(on_B, at_B - 1, -1)
        above_B = parents_BN.gather(1, (at_B - 1).clamp_min(0)[:, None])[:, 0] + 1 if nodes else at_B
        at_B = torch.where(on_B, above_B, at_B)
    return TreeVerdict(accepted_B, choice_BL.gather(1, end_B[:, None])[:, 0], path_BD)


def sampled_chain(
    p_BLV: Tensor, drafts_BK: Tensor, counts_B: Tensor, q_BKV: Tensor | None, accept_BK: Tensor, bonus_B: Tensor
) -> Verdict:
    """Rejection sampling that leaves the target's distribution unchanged.

    p_BLV, q_BKV: distributions after temperature, top-k and top-p, q over the target's vocabulary (zero outside the
    draft vocab). accept_BK, bonus_B: independent uniform numbers in [0, 1). Draft i is kept while accept < min(1, p/q);
    the bonus comes from the residual of the first rejected draft, or from p after the last one when all were kept.
    """
    k = drafts_BK.shape[1]
    real_BK = torch.arange(k, device=drafts_BK.device) < counts_B[:, None]
    kept_BK = (accept_BK < acceptance(p_BLV[:, :k], drafts_BK, q_BKV)) & real_BK
    accepted_B = kept_BK.long().cumprod(1).sum(1)
    rows = torch.arange(len(drafts_BK), device=drafts_BK.device)
    left_BV = p_BLV[rows, accepted_B]
    if k:
        at_B = accepted_B.clamp_max(k - 1)
        rest_BV = residual(left_BV, drafts_BK[rows, at_B], None if q_BKV is None else q_BKV[rows, at_B])
        left_BV = torch.where((accepted_B < counts_B)[:, None], rest_BV, left_BV)
    return Verdict(accepted_B, draw(left_BV, bonus_B))
