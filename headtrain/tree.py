"""DraftTree: the tokens proposed for one verification. A chain is a tree with one child per node.

Shapes: B requests, N nodes, D the depth of the deepest node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class DraftTree:
    """Draft tokens of B requests, N nodes each, parents before children.

    tokens:  int64 [B, N], target-vocabulary ids
    parents: int64 [N] or [B, N]; -1 = the root (the last accepted token)
    counts:  int64 [B]; row b's nodes are the first counts[b] (a drafter may propose fewer than N, or none)
    q:       float [B, N, V] drafting distribution each token was drawn from (a point mass where the choice was
             deterministic), or None when every choice was
    """

    tokens: Tensor
    parents: Tensor
    counts: Tensor
    q: Tensor | None = None

    @classmethod
    def chain(cls, tokens_BK: Tensor, counts_B: Tensor | None = None, q_BKV: Tensor | None = None) -> DraftTree:
        """A chain of K draft tokens per request; `counts_B` where some rows have fewer."""
        batch, k = tokens_BK.shape
        if counts_B is None:
            counts_B = torch.full((batch,), k, dtype=torch.long, device=tokens_BK.device)
        return cls(tokens_BK, torch.arange(-1, k - 1, device=tokens_BK.device), counts_B, q_BKV)

    @property
    def is_chain(self) -> bool:
        nodes = self.tokens.shape[1]
        return bool((self.parents == torch.arange(-1, nodes - 1, device=self.parents.device)).all())

    def depths(self) -> Tensor:
        """int64, shaped as `parents`: tokens from the root down to the node, the node included (a child of the root: 1)."""
        return self.ancestors().sum(-1)

    def ancestors(self) -> Tensor:
        """bool [N, N] or [B, N, N]: entry [i, j] is true when node j is node i or lies above it."""
        nodes = self.parents.shape[-1]
        seen = torch.eye(nodes, dtype=torch.bool, device=self.parents.device).expand(*self.parents.shape, nodes).clone()
        for node in range(nodes):
            above = self.parents[..., node : node + 1, None].clamp_min(0).expand(*self.parents.shape[:-1], 1, nodes)
            inherited = seen.gather(-2, above)[..., 0, :] & (self.parents[..., node, None] >= 0)
            seen[..., node, :] |= inherited
        return seen
