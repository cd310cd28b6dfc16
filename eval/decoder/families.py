"""Whether a target decodes in the cache, chains and trees, as it reads a text: tried on a few tokens before it is used.

A family whose attention builds its own masks, or whose layers keep states of a kind that the cache does not know, would
give wrong tokens without an error. It is refused by name.
"""

from __future__ import annotations

import torch

from headtrain.cache import cache_for
from headtrain.eval.decoder.layout import lay_out, visible
from headtrain.target import STATEFUL, Target, TargetError
from headtrain.tree import DraftTree

TOKEN, CHAIN, TREE = [[]], [[0, 1]], [[0, 2], [1, 3]]  # paths of nodes from the root down; states: token by token, too
KNOWN = {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe", *STATEFUL}


def check(target: Target, trees: bool) -> None:
    """Raises TargetError unless the target's logits over a chain (a tree) are those of each path read as a text."""
    way = "trees" if trees else "chains"
    if way in target.decodes:
        return
    family = f"{target.name}: the {target.config.model_type} family cannot be decoded here"
    if unknown := target.layer_types - KNOWN:
        raise TargetError(f"{family}: layers of kind {min(unknown)!r} are not known to the decoder's cache")
    if trees and target.stateful:
        raise TargetError(
            f"{family} with trees: a {target.stateful!r} layer keeps one running state, which cannot branch; use chains"
        )
    probes = [TREE] if trees else [CHAIN, TOKEN] if target.stateful else [CHAIN]
    try:
        gap, largest = (max(values) for values in zip(*[_gap(target, paths) for paths in probes], strict=True))
    except Exception as error:  # whatever a family's own code may raise on a cache it did not expect
        raise TargetError(f"{family} with {way}: {type(error).__name__}: {error}") from error
    if gap > (1e-4 if target.dtype == torch.float32 else 0.06) * largest:
        raise TargetError(
            f"{family} with {way}: its logits in the cache are off those of the same text by {gap:.3g} (largest logit "
            f"{largest:.3g}), so its attention or its states do not follow the decoder's cache"
        )
    target.decodes.add(way)


@torch.inference_mode()
def _gap(target: Target, paths: list[list[int]]) -> tuple[float, float]:
    """Two rows with a tree of the given paths each: (difference of the logits, largest logit)."""
    lengths = [5, 5 if target.stateful else 3]
    device, nodes = target.device, sum(map(len, paths))
    ids = (torch.arange(7, 7 + 2 * (6 + nodes)) * 5 % target.vocab_size).view(2, -1).to(device)
    tokens_BN = ids[:, 6:]
    parents = torch.arange(nodes, device=device) - len(paths)
    tree = DraftTree(tokens_BN, parents.clamp_min(-1), torch.full((2,), nodes, device=device))
    length_B, capacity = torch.tensor(lengths, device=device), 6 + nodes
    cache = cache_for(target.stateful, 2, capacity)
    before_BL = torch.arange(5, device=device).expand(2, 5)
    for part in [slice(0, 5)] if nodes else [slice(at, at + 1) for at in range(5)]:
        target.forward(ids[:, part], cache, before_BL[:, part])
    slots_BL, positions_BL, sees_BLL = lay_out(tree, length_B)
    mask = None if sees_BLL is None else visible(sees_BLL, slots_BL, capacity)
    roots_B1 = ids[:, 5:6]
    states = target.forward(torch.cat([roots_B1, tokens_BN], 1), cache, slots_BL, positions_BL, mask, window=capacity)
    found = target.logits(states.last_BLH).float()
    gaps, largest = [], float(found.abs().max())
    for row, length in enumerate(lengths):
        for path in paths:
            text = torch.cat([ids[row, :length], roots_B1[row], tokens_BN[row, path]])
            plain = target.logits(target.forward(text[None]).last_BLH[0, length:]).float()
            gaps.append((found[row, [0, *[node + 1 for node in path]]] - plain).abs().amax(-1))
    gaps = torch.cat(gaps)  # in low precision an expert's router may fall the other way at one token
    return float(gaps.max() if target.dtype == torch.float32 else gaps.median()), largest
