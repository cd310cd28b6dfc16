"""DraftTree: the tokens proposed for one verification. A chain is a tree with one child per node.

Shapes: B requests, N nodes, V vocabulary.
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
    chain_shaped: bool | None = None  # whether it is a chain; None: to be found out, which waits for the device

    @classmethod
    def chain(cls, tokens_BK: Tensor, counts_B: Tensor | None = None, q_BKV: Tensor | None = None) -> DraftTree:
        """A chain of K draft tokens per request; `counts_B` where some rows have fewer."""
        batch, k = tokens_BK.shape
        if counts_B is None:
            counts_B = torch.full((batch,), k, dtype=torch.long, device=tokens_BK.device)
        return cls(tokens_BK, torch.arange(-1, k - 1, device=tokens_BK.device), counts_B, q_BKV, True)

    @property
    def is_chain(self) -> bool:
        if self.chain_shaped is None:
            nodes = self.tokens.shape[1]
            self.chain_shaped = bool((self.parents == torch.arange(-1, nodes - 1, device=self.parents.device)).all())
        return self.chain_shaped

    def depths(self) -> Tensor:
        """int64, shaped as `parents`: tokens on the way from the root, its own included (a child of the root: 1)."""
        return self.ancestors().sum(-1)

    def ancestors(self) -> Tensor:
        """bool [N, N] or [B, N, N]: entry [i, j] is true when node j is node i or lies above it."""
        nodes = self.parents.shape[-1]
        numbers = torch.arange(nodes, device=self.parents.device)
        above = ((self.parents[..., None] == numbers) | (numbers[:, None] == numbers)).float()
        for _ in range((nodes - 1).bit_length()):  # each squaring doubles how far up a node sees
            above = (above @ above).clamp_max_(1)
        return above > 0
