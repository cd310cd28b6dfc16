"""A static key/value cache for batches of ragged requests, in the shape transformers models call.

Row b of the batch keeps its tokens in slots 0, 1, 2, ... without padding. A forward of tokens [B, L] writes the keys of
token (b, i) into slot `slots[b, i]`; whatever lies in later slots (padding of ragged batches, rejected drafts) is never
visible, because a query sees only the slots its mask allows, and is overwritten when the row grows there.
Shapes: B rows, L new tokens, S slots, J key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, [B, J, S, D] each, allocated when a layer first writes, on that layer's device.

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
        self._where: dict[torch.device, tuple[Tensor, Tensor]] = {}  # rows and slots of the running forward
        self._start: int | None = None  # one row on a CPU: where its new slots, which are neighbours, begin
        self._window = 0  # slots visible to the running forward

    def begin(self, slots_BL: Tensor, window: int) -> None:
        """Announces the slots the next forward writes (int64 [B, L], neighbours in each row) and how many it reads."""
        if window > self.capacity:
            raise ValueError(f"KV cache of {self.capacity} slots is too small for {window}")
        self._slots_BL, self._window = slots_BL, window
        self._start = int(slots_BL[0, 0]) if self.batch == 1 and slots_BL.device.type == "cpu" else None
        if self._rows_B1 is None:
            self._rows_B1 = torch.arange(self.batch, device=slots_BL.device)[:, None]
        self._where = {slots_BL.device: (self._rows_B1, slots_BL)}

    def update(self, key_BJLD: Tensor, value_BJLD: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values; returns all visible ones, [B, J, window, D]. Called by the model's layers."""
        if layer_idx not in self.keys:
            for store, new in ((self.keys, key_BJLD), (self.values, value_BJLD)):
                store[layer_idx] = new.new_zeros(self.batch, new.shape[1], self.capacity, new.shape[3])
        if (device := key_BJLD.device) not in self._where:
            self._where[device] = self._rows_B1.to(device), self._slots_BL.to(device)
        out = []
        for store, new in ((self.keys[layer_idx], key_BJLD), (self.values[layer_idx], value_BJLD)):
            if self._start is None:
                store.transpose(1, 2)[self._where[device]] = new.transpose(1, 2)
            else:
                store[:, :, self._start : self._start + new.shape[2]] = new
            out.append(store[:, :, : self._window])
        return out[0], out[1]

    def select(self, rows: Tensor) -> None:
        """Keeps only the given rows, in the given order (when some requests have finished)."""
        for store in (self.keys, self.values):
            for layer, tensor in store.items():
                store[layer] = tensor[rows.to(tensor.device)]
        self.batch, self._rows_B1 = len(rows), None

    # What transformers asks of a cache besides update().
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._window - (0 if self._slots_BL is None else self._slots_BL.shape[1])

    def get_mask_sizes(self, *_) -> tuple[int, int]:
        return self._window, 0


class StateCache(KVCache):
    """Also for layers that keep a running state (linear attention, SSM, convolution) instead of every token.

    A state cannot be cut back: after a rejected draft, `states` is set to a copy made before, and the tokens that
    stayed are run again. A forward must not hold padding, which would enter the state.
    Shapes: C channels, T the convolution's width.
    """

    def __init__(self, batch: int, capacity: int):
        super().__init__(batch, capacity)
        self.states: dict[tuple[str, int, int], Tensor] = {}  # (kind, layer, number) -> [B, ...]

    def snapshot(self) -> dict[tuple[str, int, int], Tensor]:
        """A copy: models change a state in place."""
        return {key: state.clone() for key, state in self.states.items()}

    def part(self, rows: Tensor, states: dict[tuple[str, int, int], Tensor]) -> StateCache:
        """A cache of the given rows alone, which starts from their rows of `states`."""
        part = StateCache(len(rows), self.capacity)
        for mine, theirs in ((part.keys, self.keys), (part.values, self.values), (part.states, states)):
            mine.update({key: tensor[rows.to(tensor.device)] for key, tensor in theirs.items()})
        return part

    def put_states(self, rows: Tensor, part: StateCache) -> None:
        """Takes over the states that the given rows have reached in a `part`."""
        for key, state in part.states.items():
            self.states[key][rows.to(state.device)] = state

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.states = {key: state[rows.to(state.device)] for key, state in self.states.items()}

    # What transformers' layers with a state ask of a cache.
    def is_recording_past(self, *_) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("convolution", layer_idx, state_idx))

    def update_conv_state(
        self, new_BCL: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_
    ) -> Tensor:
        """Keeps the last T inputs of the convolution; returns those kept before (zeros at first) and the new ones."""
        key = ("convolution", layer_idx, state_idx)
        before_BCT = self.states.get(key)
        width = conv_kernel_size or (new_BCL if before_BCT is None else before_BCT).shape[-1]
        if before_BCT is None:
            before_BCT = new_BCL.new_zeros(*new_BCL.shape[:-1], max(0, width - new_BCL.shape[-1]))
        all_BCL = torch.cat([before_BCT, new_BCL], -1)
        self.states[key] = all_BCL[..., -width:].clone()
        return all_BCL

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("recurrent", layer_idx, state_idx))

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_) -> Tensor:
        self.states["recurrent", layer_idx, state_idx] = state
        return state


def cache_for(stateful: Any, batch: int, capacity: int) -> KVCache:
    """The cache of a target whose layers keep a running state (`Target.stateful`), or of one without."""
    return (StateCache if stateful else KVCache)(batch, capacity)
