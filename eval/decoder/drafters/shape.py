"""The shape of a head's drafts, as users write it."""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass

FORMS = (
    "chain, 4x16 (width x nodes: a dynamic tree), iid-2x8 (the same, its tokens drawn; above temperature 0) or "
    "static-16 (nodes: the same tree in every step, for heads that draft by depth)"
)


@dataclass(frozen=True)
class TreeShape:
    """width: how many nodes of a level are drafted on from, and how many children each gets; nodes: all in all.

    width 1 is a chain, as long as K. drawn: children are drawn from the head's distribution, instead of its likeliest.
    static: the tree is `static_tree` of the head's accuracies; its width is its own.
    """

    width: int = 1
    nodes: int = 0
    drawn: bool = False
    static: bool = False

    @property
    def branches(self) -> bool:
        return self.static or self.width > 1

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """`chain`, `4x16`, `iid-2x8` or `static-16`; ValueError names the text and shows the forms."""
        if text == "chain":
            return cls()
        if found := re.fullmatch(r"static-([1-9]\d*)", text):
            return cls(nodes=int(found[1]), static=True)
        found = re.fullmatch(r"(iid-)?([1-9]\d*)x([1-9]\d*)", text)
        width, nodes = (int(n) for n in found.groups()[1:]) if found else (0, 0)
        if width < 2 or nodes < width:
            raise ValueError(f"tree {text!r}: needs the form {FORMS}, with width ≥ 2 and nodes ≥ width")
        return cls(width, nodes, bool(found[1]))

    def drafted(self, k: int) -> int:
        """Nodes drafted down to depth k, of which a dynamic tree keeps the best `nodes`."""
        return self.width + (k - 1) * self.width**2 if k else 0

    def kept(self, k: int) -> int:
        """The most nodes a proposal of depth k has."""
        if self.static:
            return self.nodes
        return k if self.width == 1 else min(self.nodes, self.drafted(k))


def static_tree(accuracy: list[list[float]], nodes: int) -> list[tuple[int, ...]]:
    """The tree of so many nodes that is expected to have the most tokens accepted: paths of ranks, parents first.

    accuracy[d][r]: how often the r-th likeliest token at depth d is right. A node is worth the product of its path's,
    as if depths did not know of each other; the most valuable one that hangs on the tree is added, one after another.
    Source: Medusa (arXiv 2401.10774), section 2.3.3.
    """
    waiting, kept = [(-value, (rank,)) for rank, value in enumerate(accuracy[0])], []
    heapq.heapify(waiting)
    while waiting and len(kept) < nodes:
        value, path = heapq.heappop(waiting)
        kept.append(path)
        for rank, factor in enumerate(accuracy[len(path)] if len(path) < len(accuracy) else ()):
            heapq.heappush(waiting, (value * factor, (*path, rank)))
    return kept
