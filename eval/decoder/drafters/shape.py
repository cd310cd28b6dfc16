"""The shape of a head's drafts, as users write it."""

from __future__ import annotations

import re
from dataclasses import dataclass

FORMS = "chain, 4x16 (width x nodes: a dynamic tree) or iid-2x8 (the same, its tokens drawn; above temperature 0)"


@dataclass(frozen=True)
class TreeShape:
    """width: how many nodes of a level are drafted on from, and how many children each gets; nodes: all in all.

    width 1 is a chain, as long as K. drawn: children are drawn from the head's distribution, instead of its likeliest.
    """

    width: int = 1
    nodes: int = 0
    drawn: bool = False

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """`chain`, `4x16` or `iid-2x8`; ValueError names the text and shows the forms."""
        if text == "chain":
            return cls()
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
        return k if self.width == 1 else min(self.nodes, self.drafted(k))
