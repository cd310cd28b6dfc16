"""Depth attention as Triton kernels, for GPUs: one launch over the rows of all documents, forward and backward.

What `layers.depth_attention` computes: row m sees the depth-0 keys of slots document_M[m] … slot_M[m], and of each
later depth the one key of its own slot (a "diagonal"). Memory is linear in the length. Nothing is added atomically, so
equal inputs give equal bits. Sums are float32; float32 products are exact unless torch's matmul precision allows TF32.

Shapes: M rows, N packed positions, G query heads per key head, J key heads, D head size, S diagonals. In the kernels a
tile of rows is [M, D], a tile of keys [N, D], query head h = j G + g, and `lse` and `delta` are float32 [J G, M].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

MAX_HEAD_DIM = 256  # larger ones outgrow the registers: the plain path is for them


@triton.jit
def _load(x, at_L, stride, head, real_L, D: tl.constexpr):
    """[L, D]: the rows at_L of one head of x [..., heads, D]; zeros where not real_L."""
    at_LD = at_L.to(tl.int64)[:, None] * stride + head * D + tl.arange(0, D)[None, :]
    return tl.load(x + at_LD, mask=real_L[:, None], other=0.0)


@triton.jit
def _store(x, value_LD, at_L, stride, head, real_L, D: tl.constexpr):
    at_LD = at_L.to(tl.int64)[:, None] * stride + head * D + tl.arange(0, D)[None, :]
    tl.store(x + at_LD, value_LD.to(x.dtype.element_ty), mask=real_L[:, None])


@triton.jit(do_not_specialize=["rows", "diagonals"])  # they change from batch to batch
def _forward(
    q, k, v, diagonal_k, diagonal_v, slot, document, out, lse,
    rows, diagonals, q_stride, k_stride, v_stride, scale_log2,
    J: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`out`, and `lse` in base 2, of a tile of rows and a query head; late tiles (the longest) start first."""
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real_M = row_M < rows
    slot_M = tl.load(slot + row_M, mask=real_M, other=-1)
    document_M = tl.load(document + row_M, mask=real_M, other=2**31 - 1)
    q_MD = _load(q, row_M, q_stride, head, real_M, D)
    max_M = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: a row may see none of the first keys of its tile
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    out_MD = tl.zeros([BLOCK_M, D], tl.float32)
    for diagonal in range(diagonals):
        k_MD = _load(diagonal_k, diagonal * rows + row_M, J * D, head // G, real_M, D).to(tl.float32)
        v_MD = _load(diagonal_v, diagonal * rows + row_M, J * D, head // G, real_M, D).to(tl.float32)
        score_M = tl.sum(q_MD.to(tl.float32) * k_MD, 1) * scale_log2
        new_M = tl.maximum(max_M, score_M)
        p_M, shrink_M = tl.exp2(score_M - new_M), tl.exp2(max_M - new_M)
        sum_M = sum_M * shrink_M + p_M
        out_MD = out_MD * shrink_M[:, None] + p_M[:, None] * v_MD
        max_M = new_M
    stop = tl.max(slot_M, 0) + 1
    for start in range(tl.min(document_M, 0), stop, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        k_ND = _load(k, key_N, k_stride, head // G, key_N < stop, D)
        v_ND = _load(v, key_N, v_stride, head // G, key_N < stop, D)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale_log2
        seen_MN = (key_N[None, :] <= slot_M[:, None]) & (key_N[None, :] >= document_M[:, None])
        score_MN = tl.where(seen_MN, score_MN, -float("inf"))
        new_M = tl.maximum(max_M, tl.max(score_MN, 1))
        p_MN, shrink_M = tl.exp2(score_MN - new_M[:, None]), tl.exp2(max_M - new_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
        out_MD = out_MD * shrink_M[:, None] + tl.dot(p_MN.to(v_ND.dtype), v_ND, input_precision=PRECISION)
        max_M = new_M
    _store(out, out_MD / sum_M[:, None], row_M, J * G * D, head, real_M, D)
    tl.store(lse + head * rows + row_M, max_M + tl.log2(sum_M), mask=real_M)


@triton.jit(do_not_specialize=["rows", "diagonals"])
def _backward_rows(
    q, k, v, diagonal_k, diagonal_v, slot, document, out, lse, grad, dq, delta,
    rows, diagonals, q_stride, k_stride, v_stride, grad_stride, scale, scale_log2,
    J: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dq`, and `delta` = Σ_D grad · out, of a tile of rows and a query head."""
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real_M = row_M < rows
    slot_M = tl.load(slot + row_M, mask=real_M, other=-1)
    document_M = tl.load(document + row_M, mask=real_M, other=2**31 - 1)
    q_MD = _load(q, row_M, q_stride, head, real_M, D)
    grad_MD = _load(grad, row_M, grad_stride, head, real_M, D)
    out_MD = _load(out, row_M, J * G * D, head, real_M, D)
    lse_M = tl.load(lse + head * rows + row_M, mask=real_M, other=0.0)
    delta_M = tl.sum(grad_MD.to(tl.float32) * out_MD.to(tl.float32), 1)
    tl.store(delta + head * rows + row_M, delta_M, mask=real_M)
    dq_MD = tl.zeros([BLOCK_M, D], tl.float32)
    for diagonal in range(diagonals):
        k_MD = _load(diagonal_k, diagonal * rows + row_M, J * D, head // G, real_M, D).to(tl.float32)
        v_MD = _load(diagonal_v, diagonal * rows + row_M, J * D, head // G, real_M, D).to(tl.float32)
        p_M = tl.exp2(tl.sum(q_MD.to(tl.float32) * k_MD, 1) * scale_log2 - lse_M)
        ds_M = p_M * (tl.sum(grad_MD.to(tl.float32) * v_MD, 1) - delta_M)
        dq_MD += ds_M[:, None] * k_MD
    stop = tl.max(slot_M, 0) + 1
    for start in range(tl.min(document_M, 0), stop, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        k_ND = _load(k, key_N, k_stride, head // G, key_N < stop, D)
        v_ND = _load(v, key_N, v_stride, head // G, key_N < stop, D)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale_log2
        seen_MN = (key_N[None, :] <= slot_M[:, None]) & (key_N[None, :] >= document_M[:, None])
        p_MN = tl.where(seen_MN, tl.exp2(score_MN - lse_M[:, None]), 0.0)
        dp_MN = tl.dot(grad_MD, tl.trans(v_ND), input_precision=PRECISION)
        ds_MN = p_MN * (dp_MN - delta_M[:, None])
        dq_MD += tl.dot(ds_MN.to(k_ND.dtype), k_ND, input_precision=PRECISION)
    _store(dq, dq_MD * scale, row_M, J * G * D, head, real_M, D)


@triton.jit(do_not_specialize=["rows", "keys"])
def _backward_keys(
    q, k, v, slot, document, lse, grad, delta, first, last, dk, dv,
    rows, keys, q_stride, k_stride, v_stride, grad_stride, scale, scale_log2,
    J: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dk` and `dv` of a tile of depth-0 keys and a key head; rows first[tile] … last[tile] - 1 may see it."""
    j, tile = tl.program_id(0), tl.program_id(1)
    key_N = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k_ND = _load(k, key_N, k_stride, j, key_N < keys, D)
    v_ND = _load(v, key_N, v_stride, j, key_N < keys, D)
    dk_ND = tl.zeros([BLOCK_N, D], tl.float32)
    dv_ND = tl.zeros([BLOCK_N, D], tl.float32)
    begin, stop = tl.load(first + tile), tl.load(last + tile)
    for head in range(j * G, j * G + G):
        for start in range(begin, stop, BLOCK_M):
            row_M = start + tl.arange(0, BLOCK_M)
            real_M = row_M < stop
            slot_M = tl.load(slot + row_M, mask=real_M, other=-1)
            document_M = tl.load(document + row_M, mask=real_M, other=0)
            q_MD = _load(q, row_M, q_stride, head, real_M, D)
            grad_MD = _load(grad, row_M, grad_stride, head, real_M, D)
            lse_M = tl.load(lse + head * rows + row_M, mask=real_M, other=0.0)
            delta_M = tl.load(delta + head * rows + row_M, mask=real_M, other=0.0)
            score_NM = tl.dot(k_ND, tl.trans(q_MD), input_precision=PRECISION) * scale_log2
            seen_NM = (key_N[:, None] <= slot_M[None, :]) & (key_N[:, None] >= document_M[None, :])
            p_NM = tl.where(seen_NM, tl.exp2(score_NM - lse_M[None, :]), 0.0)
            dv_ND += tl.dot(p_NM.to(grad_MD.dtype), grad_MD, input_precision=PRECISION)
            dp_NM = tl.dot(v_ND, tl.trans(grad_MD), input_precision=PRECISION)
            ds_NM = p_NM * (dp_NM - delta_M[None, :])
            dk_ND += tl.dot(ds_NM.to(q_MD.dtype), q_MD, input_precision=PRECISION)
    _store(dk, dk_ND * scale, key_N, J * D, j, key_N < keys, D)
    _store(dv, dv_ND, key_N, J * D, j, key_N < keys, D)


@triton.jit(do_not_specialize=["rows", "diagonals"])
def _backward_diagonals(
    q, diagonal_k, diagonal_v, lse, grad, delta, dk, dv,
    rows, diagonals, q_stride, grad_stride, scale, scale_log2,
    J: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """`dk` and `dv` of the diagonals of a tile of rows and a key head."""
    j, tile = tl.program_id(0), tl.program_id(1)
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real_M = row_M < rows
    for diagonal in range(diagonals):
        at_M = diagonal * rows + row_M
        k_MD = _load(diagonal_k, at_M, J * D, j, real_M, D).to(tl.float32)
        v_MD = _load(diagonal_v, at_M, J * D, j, real_M, D).to(tl.float32)
        dk_MD = tl.zeros([BLOCK_M, D], tl.float32)
        dv_MD = tl.zeros([BLOCK_M, D], tl.float32)
        for head in range(j * G, j * G + G):
            q_MD = _load(q, row_M, q_stride, head, real_M, D).to(tl.float32)
            grad_MD = _load(grad, row_M, grad_stride, head, real_M, D).to(tl.float32)
            lse_M = tl.load(lse + head * rows + row_M, mask=real_M, other=0.0)
            delta_M = tl.load(delta + head * rows + row_M, mask=real_M, other=0.0)
            p_M = tl.exp2(tl.sum(q_MD * k_MD, 1) * scale_log2 - lse_M)
            ds_M = p_M * (tl.sum(grad_MD * v_MD, 1) - delta_M)
            dk_MD += ds_M[:, None] * q_MD
            dv_MD += p_M[:, None] * grad_MD
        _store(dk, dk_MD * scale, at_M, J * D, j, real_M, D)
        _store(dv, dv_MD, at_M, J * D, j, real_M, D)


# (rows, keys, warps, stages) of a program that owns rows, and of one that owns keys, by (float32, D > 128): the first
# that the GPU's shared memory holds is used. The last fits every GPU of compute capability 8.0 or more. Exact float32
# products use no tensor cores and many registers, hence small tiles.
_TILES = {
    (False, False): (((128, 64, 8, 3), (64, 64, 4, 2)), ((64, 128, 8, 2), (32, 64, 4, 2))),
    (False, True): (((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)), ((64, 64, 8, 2), (32, 32, 4, 2))),
    (True, False): (((32, 32, 4, 2),), ((32, 32, 4, 2),)),
    (True, True): (((16, 16, 4, 1),), ((16, 16, 4, 1),)),
}


def _launch(run: Callable[[int, int, int, int], None], q: Tensor, own_keys: bool) -> None:
    """run(rows, keys, warps, stages) with the first tiles that the GPU has room for."""
    *others, last = _TILES[q.dtype == torch.float32, q.shape[-1] > 128][own_keys]
    for tile in others:
        try:
            return run(*tile)
        except OutOfResources:
            continue
    run(*last)


def _dense(x: Tensor) -> Tensor:
    """x [L, heads, D] with heads and D contiguous; rows may be further apart, as in a slice of a joint projection."""
    return x if x.stride()[1:] == (x.shape[-1], 1) else x.contiguous()


class _DepthAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scale, slot_M, document_M, q_MHD, k_NJD, v_NJD, diagonal_k_SMJD, diagonal_v_SMJD):
        (m, h, d), j, s = q_MHD.shape, k_NJD.shape[1], len(diagonal_k_SMJD)
        q_MHD, k_NJD, v_NJD = _dense(q_MHD), _dense(k_NJD), _dense(v_NJD)
        precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
        ctx.numbers = {"J": j, "G": h // j, "D": d, "PRECISION": precision}
        ctx.scale = scale
        out_MHD, lse_HM = q_MHD.new_empty(m, h, d), q_MHD.new_empty(h, m, dtype=torch.float32)

        def run(rows, keys, warps, stages):
            _forward[h, triton.cdiv(m, rows)](
                q_MHD, k_NJD, v_NJD, diagonal_k_SMJD, diagonal_v_SMJD, slot_M, document_M, out_MHD, lse_HM,
                m, s, q_MHD.stride(0), k_NJD.stride(0), v_NJD.stride(0), scale / math.log(2),
                BLOCK_M=rows, BLOCK_N=keys, num_warps=warps, num_stages=stages, **ctx.numbers,
            )  # fmt: skip

        with torch.cuda.device_of(q_MHD):
            _launch(run, q_MHD, own_keys=False)
        ctx.save_for_backward(
            slot_M, document_M, q_MHD, k_NJD, v_NJD, diagonal_k_SMJD, diagonal_v_SMJD, out_MHD, lse_HM
        )
        return out_MHD

    @staticmethod
    def backward(ctx, grad_MHD):
        slot_M, document_M, q_MHD, k_NJD, v_NJD, diagonal_k_SMJD, diagonal_v_SMJD, out_MHD, lse_HM = ctx.saved_tensors
        (m, h, d), (n, j, _), s = q_MHD.shape, k_NJD.shape, len(diagonal_k_SMJD)
        grad_MHD = _dense(grad_MHD)
        delta_HM = torch.empty_like(lse_HM)
        dq_MHD, dk_NJD, dv_NJD = q_MHD.new_empty(m, h, d), k_NJD.new_empty(n, j, d), v_NJD.new_empty(n, j, d)
        ddk_SMJD, ddv_SMJD = torch.empty_like(diagonal_k_SMJD), torch.empty_like(diagonal_v_SMJD)
        q_stride, k_stride, v_stride, grad_stride = (x.stride(0) for x in (q_MHD, k_NJD, v_NJD, grad_MHD))
        scales = ctx.scale, ctx.scale / math.log(2)

        def run_rows(rows, keys, warps, stages):
            _backward_rows[h, triton.cdiv(m, rows)](
                q_MHD, k_NJD, v_NJD, diagonal_k_SMJD, diagonal_v_SMJD, slot_M, document_M, out_MHD, lse_HM, grad_MHD,
                dq_MHD, delta_HM, m, s, q_stride, k_stride, v_stride, grad_stride, *scales,
                BLOCK_M=rows, BLOCK_N=keys, num_warps=warps, num_stages=stages, **ctx.numbers,
            )  # fmt: skip

        def run_keys(rows, keys, warps, stages):
            start_T = torch.arange(0, n, keys, dtype=torch.int32, device=slot_M.device)
            first_T = torch.searchsorted(slot_M, start_T, out_int32=True)
            last_T = torch.searchsorted(document_M, start_T + keys, out_int32=True)
            _backward_keys[j, len(start_T)](
                q_MHD, k_NJD, v_NJD, slot_M, document_M, lse_HM, grad_MHD, delta_HM, first_T, last_T, dk_NJD, dv_NJD,
                m, n, q_stride, k_stride, v_stride, grad_stride, *scales,
                BLOCK_M=rows, BLOCK_N=keys, num_warps=warps, num_stages=stages, **ctx.numbers,
            )  # fmt: skip

        with torch.cuda.device_of(q_MHD):
            _launch(run_rows, q_MHD, own_keys=False)
            _launch(run_keys, q_MHD, own_keys=True)
            rows = max(16, 4096 // d)
            _backward_diagonals[j, triton.cdiv(m, rows)](
                q_MHD, diagonal_k_SMJD, diagonal_v_SMJD, lse_HM, grad_MHD, delta_HM, ddk_SMJD, ddv_SMJD,
                m, s, q_stride, grad_stride, *scales, J=j, G=h // j, D=d, BLOCK_M=rows,
            )  # fmt: skip
        return None, None, None, dq_MHD, dk_NJD, dv_NJD, ddk_SMJD, ddv_SMJD


def depth_attention_triton(
    q_MGJD: Tensor,
    k_NJD: Tensor,
    v_NJD: Tensor,
    diagonals: list[tuple[Tensor, Tensor]],
    slot_M: Tensor,
    document_M: Tensor,
    scale: float,
) -> Tensor:
    """Attention of one unroll depth, [M, G, J, D] in q's dtype: float32, bfloat16 or float16, the same for all.

    Row m sees keys document_M[m] … slot_M[m] (integers; document_M[m] is the first slot of its document) and its own
    row of every pair (k, v), each [M, J, D], of `diagonals`. Both vectors must ascend, which is not checked; slots may
    be left out. A head size that is no power of two is padded with zeros; above 256 is a ValueError.
    """
    d, j = q_MGJD.shape[-1], k_NJD.shape[1]
    if d > MAX_HEAD_DIM:
        raise ValueError(f"the Triton kernel takes head sizes up to {MAX_HEAD_DIM}, not {d}: use the plain path")
    if not len(q_MGJD):
        return q_MGJD  # no rows
    pairs = [torch.stack(x) for x in zip(*diagonals, strict=True)] or [k_NJD.new_empty(0, 1, j, d)] * 2
    tensors = [q_MGJD.transpose(1, 2).flatten(1, 2), k_NJD, v_NJD, *pairs]
    if extra := max(16, triton.next_power_of_2(d)) - d:
        tensors = [F.pad(x, (0, extra)) for x in tensors]
    out_MHD = _DepthAttention.apply(scale, slot_M.int().contiguous(), document_M.int().contiguous(), *tensors)
    return out_MHD[..., :d].unflatten(1, (j, -1)).transpose(1, 2)
