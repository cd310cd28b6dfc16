"""Compaction of the KV cache as one Triton launch for the keys and values of all layers.

The accepted nodes of a tree lie scattered behind the true prefix; each is copied to the next true slot. A path ascends
and path[d] ≥ d, so copying in the order of depth overwrites nothing that is still to be read.
Shapes: B rows, J key heads, S slots, D head size, K the deepest path, T tensors.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["levels", "path_b"])  # they change from step to step
def _compact(
    pointers, one, first, path, levels, b_stride, j_stride, s_stride, path_b,
    J: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Slot first + path[d] → slot first + d of one row and head of one tensor."""
    b, j = (tl.program_id(1) // J).to(tl.int64), tl.program_id(1) % J
    x = tl.load(pointers + tl.program_id(0)).to(one.dtype) + b * b_stride + j * j_stride
    d_D, start = tl.arange(0, BLOCK_D), tl.load(first + b)
    for depth in range(levels):
        node = tl.load(path + b * path_b + depth)
        moved_D = (d_D < D) & (node > depth)  # -1 after the end; equal: already there
        value_D = tl.load(x + (start + node) * s_stride + d_D, mask=moved_D, other=0.0)
        tl.store(x + (start + depth) * s_stride + d_D, value_D, mask=moved_D)


@lru_cache(maxsize=8)
def _pointers(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [T]; kept on the device, so that a step copies nothing to it."""
    return torch.tensor(addresses, device=device)


def compact(tensors: list[Tensor], first_B: Tensor, path_BK: Tensor) -> None:
    """Moves slot first_B[b] + path_BK[b, d] to slot first_B[b] + d, in place, in every tensor [B, J, S, D].

    The tensors have one shape, stride and dtype, which is not checked. path_BK: int64, ascending, -1 after the last;
    its rows may be slices of longer ones.
    """
    one, first_B = tensors[0], first_B.contiguous()
    b, j, _, d = one.shape
    pointers_T = _pointers(tuple(x.data_ptr() for x in tensors), one.device)
    with torch.cuda.device_of(one):
        _compact[len(tensors), b * j](
            pointers_T, one, first_B, path_BK, path_BK.shape[1], *one.stride()[:3], path_BK.stride(0),
            J=j, D=d, BLOCK_D=triton.next_power_of_2(d), num_warps=1,
        )  # fmt: skip
