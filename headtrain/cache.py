"""A static key/value cache for batches of ragged requests, in the shape transformers models call.

Row b of the batch keeps its tokens in slots 0, 1, 2, ... without padding. A forward of tokens [B, L] writes the keys of
token (b, i) into slot `slots[b, i]`; whatever lies in later slots (padding of ragged batches, rejected drafts) is never
visible, because a query sees only the slots its mask allows, and is overwritten when the row grows there.
Shapes: B rows, L new tokens, S slots, J key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, [B, J, S, D] each, allocated when a layer first writes.

    `capacity` is the number of slots S of a row, including room for draft tokens and padding.
    """

    is_compileable = False
    is_sliding = ()

    def __init__(self, batch: int, capacity: int):
        self.batch, self.capacity = batch, capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._slots_BL: Tensor | None = None
        self._rows_B1: Tensor | None = None
        self._window = 0  # slots visible to the running forward

    def begin(self, slots_BL: Tensor, window: int) -> None:
        """Announces where the next forward writes (int64 [B, L]) and how many slots it reads."""
        if window > self.capacity:
            raise ValueError(f"KV cache of {self.capacity} slots is too small for {window}")
        self._slots_BL, self._window = slots_BL, window
        if self._rows_B1 is None:
            self._rows_B1 = torch.arange(self.batch, device=slots_BL.device)[:, None]

    def update(self, key_BJLD: Tensor, value_BJLD: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values; returns all visible ones, [B, J, window, D]. Called by the model's layers."""
        if layer_idx not in self.keys:
            for store, new in ((self.keys, key_BJLD), (self.values, value_BJLD)):
                store[layer_idx] = new.new_zeros(self.batch, new.shape[1], self.capacity, new.shape[3])
        out = []
        for store, new in ((self.keys[layer_idx], key_BJLD), (self.values[layer_idx], value_BJLD)):
            store.transpose(1, 2)[self._rows_B1, self._slots_BL] = new.transpose(1, 2)
            out.append(store[:, :, : self._window])
        return out[0], out[1]

    def move(self, rows: Tensor, source: Tensor, destination: Tensor) -> None:
        """Copies slot source[i] of row rows[i] to slot destination[i], in every layer (after a tree's acceptance)."""
        for store in (*self.keys.values(), *self.values.values()):
            store[rows, :, destination] = store[rows, :, source]

    def select(self, rows: Tensor) -> None:
        """Keeps only the given rows, in the given order (when some requests have finished)."""
        for store in (self.keys, self.values):
            for layer, tensor in store.items():
                store[layer] = tensor[rows]
        self.batch, self._rows_B1 = len(rows), None

    # What transformers asks of a cache besides update().
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._window - (0 if self._slots_BL is None else self._slots_BL.shape[1])

    def get_mask_sizes(self, *_) -> tuple[int, int]:
        return self._window, 0
