"""A head and a drafter that copies: where the text repeats itself the copy (free and long), elsewhere the head.

Shapes: B requests, K draft depth, N nodes, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from headtrain.eval.decoder.drafters.base import Drafter, News
from headtrain.eval.decoder.drafters.head import HeadDrafter
from headtrain.tree import DraftTree


class HybridDrafter(Drafter):
    """copier: proposes chains without a distribution (n-grams). A request takes the copy when there is one, else the
    head's proposal; in_one_tree: both (`merge`). What is proposed depends on the text so far only, or on drawn tokens
    as `merge` says, so the output keeps the target's distribution.
    """

    def __init__(self, head: HeadDrafter, copier: Drafter, in_one_tree: bool = False):
        self.head, self.copier, self.in_one_tree, self.taps = head, copier, in_one_tree, head.taps
        self.name = "head+ngram-tree" if in_one_tree else "head+ngram"
        self.branches = in_one_tree or head.branches

    def nodes(self, k: int) -> int:
        return self.head.nodes(k) + self.copier.nodes(k) if self.in_one_tree else max(self.head.nodes(k), k)

    def bind(self, target, cache) -> None:
        self.head.bind(target, cache)
        self.copier.bind(target, cache)

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        self.head.start(prompts, capacity)
        self.copier.start(prompts, capacity)

    def observe(self, news: News) -> None:
        self.head.observe(news)
        self.copier.observe(news)

    def propose(self, k: int, uniform_BN: Tensor | None = None) -> DraftTree:
        copied = self.copier.propose(k)
        copies_B1 = copied.counts[:, None] > 0
        if not self.in_one_tree and bool(copies_B1.all()):
            return copied
        drafted = self.head.propose(k, uniform_BN)
        if copied.tokens.shape[1] == 0:
            return drafted
        return merge(drafted, copied) if self.in_one_tree else choose(copies_B1, copied, drafted)

    def select(self, rows: Tensor) -> None:
        self.head.select(rows)
        self.copier.select(rows)


def choose(first_B1: Tensor, a: DraftTree, b: DraftTree) -> DraftTree:
    """Tree a where first_B1, else tree b. a has point masses only; its rows may be shorter or longer than b's."""
    width = max(a.tokens.shape[1], b.tokens.shape[1])
    tokens = [pad(tree.tokens, (0, width - tree.tokens.shape[1])) for tree in (a, b)]
    if chains := a.is_chain and b.is_chain:
        parents = max(a.parents, b.parents, key=len)
    else:
        both = [tree.parents.expand_as(tree.tokens) for tree in (a, b)]
        parents = torch.where(first_B1, *(pad(x, (0, width - x.shape[1]), value=-1) for x in both))
    q_BNV = None
    if b.q is not None:
        b_BNV = pad(b.q, (0, 0, 0, width - b.q.shape[1]))
        q_BNV = torch.where(first_B1[..., None], point_mass(tokens[0], b_BNV), b_BNV)
    counts_B = torch.where(first_B1[:, 0], a.counts, b.counts)
    return DraftTree(torch.where(first_B1, *tokens), parents, counts_B, q_BNV, chains)


def merge(drafted: DraftTree, copied: DraftTree) -> DraftTree:
    """One tree of both: the copied chain runs along the drafted tree while it finds its tokens there, then leaves it.

    The drafted nodes come first and keep their order, so that among the children of a node the copied one is tried
    last. That is what makes sharing exact above temperature 0: a drawn token that is the copied one was already tried
    when the copy's turn comes, and once rejected has no probability left for a point mass to claim. The other way
    round a drawn token would have to go because of what it is, and the output would lean away from it.
    """
    (batch, n), k, device = drafted.tokens.shape, copied.tokens.shape[1], drafted.tokens.device
    parents_BN, rows_B = drafted.parents.expand(batch, n), torch.arange(batch, device=device)
    there_BN = torch.arange(n, device=device) < drafted.counts[:, None]
    tokens_BN = pad(drafted.tokens, (0, k + 1))  # a last column takes what is shared, and is cut off
    parents_BN = pad(parents_BN, (0, k + 1), value=-1)
    at_B, counts_B = torch.full_like(drafted.counts, -1), drafted.counts.clone()
    for i, token_B in enumerate(copied.tokens.unbind(1)):
        same_BN = there_BN & (drafted.tokens == token_B[:, None]) & (parents_BN[:, :n] == at_B[:, None])
        shared_B, real_B = same_BN.any(1), i < copied.counts
        new_B = real_B & ~shared_B
        column_B = torch.where(new_B, counts_B, n + k)
        tokens_BN[rows_B, column_B], parents_BN[rows_B, column_B] = token_B, at_B
        at_B = torch.where(shared_B, same_BN.int().argmax(1), counts_B)
        counts_B = counts_B + new_B
    q_BNV = None
    if drafted.q is not None:
        q_BNV, mine_BN1 = pad(drafted.q, (0, 0, 0, k)), pad(there_BN, (0, k))[..., None]
        q_BNV = torch.where(mine_BN1, q_BNV, point_mass(tokens_BN[:, : n + k], q_BNV))
    return DraftTree(tokens_BN[:, : n + k], parents_BN[:, : n + k], counts_B, q_BNV, chain_shaped=False)


def point_mass(tokens_BN: Tensor, like_BNV: Tensor) -> Tensor:
    return torch.zeros_like(like_BNV).scatter_(2, tokens_BN[..., None], 1)
