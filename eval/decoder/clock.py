"""Where the time goes, without waiting for the device in between."""

from __future__ import annotations

import time
from collections import Counter

import torch


class Clock:
    """Seconds per kind of work: wall time on a CPU, the stream's own time on a GPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self._spans: list[tuple] = []

    def now(self):
        """A mark in time, to be given to `add`."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def add(self, kind: str, start, end) -> None:
        self._spans.append((kind, start, end))

    def seconds(self) -> Counter[str]:
        """Sums by kind, 0 for one that never came up; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        sums = Counter()
        for kind, start, end in self._spans:
            sums[kind] += end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
        return sums
