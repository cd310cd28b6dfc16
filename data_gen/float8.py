"""Hidden states in 8 bits: torch.float8_e4m3fn codes and one float32 scale per vector of H values.

The scale puts a vector's largest magnitude on 448, the largest code; a vector with a value that is not finite has a
scale that is not finite, so that none is hidden. float32: exact enough to divide by, and 4 bytes beside H are few.
Shapes: [..., H] values and codes, [..., 1] scales; leading dimensions are free.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAME = "float8"  # data.captures.dtype
DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
SCALES = {"taps": "taps_scale", "last": "last_scale"}  # tensors kept in 8 bits -> their scales


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [..., H] float8_e4m3fn, scales [..., 1] float32) of values of any float dtype, on any device."""
    values = values.float()
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST
    return (values / scale).to(DTYPE), scale


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """bfloat16 [..., H]; its three more bits of mantissa make the rounding small beside that of the codes.

    torch converts float8 a value at a time on a CPU. The bits of a code, moved up by seven with the sign on top, are
    the float16 of 1/256 of it, which is ten times as fast.
    """
    half = ((codes.view(torch.int8).to(torch.int16) << 7) & ~(1 << 14)).view(torch.float16)
    return half.float().mul_(scale * 256).bfloat16()


def pack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A capture file's flat tensors with `taps` and `last` encoded."""
    packed = dict(tensors)
    for name, scale in SCALES.items():
        packed[name], packed[scale] = encode(tensors[name])
    return packed
