"""CUDA graphs: the kernels of a step, recorded once per shape and started with one call.

A forward of a few tokens is hundreds of small kernels, and starting them takes longer than running them. `Graphs.run`
records a function of tensors at its second call with a key and equal shapes (the first one warms up: libraries choose
their algorithms, Triton compiles) and replays it from then on. On a CPU it calls the function.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)
BUCKET = 256  # slots; a cache window is rounded up to a multiple, so that a growing request keeps its graph


class Graphs:
    """The recorded functions of one decoder, at most `limit` of them: the one unused for longest makes room.

    Each keeps its activations, so `limit` bounds the memory too. What a function reads besides its arguments (weights,
    caches) must stay where it is: call `clear` when a cache moves. record: False where that cannot be promised.
    """

    def __init__(self, device: torch.device, limit: int = 16, record: bool = True):
        self.active, self.limit = record and device.type == "cuda", limit
        self._known: OrderedDict[Hashable, Callable | None] = OrderedDict()  # None: seen once

    def bucket(self, window: int, capacity: int) -> int:
        """`window` rounded up to what graphs are made for, within `capacity`; as it is where nothing is recorded."""
        return min(-(-window // BUCKET) * BUCKET, capacity) if self.active else window

    def run(self, key: Hashable, function: Callable[..., Any], *inputs: Tensor | None) -> Any:
        """function(*inputs); inputs are copied to where the graph reads them.

        The function may not wait for the device. Its tensors are overwritten by the next run with the same key. Where
        recording is impossible the reason is logged once and the function is called as it is.
        """
        if not self.active:
            return function(*inputs)
        key = (key, *[None if x is None else (x.shape, x.dtype) for x in inputs])
        if key not in self._known:
            self._known[key] = None
            while len(self._known) > self.limit:
                self._known.popitem(last=False)
            return function(*inputs)
        self._known.move_to_end(key)
        if self._known[key] is None:
            try:
                self._known[key] = _record(function, inputs)
            except RuntimeError as error:
                log.warning("%s runs without a CUDA graph: %s", key[0], str(error).splitlines()[0])
                self._known[key] = function
        return self._known[key](*inputs)

    def clear(self) -> None:
        """Forgets every graph."""
        self._known.clear()


def _record(function: Callable[..., Any], inputs: tuple[Tensor | None, ...]) -> Callable[..., Any]:
    """A callable that replays function(*inputs) on other inputs of the same shapes. RuntimeError where CUDA refuses."""
    fixed = [None if x is None else x.clone() for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(*fixed)

    def replay(*inputs: Tensor | None):
        for to, x in zip(fixed, inputs, strict=True):
            if x is not None:
                to.copy_(x)
        graph.replay()
        return outputs

    return replay
