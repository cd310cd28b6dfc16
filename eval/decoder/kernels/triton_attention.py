"""Tree attention over the KV cache as Triton kernels: few queries, many keys, split over the keys (flash-decoding).

Who sees what comes as the mask that the model family made of it (true lengths, ancestors, windows in positions), so one
kernel serves every family; keys that no query of a tile sees are not read. One launch leaves a partial result per
split, a second one merges them, so that one request fills a GPU. Sums are float32.
Shapes: B rows, L new tokens, S slots, J key heads, G query heads per key head, D head size, P splits; in the kernels a
tile of M query rows of one key head, row m = head g · L + token l, and a tile of N keys.
Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_HEAD_DIM = 256
UNSEEN = tl.constexpr(-6e4)  # additive mask values below it (-inf, or a dtype's least: -65504 in float16) hide a key
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["L", "slots", "per_split", "mask_b", "mask_l"])  # they change from step to step
def _attend(
    q, k, v, mask, out, lse,
    L, slots, per_split, q_b, q_h, q_l, k_b, k_j, k_s, v_b, v_j, v_s, mask_b, mask_l, mask_s, scale, softcap,
    J: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [B, J G, L, P, D] and lse [B, J G, L, P] (base 2) of a tile of query rows over one split of the keys."""
    b, j, split = tl.program_id(0) // J, tl.program_id(0) % J, tl.program_id(2)
    row_M = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real_M, head_M, token_M = row_M < G * L, j * G + row_M // L, row_M % L
    d_D = tl.arange(0, BLOCK_D)
    at_MD = head_M[:, None] * q_h + token_M[:, None] * q_l + d_D[None, :]
    q_MD = tl.load(q + b.to(tl.int64) * q_b + at_MD, mask=real_M[:, None] & (d_D < D)[None, :], other=0.0)
    k, v = k + b.to(tl.int64) * k_b + j.to(tl.int64) * k_j, v + b.to(tl.int64) * v_b + j.to(tl.int64) * v_j
    mask += b.to(tl.int64) * mask_b
    max_M = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: a split may hold no key that a row sees
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    out_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    stop = tl.minimum(slots, (split + 1) * per_split)
    for start in range(split * per_split, stop, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        bias_MN = tl.load(
            mask + token_M[:, None].to(tl.int64) * mask_l + key_N[None, :] * mask_s,
            mask=real_M[:, None] & (key_N < stop)[None, :], other=-float("inf"),
        ).to(tl.float32)  # fmt: skip
        seen_MN = bias_MN > UNSEEN
        read_ND = (tl.max(seen_MN.to(tl.int32), 0) > 0)[:, None] & (d_D < D)[None, :]
        k_ND = tl.load(k + key_N[:, None].to(tl.int64) * k_s + d_D[None, :], mask=read_ND, other=0.0)
        v_ND = tl.load(v + key_N[:, None].to(tl.int64) * v_s + d_D[None, :], mask=read_ND, other=0.0)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale
        if SOFTCAP:
            score_MN = (2 * tl.sigmoid(2 * score_MN / softcap) - 1) * softcap  # tanh
        score_MN = tl.where(seen_MN, (score_MN + bias_MN) * LOG2E, -float("inf"))
        new_M = tl.maximum(max_M, tl.max(score_MN, 1))
        p_MN, shrink_M = tl.exp2(score_MN - new_M[:, None]), tl.exp2(max_M - new_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
        out_MD = out_MD * shrink_M[:, None] + tl.dot(p_MN.to(v_ND.dtype), v_ND, input_precision=PRECISION)
        max_M = new_M
    at_M = ((b * J * G + head_M).to(tl.int64) * L + token_M) * P + split
    some_M = tl.where(sum_M > 0, sum_M, 1.0)
    tl.store(lse + at_M, tl.where(sum_M > 0, max_M + tl.log2(some_M), -float("inf")), mask=real_M)
    tl.store(
        out + at_M[:, None] * D + d_D[None, :], out_MD / some_M[:, None], mask=real_M[:, None] & (d_D < D)[None, :]
    )


@triton.jit(do_not_specialize=["L"])
def _merge(
    part, lse, sinks, out, L,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, SINKS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [B, L, H, D]: the splits of one query row, weighted by their sums; a sink has a weight but no value."""
    row = tl.program_id(0).to(tl.int64)  # of [B, H, L]
    split_P, d_D = tl.arange(0, P), tl.arange(0, BLOCK_D)
    lse_P = tl.load(lse + row * P + split_P)
    top = tl.maximum(tl.max(lse_P, 0), -1e30)
    head = (row // L) % H
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    weight_P = tl.exp2(lse_P - top)
    total = tl.sum(weight_P, 0)
    if SINKS:
        total += tl.exp2(sink - top)
    part_PD = tl.load(part + (row * P + split_P)[:, None] * D + d_D[None, :], mask=(d_D < D)[None, :], other=0.0)
    out_D = tl.sum(part_PD * weight_P[:, None], 0) / tl.where(total > 0, total, 1.0)
    to = ((row // (H * L) * L + row % L) * H + head) * D
    tl.store(out + to + d_D, out_D.to(out.dtype.element_ty), mask=d_D < D)


def tile(head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(keys, warps, stages) of a program that fits every GPU of compute capability 8.0 or more."""
    if dtype == torch.float32:  # exact products use no tensor cores and many registers
        return (32, 4, 2) if head_dim <= 128 else (16, 4, 1)
    return (64, 4, 2) if head_dim <= 128 else (32, 4, 2)


def splits(programs: int, slots: int, processors: int) -> int:
    """In how many parts (a power of two) the keys are read: two programs per processor, at least 128 keys each."""
    wanted = min(-(-2 * processors // programs), slots // 128, 64)
    return 1 << max(wanted, 1).bit_length() - 1


def tree_attention(
    q_BHLD: Tensor,
    k_BJSD: Tensor,
    v_BJSD: Tensor,
    mask_BxLS: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    parts: int | None = None,
) -> Tensor:
    """[B, L, H, D] in q's dtype: softmax(softcap(q · k scale) + mask, sinks) · v. D has stride 1, the others any.

    mask_BxLS: additive, [B or 1, 1, L, S], the same for all heads. sinks_H: one more logit per query head, without a
    value. q, k and v have one dtype: float32, bfloat16 or float16. `parts`: splits of the keys, a power of two
    (default: by the GPU's processors).
    """
    (b, h, n, d), (j, s) = q_BHLD.shape, k_BJSD.shape[1:3]
    if d > MAX_HEAD_DIM:
        raise ValueError(f"the Triton kernel takes head sizes up to {MAX_HEAD_DIM}, not {d}: use the plain path")
    g, block_d = h // j, max(16, triton.next_power_of_2(d))
    rows = min(64, max(16, triton.next_power_of_2(g * n))) if block_d <= 128 else 16
    tiles = triton.cdiv(g * n, rows)
    p = parts or splits(b * j * tiles, s, torch.cuda.get_device_properties(q_BHLD.device).multi_processor_count)
    part = q_BHLD.new_empty(b, h, n, p, d, dtype=torch.float32)
    lse = q_BHLD.new_empty(b, h, n, p, dtype=torch.float32)
    out = q_BHLD.new_empty(b, n, h, d)
    keys, warps, stages = tile(block_d, q_BHLD.dtype)
    exact = torch.get_float32_matmul_precision() == "highest"
    per_split = triton.cdiv(triton.cdiv(s, p), keys) * keys
    mask_b = mask_BxLS.stride(0) if len(mask_BxLS) > 1 else 0
    with torch.cuda.device_of(q_BHLD):
        _attend[b * j, tiles, p](
            q_BHLD, k_BJSD, v_BJSD, mask_BxLS, part, lse, n, s, per_split, *q_BHLD.stride()[:3], *k_BJSD.stride()[:3],
            *v_BJSD.stride()[:3], mask_b, *mask_BxLS.stride()[2:], scale, softcap or 1.0,
            J=j, G=g, D=d, P=p, SOFTCAP=bool(softcap), BLOCK_M=rows, BLOCK_N=keys, BLOCK_D=block_d,
            PRECISION="ieee" if exact else "tf32", num_warps=warps, num_stages=stages,
        )  # fmt: skip
        _merge[b * h * n,](
            part, lse, sinks_H, out, n, H=h, D=d, P=p, SINKS=sinks_H is not None, BLOCK_D=block_d, num_warps=4
        )
    return out
