"""What every drafter is to the decoder.

Shapes: B requests, L new tokens, K draft tokens, A taps, H target hidden, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from headtrain.tree import DraftTree

if TYPE_CHECKING:
    from headtrain.cache import KVCache
    from headtrain.target import Target


@dataclass
class News:
    """What one target forward settled: of row b, the first counts_B[b] slots are true; token i comes *after* slot i.

    taps_BLAH: residual stream at the drafter's taps, None when it has none; last_BLH: after the final norm.
    tokens: the same tokens on the host, without padding.
    """

    tokens_BL: Tensor
    counts_B: Tensor
    taps_BLAH: Tensor | None
    last_BLH: Tensor
    tokens: list[list[int]]


class Drafter:
    """Proposes tokens for a batch of requests. One object serves many batches: `start` begins a new one.

    `taps`: the target layers (1 … layers) whose residual stream `observe` needs; empty for none. `branches`: whether a
    proposal may be anything but a chain.
    """

    name = ""
    taps: tuple[int, ...] = ()
    branches = False

    def nodes(self, k: int) -> int:
        """The most nodes a proposal of depth k has."""
        return k

    def bind(self, target: Target, cache: KVCache) -> None:
        """Hands over the target and its cache of the batch to come, before `start`: for drafting on the target's own
        layers. True tokens lie in slots 0, 1, 2, …; what a drafter writes into later ones, verification overwrites."""

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        """Forgets everything; the new requests begin with prompt[0] and never hold more than `capacity` tokens.

        The rest of the prompt arrives by `observe`, as every later token does, each exactly once.
        """
        raise NotImplementedError

    def observe(self, news: News) -> None:
        """Takes in what the target settled: first the prompt's slots, then every step's."""
        raise NotImplementedError

    def propose(self, k: int, uniform_BN: Tensor | None = None) -> DraftTree:
        """A tree (or chain) at most k deep. `uniform_BN` in [0, 1), one for each of nodes(k): for drawing tokens."""
        raise NotImplementedError

    def select(self, rows: Tensor) -> None:
        """Keeps only the given requests (int64 indices into the present batch), in that order; `observe` follows."""
        raise NotImplementedError
