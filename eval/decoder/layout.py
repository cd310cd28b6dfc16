"""Where a step's tokens lie in the cache and who of them sees whom: the root (the last accepted token), then the nodes.

Node i of a tree lies in slot length + 1 + i and stands at position length + its depth, where `length` is the number of
tokens in the cache. In a chain the two are the same, and the causal rule says who sees whom.
Shapes: B rows, N nodes, L = N + 1 tokens of a step, S visible slots, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from headtrain.eval.decoder.verify import TreeVerdict
from headtrain.tree import DraftTree


def lay_out(tree: DraftTree, length_B: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """(slots [B, L], positions [B, L], who sees whom [B or 1, L, L], None for a chain: the causal rule)."""
    slots_BL = length_B[:, None] + torch.arange(tree.tokens.shape[1] + 1, device=length_B.device)
    if tree.is_chain:
        return slots_BL, slots_BL, None
    above = tree.ancestors()
    above = above if above.dim() == 3 else above[None]
    positions_BL = length_B[:, None] + pad(above.sum(-1), (1, 0))
    return slots_BL, positions_BL, pad(pad(above, (0, 0, 1, 0)), (1, 0), value=True)


def visible(sees_BLL: Tensor, slots_BL: Tensor, window: int) -> Tensor:
    """bool [B, L, window]: a token sees every slot before the root's and, of the step's own, those it may see."""
    new_BS = torch.arange(window, device=slots_BL.device) - slots_BL[:, :1]  # which of the step's tokens lies there
    length, shape = slots_BL.shape[1], (*slots_BL.shape, window)
    sees_BLS = sees_BLL.expand(-1, length, -1).expand(len(slots_BL), length, length).gather(
        2, new_BS.clamp(0, length - 1)[:, None].expand(shape)
    )
    return (new_BS < 0)[:, None] | (sees_BLS & (new_BS < length)[:, None])


def seen_tokens(seen_BV: Tensor, tree: DraftTree, sees_BLL: Tensor | None) -> Tensor:
    """bool [B, L, V]: the tokens of the text so far and of the drafts up to each position, for a repetition penalty."""
    batch, nodes = tree.tokens.shape
    if sees_BLL is None:
        sees_BLL = torch.ones(1, nodes + 1, nodes + 1, dtype=torch.bool, device=seen_BV.device).tril()
    shape = (batch, nodes + 1, nodes)
    count_BLV = torch.zeros(*shape[:2], seen_BV.shape[1], dtype=torch.int16, device=seen_BV.device)
    count_BLV.scatter_add_(2, tree.tokens[:, None].expand(shape), sees_BLL[..., 1:].to(torch.int16).expand(shape))
    return seen_BV[:, None] | (count_BLV > 0)


def cut(verdict: TreeVerdict, tokens_BN: Tensor, most_B: Tensor) -> TreeVerdict:
    """Keeps at most most_B nodes of the accepted path; where it was longer, the bonus is the path's next token."""
    next_B1 = verdict.path_BD.gather(1, most_B.clamp_max(tokens_BN.shape[1] - 1)[:, None]).clamp_min(0)
    bonus_B = torch.where(verdict.accepted_B > most_B, tokens_BN.gather(1, next_B1)[:, 0], verdict.bonus_B)
    return TreeVerdict(torch.minimum(verdict.accepted_B, most_B), bonus_B, verdict.path_BD)


def reach(tree: DraftTree, depth_BL: Tensor, most_B: Tensor) -> tuple[Tensor, Tensor]:
    """(how deep each row's draft goes, how many nodes it has), no deeper than most_B. depth_BL: the root's is 0."""
    depth_BN = depth_BL[:, 1:]
    real_BN = torch.arange(depth_BN.shape[1], device=depth_BN.device) < tree.counts[:, None]
    real_BN &= depth_BN <= most_B[:, None]
    return (depth_BN * real_BN).amax(1), real_BN.sum(1)


def taken(states: Tensor | None, order_BW: Tensor | None, width: int) -> Tensor | None:
    """States [B, L, ...] at the tokens that were kept, [B, W, ...]: the first (a chain), or those of `order_BW`."""
    if states is None or order_BW is None:
        return None if states is None else states[:, :width]
    return states[torch.arange(len(states), device=states.device)[:, None], order_BW]
