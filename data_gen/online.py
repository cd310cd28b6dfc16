"""Online training: the target's states over stored responses just in time, as a capture of them would hold; no disk.

Shapes: T tokens of a row, A taps, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from headtrain.config import RecipeConfig
from headtrain.data_gen.passes import buffer_dtype, read_rows
from headtrain.lean import speed_up
from headtrain.target import Target

STATES = ("taps", "last", "argmax", "logsumexp")
START_CPU, START_GPU = 16, 256  # tokens in whose time one more forward is started


class States:
    """The target, asked for its states over rows of token ids."""

    def __init__(self, config: RecipeConfig, taps: Sequence[int]):
        self.target, self.taps = Target.load(config.target), tuple(taps)
        speed_up(self.target)
        self.start = START_CPU if self.target.device.type == "cpu" else START_GPU
        self.dtype = buffer_dtype(config.data.captures.dtype)

    def __call__(self, rows: list[Tensor]) -> list[dict[str, Tensor]]:
        """rows: token ids, int32 [T] each. For each row, on the CPU: `taps` [T, A, H], `last` [T, H], both in
        data.captures.dtype, `argmax` int32 [T] and `logsumexp` float32 [T]; zeros at T-1.

        The forwards hang on these rows alone, so the same rows give the same bits whoever asks, and when.
        """
        found: list[dict[str, Tensor]] = [{} for _ in rows]
        for group in groups([len(row) for row in rows], self.start):
            flat = read_rows(self.target, [rows[n] for n in group], self.taps, self.dtype).flat()
            lengths = [len(rows[n]) for n in group]
            for name in STATES:
                for n, part in zip(group, flat[name].split(lengths), strict=True):
                    found[n][name] = part
        return found


def groups(lengths: Sequence[int], start: int) -> list[list[int]]:
    """Rows of like length together: the cut of all rows, longest first, that costs the fewest tokens, padding included.

    Each group is one forward, rows x longest tokens and `start` more.
    """
    order = sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))
    best: list[tuple[int, int]] = [(0, 0)]  # cost of the first rows, and where their last group begins
    for end in range(1, len(order) + 1):
        best.append(min((best[at][0] + (end - at) * lengths[order[at]] + start, at) for at in range(end)))
    cut, end = [], len(order)
    while end:
        at = best[end][1]
        cut.append(order[at:end])
        end = at
    return cut[::-1]
