"""The k likeliest draft tokens as Triton kernels: ids in both vocabularies and their log-softmax.

The first launch leaves per block of the vocabulary its k largest logits, its maximum and its sum of exponentials; the
second merges the blocks. Equal logits: the lower id first. Shapes: M rows, W draft vocab, C blocks, K tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
MAX_K = 64
NO_INDEX = tl.constexpr(2**31 - 1)


@triton.jit
def _take(x_W, id_W, left_W):
    """(largest x that is left, its id, what is left then)."""
    best = tl.max(tl.where(left_W, x_W, -float("inf")), 0)
    at = tl.min(tl.where(left_W & (x_W == best), id_W, NO_INDEX), 0)
    return best, at, left_W & (id_W != at)


@triton.jit
def _blocks(
    logits, values, ids, tops, sums, stride,
    W: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The k largest, [M, C, K], and max and Σ exp(x - max), [M, C], of one block of one row."""
    m, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    id_W = c * BLOCK + tl.arange(0, BLOCK)
    left_W = id_W < W
    x_W = tl.load(logits + m * stride + id_W, mask=left_W, other=-float("inf")).to(tl.float32)
    top = tl.max(x_W, 0)
    tl.store(tops + m * C + c, top)
    tl.store(sums + m * C + c, tl.sum(tl.exp(x_W - tl.maximum(top, -1e30)), 0))
    for i in range(K):
        best, at, left_W = _take(x_W, id_W, left_W)  # NO_INDEX after the last
        tl.store(values + (m * C + c) * K + i, best)
        tl.store(ids + (m * C + c) * K + i, at)


@triton.jit
def _merge(
    values, ids, tops, sums, d2t, out, draft, target,
    C: tl.constexpr, K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_CK: tl.constexpr, D2T: tl.constexpr,
):  # fmt: skip
    """The k largest of a row's blocks: log-softmax, draft id, target id, each [M, K]."""
    m = tl.program_id(0).to(tl.int64)
    c_C, n_N = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_CK)
    top_C = tl.load(tops + m * C + c_C, mask=c_C < C, other=-float("inf"))
    sum_C = tl.load(sums + m * C + c_C, mask=c_C < C, other=0.0)
    top = tl.max(top_C, 0)
    logsumexp = top + tl.log(tl.sum(sum_C * tl.exp(top_C - top), 0))
    x_N = tl.load(values + m * C * K + n_N, mask=n_N < C * K, other=-float("inf"))
    id_N = tl.load(ids + m * C * K + n_N, mask=n_N < C * K, other=NO_INDEX)
    left_N = id_N < NO_INDEX
    for i in range(K):
        best, at, left_N = _take(x_N, id_N, left_N)
        tl.store(out + m * K + i, best - logsumexp)
        tl.store(draft + m * K + i, at)
        tl.store(target + m * K + i, at + tl.load(d2t + at) if D2T else at)


def draft_topk(logits_MW: Tensor, k: int, d2t_W: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(float32 log-softmax, int64 draft ids, int64 target ids), each [M, k], highest first; 1 ≤ k ≤ min(W, 64)."""
    (m, w), new = logits_MW.shape, logits_MW.new_empty
    if not 1 <= k <= min(w, MAX_K):
        raise ValueError(f"k={k}: the Triton kernel finds 1 to {min(w, MAX_K)} of {w} tokens")
    c = triton.cdiv(w, BLOCK)
    values, ids = new(m, c, k, dtype=torch.float32), new(m, c, k, dtype=torch.int32)
    tops, sums = new(m, c, dtype=torch.float32), new(m, c, dtype=torch.float32)
    out = new(m, k, dtype=torch.float32), new(m, k, dtype=torch.int64), new(m, k, dtype=torch.int64)
    logits_MW = logits_MW if logits_MW.stride(1) == 1 else logits_MW.contiguous()
    with torch.cuda.device_of(logits_MW):
        _blocks[m, c](logits_MW, values, ids, tops, sums, logits_MW.stride(0), W=w, C=c, K=k, BLOCK=BLOCK)
        _merge[m,](
            values, ids, tops, sums, ids if d2t_W is None else d2t_W, *out, C=c, K=k,
            BLOCK_C=triton.next_power_of_2(c), BLOCK_CK=triton.next_power_of_2(c * k), D2T=d2t_W is not None,
        )  # fmt: skip
    return out
