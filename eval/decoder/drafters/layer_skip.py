"""Layer skipping: the target's own first blocks, its final norm and lm_head draft; nothing is loaded or trained.

The first blocks' keys and values of a draft are those that verification computes, so the target's cache is shared:
drafting writes the pending token and its drafts into the slots after the true ones, verification writes them again.
Few targets were trained for it (LayerSkip); with others acceptance is low.
Sources: Elhoushi et al., "LayerSkip", 2024; Zhang et al., "Draft & Verify", 2023. Shapes: B requests, V vocabulary.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from headtrain.cache import KVCache
from headtrain.eval.decoder.drafters.unroll import UnrolledDrafter
from headtrain.eval.decoder.sampling import Sampling
from headtrain.target import Target


class LayerSkipDrafter(UnrolledDrafter):
    """`skip_from`: the number of blocks that draft, 1 … layers - 1; all later ones are skipped."""

    name = "layer_skip"

    def __init__(self, sampling: Sampling, target: Target, skip_from: int, min_confidence: float = 0.0):
        super().__init__(sampling, min_confidence)
        if not 1 <= skip_from < target.num_layers:
            raise ValueError(
                f"layer_skip: skip_from={skip_from}: {target.name} has {target.num_layers} layers; "
                f"give 1 … {target.num_layers - 1}, the number of layers that draft"
            )
        if target.stateful:
            raise ValueError(
                f"layer_skip: {target.name} has {target.stateful!r} layers, whose running state drafting would spoil; "
                "use another drafter"
            )
        self.skip_from = skip_from

    def bind(self, target: Target, cache: KVCache) -> None:
        self._target, self._cache = target, cache

    def first(self, k: int) -> tuple[Tensor, None]:
        self._slots_B1 = torch.tensor([[len(text) - 1] for text in self.text], device=self._device)
        self._window = max(map(len, self.text))
        return self._logits(torch.tensor([text[-1:] for text in self.text], device=self._device)), None

    def further(self, tokens_B: Tensor) -> tuple[Tensor, None]:
        self._slots_B1, self._window = self._slots_B1 + 1, self._window + 1
        return self._logits(tokens_B[:, None]), None

    def _logits(self, tokens_B1: Tensor) -> Tensor:
        with first_layers(self._target, self.skip_from):
            states = self._target.forward(tokens_B1, self._cache, self._slots_B1, window=self._window)
        return self._target.logits(states.last_BLH[:, 0])


@contextlib.contextmanager
def first_layers(target: Target, count: int):
    """Within it, a forward of the target ends after its first `count` blocks and the final norm."""
    name = next(name for name, child in target.backbone.named_children() if child is target.layers)
    setattr(target.backbone, name, target.layers[:count])
    try:
        yield
    finally:
        setattr(target.backbone, name, target.layers)
