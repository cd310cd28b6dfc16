"""A trained head as a drafter: chains, EAGLE-2's dynamic trees, trees of drawn tokens, and Medusa's static ones.

The confidence in a draft token is the probability that the head gives it, under the request's own sampling; a node's
*value* is the product of confidences from the root down to it, kept as a logarithm. Whether a token is drafted never
depends on the token itself when it is drawn, only on its ancestors and on levels above: verification stays exact.

Shapes: B requests, K draft depth, M nodes drafted on from, C new nodes of a level, D drafted nodes, N nodes of the
tree, W draft vocab, V target vocab.
Source: Li et al., EAGLE-2 (arXiv 2406.16858), section 4.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from headtrain.eval.decoder.drafters.base import Drafter, News
from headtrain.eval.decoder.drafters.shape import TreeShape, static_tree
from headtrain.eval.decoder.graphs import Graphs
from headtrain.eval.decoder.kernels import draft_topk
from headtrain.eval.decoder.sampling import Sampling, adjust, draw, probabilities
from headtrain.heads.base import Head
from headtrain.tree import DraftTree

NOT_THERE = -math.inf  # the value of a node that is not proposed


class HeadDrafter(Drafter):
    """min_confidence: a node whose value is below it is not drafted on from; 0: every node may be.

    Raises ValueError for a tree of drawn tokens at temperature 0, for one wider than the draft vocabulary, and for a
    static one where the head has no accuracies to make it from.
    """

    name = "head"

    def __init__(self, head: Head, sampling: Sampling, shape: TreeShape | None = None, min_confidence: float = 0.0):
        self.head, self.sampling, self.shape = head, sampling, shape or TreeShape()
        self.taps, words = tuple(head.config.taps), head.config.draft_vocab_size
        self.branches = self.shape.branches
        self.least = math.log(min_confidence) if min_confidence else -math.inf
        if self.shape.drawn and sampling.greedy:
            raise ValueError("a tree of drawn tokens (iid-…) needs a temperature above 0; at 0 use chain or 4x16")
        if self.shape.width > words:
            raise ValueError(f"a tree of width {self.shape.width} needs as many draft tokens; the head has {words}")
        if self.shape.static:
            self._check_static()
        self._static_trees: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def _check_static(self) -> None:
        if not self.head.by_depth:
            raise ValueError(f"a static tree is for heads that draft by depth; this one is {self.head.config.type}")
        if not self.head.config.accuracy:
            raise ValueError("a static tree is made from accuracies, and the head has none: train with data.valid")
        if self.least > -math.inf:
            raise ValueError("min_confidence needs a chain or a dynamic tree: a static one is the same in every step")

    def nodes(self, k: int) -> int:
        if self.head.by_depth and k > (most := self.head.config.unroll):
            raise ValueError(f"k={k}: the head drafts at most {most} tokens")
        return self.shape.kept(k)

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        c, device = self.head.config, self.head.d2t.device
        self._state = self.head.start(len(prompts), capacity)
        self._graphs = Graphs(device, record=self.least == -math.inf)
        reduced = c.draft_vocab_size < c.vocab_size
        self._ids_W = self.head.to_target_ids(torch.arange(c.draft_vocab_size, device=device)) if reduced else None
        self._seen_BV = None  # tokens of the text, where a repetition penalty asks for them
        if self.sampling.repetition_penalty != 1:
            self._seen_BV = torch.zeros(len(prompts), c.vocab_size, dtype=torch.bool, device=device)
            self._seen_BV.scatter_(1, torch.tensor([prompt[:1] for prompt in prompts], device=device), True)

    def observe(self, news: News) -> None:
        tokens_BL = news.tokens_BL
        self._logits_BW, _ = self.head.extend(self._state, tokens_BL, news.taps_BLAH, news.last_BLH, news.counts_B)
        if self._seen_BV is not None:
            real_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device) < news.counts_B[:, None]
            self._seen_BV.scatter_(1, torch.where(real_BL, tokens_BL, tokens_BL[:, :1]), True)

    def propose(self, k: int, uniform_BN: Tensor | None = None) -> DraftTree:
        if k == 0:
            return DraftTree.chain(torch.zeros(len(self._logits_BW), 0, dtype=torch.long, device=self.head.d2t.device))
        way = self._static if self.shape.static else self._tree if self.shape.width > 1 else self._chain
        draft = partial(way, k)
        return self._graphs.run(("draft", k, self._state.graph_key), draft, self._logits_BW, self._seen_BV, uniform_BN)

    def select(self, rows: Tensor) -> None:
        self.head.select(self._state, rows)
        self._graphs.clear()
        if self._seen_BV is not None:
            self._seen_BV = self._seen_BV[rows]

    def _chain(self, k: int, logits_BW: Tensor, seen_BV: Tensor | None, uniform_BN: Tensor | None) -> DraftTree:
        """The likeliest token after the likeliest token, or above temperature 0 drawn after drawn."""
        stops = self.least > -math.inf
        value_B = logits_BW.new_zeros(len(logits_BW), dtype=torch.float32)
        counts_B = torch.ones_like(value_B, dtype=torch.long) if stops else None
        tokens, q = [], []
        for depth in range(k):
            if depth:
                if stops:
                    going_B = value_B >= self.least  # a value never rises again
                    if not going_B.any():
                        break
                    counts_B += going_B
                logits_BW = self.head.expand(self._state, tokens[-1][:, None])[0][:, 0]
                if seen_BV is not None:
                    seen_BV = seen_BV.scatter(1, tokens[-1][:, None], True)
            if self.sampling.greedy:
                scores_BW = adjust(logits_BW, self.sampling, seen_BV, self._ids_W)
                ids_B = scores_BW.argmax(-1)
                p_BW = scores_BW.softmax(-1) if stops else None
            else:
                p_BW = probabilities(logits_BW, self.sampling, seen_BV, self._ids_W)
                ids_B = draw(p_BW, uniform_BN[:, depth])
                q.append(self._widen(p_BW))
            if stops:
                value_B = value_B + p_BW.gather(1, ids_B[:, None])[:, 0].log()
            tokens.append(self.head.to_target_ids(ids_B))
        return DraftTree.chain(torch.stack(tokens, 1), counts_B, torch.stack(q, 1) if q else None)

    def _tree(self, k: int, logits_BW: Tensor, seen_BV: Tensor | None, uniform_BN: Tensor | None) -> DraftTree:
        """Level by level: the `width` best nodes of the level above get `width` children each.

        Likeliest children are drafted down to depth k, then the best `nodes` of all are kept: a connected tree, since
        no child has a higher value than its parent, and of equals the shallower is kept. Drawn ones are all kept, and
        end with the number of nodes.
        """
        width, drawn, logits_BMW = self.shape.width, self.shape.drawn, logits_BW[:, None]
        seen_BMV = None if seen_BV is None else seen_BV[:, None]
        value_BM = logits_BMW.new_zeros(len(logits_BMW), 1, dtype=torch.float32)
        node_BM = torch.full_like(value_BM, -1, dtype=torch.long)
        tokens, parents, values, q = [], [], [], []  # of every level
        first = end = 0  # the nodes of the last level
        for depth in range(k):
            if depth:
                value_BM, best_BM = (x[:, :width] for x in values[-1].sort(dim=1, descending=True, stable=True))
                if (drawn and end == self.nodes(k)) or self._settled(value_BM[:, 0], values):
                    break
                node_BM, token_BM = first + best_BM, tokens[-1].gather(1, best_BM)
                # The head counts the nodes drafted on from, `width` of every level; the first of them hang on the root.
                line_BM = best_BM // width
                above_BM = line_BM + width * (depth - 2) if depth > 1 else line_BM - 1
                logits_BMW, _ = self.head.expand(self._state, token_BM, above_BM)
                if seen_BMV is not None:
                    seen_BMV = seen_BMV.gather(1, line_BM[..., None].expand(-1, -1, seen_BMV.shape[2]))
                    seen_BMV.scatter_(2, token_BM[..., None], True)
            first, end = end, end + width * node_BM.shape[1]
            if drawn:
                end = min(end, self.nodes(k))
                token_BC, gain_BC, q_BCV = self._drawn(logits_BMW, seen_BMV, uniform_BN[:, first:end])
                q.append(q_BCV)
            else:
                token_BC, gain_BC = self._likeliest(logits_BMW, seen_BMV, width)
            above_BC, parent_BC = (x.repeat_interleave(width, 1)[:, : end - first] for x in (value_BM, node_BM))
            tokens.append(token_BC)
            parents.append(parent_BC)
            values.append(torch.where(above_BC >= self.least, above_BC + gain_BC, NOT_THERE))
        tokens_BD, parents_BD, values_BD = (torch.cat(level, 1) for level in (tokens, parents, values))
        if drawn and self.least == -math.inf:
            return DraftTree(tokens_BD, parents_BD, torch.full_like(node_BM[:, 0], end), torch.cat(q, 1), False)
        return self._best(tokens_BD, parents_BD, values_BD, torch.cat(q, 1) if drawn else None)

    def _settled(self, best_B: Tensor, values: list[Tensor]) -> bool:
        """Whether no row gains by another level. Waits for the device only when min_confidence is set."""
        if self.least == -math.inf and (self.shape.drawn or best_B.device.type != "cpu"):
            return False
        done_B = best_B < self.least
        if not self.shape.drawn and sum(level.shape[1] for level in values) >= self.shape.nodes:
            worst_B = torch.cat(values, 1).topk(self.shape.nodes, 1).values[:, -1]  # of those kept if it ended here
            done_B |= best_B <= worst_B
        return bool(done_B.all())

    def _static(self, k: int, logits_BW: Tensor, seen_BV: Tensor | None, uniform_BN: Tensor | None) -> DraftTree:
        """The likeliest tokens of each depth, one list for all its nodes, put where the tree says.

        A repetition penalty counts the text alone, not a node's ancestors.
        """
        depth_N, rank_N, parents_N = self._static_tree(k)
        seen_B1V, tokens = None if seen_BV is None else seen_BV[:, None], []
        for depth in range(min(k, len(self.head.config.accuracy))):
            if depth:
                logits_BW = self.head.expand(self._state, tokens[-1][:, :1])[0][:, 0]
            tokens.append(self._likeliest(logits_BW[:, None], seen_B1V, self.head.ranks)[0])
        tokens_BN = torch.stack(tokens, 1)[:, depth_N, rank_N]
        counts_B = torch.full_like(tokens_BN[:, 0], len(depth_N))
        return DraftTree(tokens_BN, parents_N, counts_B, chain_shaped=False)

    def _static_tree(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """(depth from 0, rank, parent) of each node of the tree at most k deep, int64 [N] on the head's device."""
        if k not in self._static_trees:
            paths = static_tree(self.head.config.accuracy[:k], self.shape.nodes)
            place = {path: node for node, path in enumerate(paths)} | {(): -1}
            nodes = [(len(path) - 1, path[-1], place[path[:-1]]) for path in paths]
            self._static_trees[k] = tuple(torch.tensor(nodes, device=self.head.d2t.device).T)
        return self._static_trees[k]

    def _likeliest(self, logits_BMW: Tensor, seen_BMV: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
        """The `width` likeliest children of each node, likeliest first: target ids and log-confidences, [B, C]."""
        scores_BMW = adjust(logits_BMW, self.sampling, seen_BMV, self._ids_W)
        if not self.sampling.greedy:
            scores_BMW = probabilities(logits_BMW, self.sampling, seen_BMV, self._ids_W).log()
        d2t_W = None if self._ids_W is None else self.head.d2t
        gain_MK, _, ids_MK = draft_topk(scores_BMW.flatten(0, 1), width, d2t_W)
        batch = len(logits_BMW)
        return ids_MK.view(batch, -1), gain_MK.view(batch, -1).clamp_max(0)  # rounding may lift it above 0

    def _drawn(self, logits_BMW, seen_BMV, uniform_BC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """C children, `width` of each node, drawn with replacement: target ids, log-confidences [B, C], q [B, C, V]."""
        q_BMW = probabilities(logits_BMW, self.sampling, seen_BMV, self._ids_W)
        q_BCW = q_BMW.repeat_interleave(self.shape.width, 1)[:, : uniform_BC.shape[1]]
        ids_BC = draw(q_BCW.flatten(0, 1), uniform_BC.flatten()).view(uniform_BC.shape)
        return self.head.to_target_ids(ids_BC), q_BCW.gather(2, ids_BC[..., None])[..., 0].log(), self._widen(q_BCW)

    def _best(self, tokens_BD: Tensor, parents_BD: Tensor, values_BD: Tensor, q_BDV: Tensor | None) -> DraftTree:
        """The tree of the nodes that are kept, parents first: the best `nodes`, without those that are not there."""
        ranked_BD = values_BD.sort(dim=1, descending=True, stable=True).indices[:, : self.shape.nodes]
        kept_BD = torch.zeros_like(values_BD, dtype=torch.bool).scatter_(1, ranked_BD, True) & (values_BD > NOT_THERE)
        order_BN = kept_BD.sort(dim=1, descending=True, stable=True).indices[:, : self.shape.nodes]
        place_BD, above_BN = kept_BD.cumsum(1) - 1, parents_BD.gather(1, order_BN)
        parents_BN = torch.where(above_BN < 0, above_BN, place_BD.gather(1, above_BN.clamp_min(0)))
        if q_BDV is not None:
            q_BDV = q_BDV.gather(1, order_BN[..., None].expand(-1, -1, q_BDV.shape[2]))
        return DraftTree(tokens_BD.gather(1, order_BN), parents_BN, kept_BD.sum(1), q_BDV, chain_shaped=False)

    def _widen(self, q: Tensor) -> Tensor:
        """The same distributions over the target's vocabulary [..., V], zero outside the draft vocab [..., W]."""
        if self._ids_W is None:
            return q
        return q.new_zeros(*q.shape[:-1], self.head.config.vocab_size).index_copy_(-1, self._ids_W, q)
