"""Where the time of a step goes, and how much of the device's peak is used.

Shapes: D depths.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from headtrain.heads.base import HeadConfig

PARTS = ("data", "forward", "backward", "optimizer", "communication")
COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all_single", "barrier",
)  # fmt: skip
# Peak of dense 16-bit matrix products, FLOP/s, by a part of the device's name (the makers' data sheets).
PEAKS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12, "RTX 4090": 165e12,
}  # fmt: skip


class Collectives:
    """Seconds in DeepSpeed's collectives, with the wait for the slowest process; measured while `exact`."""

    def __init__(self, device: torch.device):
        from deepspeed.comm import comm

        self.device, self.exact, self.spent = device, False, 0.0
        self._backend = comm.cdb
        self._plain = {name: getattr(self._backend, name) for name in COLLECTIVES if hasattr(self._backend, name)}
        for name, collective in self._plain.items():
            setattr(self._backend, name, self._timed(collective))

    def _timed(self, collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.exact:
                return collective(*args, **kwargs)
            self._wait()
            began = time.perf_counter()
            work = collective(*args, **kwargs)
            if hasattr(work, "wait"):
                work.wait()
            self._wait()
            self.spent += time.perf_counter() - began
            return work

        return call

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def take(self) -> float:
        """Seconds since the last call."""
        spent, self.spent = self.spent, 0.0
        return spent

    def release(self) -> None:
        for name, collective in self._plain.items():
            setattr(self._backend, name, collective)


class Stopwatch:
    """Seconds of a step by part: on a CPU of every step, on a GPU of those with `exact`, which wait for the device.

    Collectives are a part of their own, taken out of those they happen in.
    """

    def __init__(self, device: torch.device, collectives: Collectives):
        self.device, self.collectives = device, collectives
        self.exact = False
        self.clear()

    @property
    def exact(self) -> bool:
        return self.collectives.exact

    @exact.setter
    def exact(self, logged: bool) -> None:
        self.collectives.exact = logged or self.device.type == "cpu"

    def clear(self) -> None:
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.steps, self._last = 0, time.perf_counter()

    def mark(self, part: str | None) -> None:
        """Books the time since the last mark on `part`; None starts anew without booking."""
        if not self.exact:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now, waited = time.perf_counter(), self.collectives.take()
        if part:
            self.parts[part] += now - self._last - waited
            self.parts["communication"] += waited
        self._last = now

    def of_target(self, seconds: float, inside: bool) -> None:
        """Books what the target took for a batch; inside: while the step waited for its data."""
        if self.exact:
            self.parts["target"] = self.parts.get("target", 0.0) + seconds
            self.parts["data"] -= seconds * inside

    def end_step(self) -> None:
        self.steps += self.exact

    def read(self) -> dict[str, Any]:
        """Seconds of a step by part, averaged; then starts a new interval."""
        found = {part: round(spent / max(self.steps, 1), 4) for part, spent in self.parts.items()}
        self.clear()
        return found


# ------------------------------------------------------------------------------------------------- MFU

def peak_flops(device: torch.device, precision: str) -> float | None:
    """Of one device in 16-bit training; None where it is not known."""
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def model_flops(
    c: HeadConfig, tokens: float, taught: float, seen: float, slots_D: Sequence[float], rows_D: Sequence[float]
) -> float | None:
    """Floating-point operations that training an EAGLE-3 head on such batches takes; None for other heads.

    A multiply-add counts 2; the backward pass twice the forward; nothing recomputed counts.
    tokens: positions, each of which gets keys and values. taught: positions the teacher's logits are made for.
    seen: keys a slot sees at depth 0, on average. slots_D: slots drafted from; rows_D: of them those with a loss.
    """
    if c.type != "eagle3":
        return None
    h, q = c.hidden_size, c.num_attention_heads * c.head_dim
    qkv = q + 2 * c.num_key_value_heads * c.head_dim
    slots, later = sum(slots_D), sum(slots_D[1:])
    fuse = tokens * len(c.taps) * c.target_hidden_size * h
    project = tokens * h * qkv + (tokens + later) * h * qkv  # the embedding half once, the hidden half at each depth
    attend = 2 * q * sum(count * (seen + depth) for depth, count in enumerate(slots_D))
    rest = slots * (q * h + 3 * h * c.intermediate_size)
    output = sum(rows_D) * h * c.draft_vocab_size
    teacher = taught * c.target_hidden_size * c.draft_vocab_size
    return 2 * (3 * (fuse + project + attend + rest + output) + teacher)
