"""One target forward's verdict on a chain or a tree: lm_head, the sampling settings, the rule of acceptance.

Shapes: B rows, N draft tokens, L = N + 1 positions (the root first), M real positions, V vocabulary, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headtrain.eval.decoder import kernels, verify
from headtrain.eval.decoder.sampling import Sampling, adjust, probabilities
from headtrain.eval.decoder.verify import Verdict
from headtrain.target import Target
from headtrain.tree import DraftTree

RULES = ("exact", "block", "typical")


def judge(
    target: Target,
    last_BLH: Tensor,
    tree: DraftTree,
    sampling: Sampling,
    rule: str,
    seen_BLV: Tensor | None = None,
    accept_BN: Tensor | None = None,
    bonus_B: Tensor | None = None,
) -> Verdict:
    """Which drafts stay, and the token after them; a TreeVerdict for a tree.

    seen_BLV: bool, the tokens before each position, for a repetition penalty. accept_BN, bonus_B: float64 in [0, 1).
    On a CPU lm_head runs on real positions only; on a GPU on all, since to count the real ones is to wait for it.
    """
    chain, drafts = tree.is_chain, (tree.tokens, tree.counts)
    nodes = tree.tokens, tree.parents, tree.counts
    if last_BLH.is_cuda and (rule == "exact" or sampling.greedy):
        return kernels.accept(target.logits(last_BLH), tree, sampling, accept_BN, bonus_B, seen_BLV)
    shape, device = last_BLH.shape[:2], last_BLH.device
    real = slice(None) if last_BLH.is_cuda else torch.arange(shape[1], device=device) <= tree.counts[:, None]
    logits_MV = target.logits(last_BLH[real])
    seen_MV = None if seen_BLV is None else seen_BLV[real]
    if sampling.greedy:
        choice_BL = torch.zeros(shape, dtype=torch.long, device=device)
        choice_BL[real] = adjust(logits_MV, sampling, seen_MV).argmax(-1)
        return verify.greedy_chain(choice_BL, *drafts) if chain else verify.greedy_tree(choice_BL, *nodes)
    p_BLV = torch.zeros(*shape, logits_MV.shape[-1], device=device)
    p_BLV[real] = probabilities(logits_MV, sampling, seen_MV)
    if rule == "typical":
        return verify.typical_tree(p_BLV, *nodes, bonus_B)
    if rule == "block":
        return verify.block_chain(p_BLV, *drafts, tree.q, accept_BN, bonus_B)
    if chain:
        return verify.sampled_chain(p_BLV, *drafts, tree.q, accept_BN, bonus_B)
    return verify.sampled_tree(p_BLV, *nodes, tree.q, accept_BN, bonus_B)
