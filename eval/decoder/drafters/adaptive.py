"""Plain decoding for the requests whose drafts are mostly wrong, and speculation again from time to time.

Shapes: B requests, N nodes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headtrain.eval.decoder.drafters.base import Drafter, News
from headtrain.tree import DraftTree

WINDOW = 8  # steps with drafts over which acceptance is taken
PAUSE = 8  # plain steps after the first bad window; twice as many after each further one in a row
LONGEST_PAUSE = 128


@dataclass
class Request:
    """One request's record: (drafted, accepted) of its latest steps with drafts, and how long it decodes plainly."""

    steps: deque = field(default_factory=lambda: deque(maxlen=WINDOW))
    plain: int = 0  # plain steps still to come
    pause: int = PAUSE

    def add(self, drafted: int, accepted: int, plain_below: float) -> None:
        """Takes in one step; a full window below the threshold begins a pause, one above it makes the next short."""
        if self.plain:
            self.plain -= 1
        elif drafted:
            self.steps.append((drafted, accepted))
            if len(self.steps) == WINDOW:
                if sum(a for _, a in self.steps) < plain_below * sum(d for d, _ in self.steps):
                    self.plain, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
                    self.steps.clear()
                else:
                    self.pause = PAUSE


class AdaptiveDrafter(Drafter):
    """Another drafter, switched off for a request while its rolling acceptance is below `plain_below`.

    Rolling acceptance = accepted / drafted over the last WINDOW steps that had drafts; of a tree, its depth counts as
    drafted. After a pause the request drafts for a window again. When all requests pause, the other drafter is not
    asked. What decides is the past alone, so sampling stays exact.
    """

    def __init__(self, drafter: Drafter, plain_below: float):
        if not 0 < plain_below <= 1:
            raise ValueError(f"plain_below={plain_below}: a share of drafted tokens, above 0 and at most 1, is needed")
        self.drafter, self.plain_below = drafter, plain_below
        self.name, self.taps, self.branches = drafter.name, drafter.taps, drafter.branches
        self.nodes, self.bind = drafter.nodes, drafter.bind

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        self._rows, self._depth_B = [Request() for _ in prompts], None
        self.drafter.start(prompts, capacity)

    def observe(self, news: News) -> None:
        self._device = news.tokens_BL.device
        if self._depth_B is not None:  # None: the news is the prompt
            for row, drafted, tokens in zip(self._rows, self._depth_B.tolist(), news.tokens, strict=True):
                row.add(drafted, len(tokens) - 1, self.plain_below)
        self.drafter.observe(news)

    def propose(self, k: int, uniform_BN: Tensor | None = None) -> DraftTree:
        drafting = [not row.plain for row in self._rows]
        if any(drafting):
            tree = self.drafter.propose(k, uniform_BN)
        else:
            tree = DraftTree.chain(torch.zeros(len(drafting), 0, dtype=torch.long, device=self._device))
        if not all(drafting):
            tree = replace(tree, counts=tree.counts * torch.tensor(drafting, device=self._device))
        self._depth_B = tree.counts
        if not tree.is_chain:
            nodes = torch.arange(tree.tokens.shape[1], device=self._device)
            self._depth_B = (tree.depths() * (nodes < tree.counts[:, None])).amax(1)
        return tree

    def select(self, rows: Tensor) -> None:
        self._rows = [self._rows[i] for i in rows.tolist()]
        if self._depth_B is not None:
            self._depth_B = self._depth_B[rows]
        self.drafter.select(rows)
