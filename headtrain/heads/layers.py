"""Building blocks of heads: rope, a decoder layer, and the two fused steps that make the unrolled training cheap.

`depth_attention`: attention of one unroll depth in memory linear in the length. `fused_loss`: lm_head + objective on
the trained rows only, in chunks, with the gradients computed in the forward: no [rows, vocabulary] tensor survives.

Shapes: N packed positions, M active rows of one depth, G query heads per key head, J key heads, D head size, H hidden,
V draft vocabulary, T target hidden.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtrain.heads.base import HeadConfig
from headtrain.heads.objectives import Rows

# ---------------------------------------------------------------------------------------------------- rope


def rope_inverse_frequencies(rope: dict[str, Any], head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """(inverse frequencies float32 [D/2], attention scaling) of a rope description, by transformers' own rules."""
    if rope.get("rope_type", "default") == "default":
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / rope["rope_theta"] ** steps, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=max_positions, rope_parameters=dict(rope))
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=None)


def rope_tables(inverse: Tensor, scaling: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [..., D], of integer positions [...]."""
    angles = positions[..., None].float() * inverse
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * scaling, angles.sin() * scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rope to x [..., heads, D] with tables [..., D]; computed in float32, returned in x's dtype."""
    x1, x2 = x.chunk(2, -1)
    turned = torch.cat([-x2, x1], -1)
    return (x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(x.dtype)


# ---------------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Segment:
    """Slots [first, stop) of one supervised span; they also see the slots of their document from `document` on."""

    document: int
    first: int
    stop: int


def _plain_block(q, k, v, causal, scale):
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse


def _plain_block_backward(grad, q, k, v, out, lse, causal, scale):
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
    p = (scores - lse[..., None]).exp()
    dp = (grad @ v.transpose(-1, -2)).float() - (grad.float() * out.float()).sum(-1, keepdim=True)
    ds = (p * dp * scale).to(q.dtype)
    return ds @ k, ds.transpose(-1, -2) @ q, p.to(v.dtype).transpose(-1, -2) @ grad


LONG = 1024  # rows from which torch's bfloat16 backward on a CPU beats float32: short ones take it up to 5x as long


def _flash_block(q, k, v, causal, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _flash_block_backward(grad, q, k, v, out, lse, causal, scale):
    if q.shape[-2] < LONG:
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )


def _blocks(device: torch.device):
    return (_flash_block, _flash_block_backward) if device.type == "cpu" else (_plain_block, _plain_block_backward)


def _key_ranges(segment: Segment):
    """(keys, causal) of a segment: what lies before it, seen whole, and the segment itself, seen causally."""
    if segment.document < segment.first:
        yield slice(segment.document, segment.first), False
    yield slice(segment.first, segment.stop), True


class _DepthAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, segments, scale, q_MGJD, k_NJD, v_NJD, *diagonals):
        block, _ = _blocks(q_MGJD.device)
        out_MGJD = torch.empty_like(q_MGJD)
        lse_MGJ = q_MGJD.new_empty(q_MGJD.shape[:3], dtype=torch.float32)
        at = 0
        for segment in segments:
            rows = slice(at, at + segment.stop - segment.first)
            at = rows.stop
            q = q_MGJD[rows].permute(1, 2, 0, 3)  # [G, J, L, D]
            parts = [
                block(q, *_heads(k_NJD, v_NJD, keys, len(q)), causal, scale)[:2]
                for keys, causal in _key_ranges(segment)
            ]
            out, lse = parts[-1]
            if len(parts) == 2:
                lse = torch.logaddexp(parts[0][1], parts[1][1])
                out = sum((o.float() * (part - lse).exp()[..., None]) for o, part in parts)
            out_MGJD[rows] = out.permute(2, 0, 1, 3)
            lse_MGJ[rows] = lse.permute(2, 0, 1)
        if diagonals:
            scores = [(q_MGJD * k[:, None]).sum(-1).float() * scale for k in diagonals[0::2]]
            merged = torch.logsumexp(torch.stack([lse_MGJ, *scores]), 0)
            out = out_MGJD.float() * (lse_MGJ - merged).exp()[..., None]
            for score, v in zip(scores, diagonals[1::2], strict=True):
                out += (score - merged).exp()[..., None] * v[:, None]
            out_MGJD, lse_MGJ = out.to(q_MGJD.dtype), merged
        ctx.segments, ctx.scale = segments, scale
        ctx.save_for_backward(q_MGJD, k_NJD, v_NJD, out_MGJD, lse_MGJ, *diagonals)
        return out_MGJD

    @staticmethod
    def backward(ctx, grad_MGJD):
        q_MGJD, k_NJD, v_NJD, out_MGJD, lse_MGJ, *diagonals = ctx.saved_tensors
        _, block_backward = _blocks(q_MGJD.device)
        scale, at = ctx.scale, 0
        dq, dk, dv = (
            torch.zeros_like(q_MGJD, dtype=torch.float32),
            *(torch.zeros_like(x, dtype=torch.float32) for x in (k_NJD, v_NJD)),
        )
        for segment in ctx.segments:
            rows = slice(at, at + segment.stop - segment.first)
            at = rows.stop
            grad, q, out = (x[rows].permute(1, 2, 0, 3) for x in (grad_MGJD, q_MGJD, out_MGJD))
            lse = lse_MGJ[rows].permute(1, 2, 0).contiguous()
            for keys, causal in _key_ranges(segment):
                k, v = _heads(k_NJD, v_NJD, keys, len(q))
                dq_part, dk_part, dv_part = block_backward(grad, q, k, v, out, lse, causal, scale)
                dq[rows] += dq_part.permute(2, 0, 1, 3)
                dk[keys] += dk_part.sum(0).transpose(0, 1)  # over the query heads that share a key head
                dv[keys] += dv_part.sum(0).transpose(0, 1)
        extra = []
        if diagonals:
            grad = grad_MGJD.float()
            delta = (grad * out_MGJD).sum(-1)
            for k, v in zip(diagonals[0::2], diagonals[1::2], strict=True):
                p = ((q_MGJD * k[:, None]).sum(-1).float() * scale - lse_MGJ).exp()
                ds = p * ((grad * v[:, None]).sum(-1) - delta) * scale
                dq += ds[..., None] * k[:, None]
                extra += [(ds[..., None] * q_MGJD).sum(1).to(k.dtype), (p[..., None] * grad).sum(1).to(v.dtype)]
        return None, None, dq.to(q_MGJD.dtype), dk.to(k_NJD.dtype), dv.to(v_NJD.dtype), *extra


def _heads(k_NJD: Tensor, v_NJD: Tensor, keys: slice, groups: int) -> tuple[Tensor, Tensor]:
    return tuple(x[keys].transpose(0, 1).expand(groups, -1, -1, -1) for x in (k_NJD, v_NJD))


def depth_attention(
    q_MGJD: Tensor,
    k_NJD: Tensor,
    v_NJD: Tensor,
    diagonals: list[tuple[Tensor, Tensor]],
    segments: list[Segment],
    scale: float,
) -> Tensor:
    """Attention of one unroll depth, exact, in memory linear in the length.

    The M rows are the slots of `segments`, one after another. A row sees the depth-0 keys of its document up to its own
    slot, and of each later depth only the key of its own slot (`diagonals`, a (k, v) pair [M, J, D] per depth). The
    block runs through a flash kernel; the diagonal terms are merged into it by log-sum-exp. Returns [M, G, J, D].
    On a GPU it is one Triton kernel, where `_kernel` has one and the head size fits.
    """
    if q_MGJD.is_cuda and (kernel := _kernel(q_MGJD.device)) and q_MGJD.shape[-1] <= kernel.MAX_HEAD_DIM:
        document_M, slot_M = _per_row(segments, q_MGJD.device)
        return kernel.depth_attention_triton(q_MGJD, k_NJD, v_NJD, diagonals, slot_M, document_M, scale)
    return _DepthAttention.apply(segments, scale, q_MGJD, k_NJD, v_NJD, *[x for pair in diagonals for x in pair])


@functools.cache
def _kernel(device: torch.device) -> Any:
    """The Triton module; None where it is not installed, or the GPU is older than compute capability 8.0."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    from headtrain.heads import triton_attention

    return triton_attention


def _per_row(segments: list[Segment], device: torch.device) -> tuple[Tensor, Tensor]:
    """(first slot of its document, slot) of every row, int32 [M]."""
    document, first, length = torch.tensor([(s.document, s.first, s.stop - s.first) for s in segments]).T
    start = length.cumsum(0) - length
    slot = torch.arange(int(length.sum())) + (first - start).repeat_interleave(length)
    return tuple(x.int().to(device, non_blocking=True) for x in (document.repeat_interleave(length), slot))


# ---------------------------------------------------------------------------------------------------- loss


@dataclass
class Pairs:
    """M trained pairs: slot and depth of each, and the draft id of its label, all int64 [M]."""

    slot_M: Tensor
    depth_M: Tensor
    label_M: Tensor


@dataclass
class Teacher:
    """What teaches: the target's last hidden [N, T] and full-vocabulary logsumexp [N] (float32), and its lm_head's
    rows of the draft vocabulary [V, T]."""

    last_NT: Tensor
    lse_N: Tensor
    lm_head_VT: Tensor
    logit_scale: float = 1.0
    softcap: float | None = None  # the target's logits x are softcap · tanh(x / softcap)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, objective, weights, scale_D, chunk, pairs: Pairs, teacher: Teacher, x_MH, lm_head_VH):
        needs_x, needs_w = ctx.needs_input_grad[-2:]
        depths = len(scale_D)
        dx = torch.empty_like(x_MH) if needs_x else None
        dw = torch.zeros(lm_head_VH.shape, dtype=torch.float32, device=x_MH.device) if needs_w else None
        loss_M = torch.empty(len(x_MH), dtype=torch.float32, device=x_MH.device)
        hit_M, total = torch.empty_like(loss_M, dtype=torch.bool), loss_M.new_zeros(())
        order = torch.argsort(pairs.slot_M * depths + pairs.depth_M)
        _, chain_M = torch.unique_consecutive(pairs.slot_M[order], return_inverse=True)
        for index, chain in _whole_chains(order, chain_M, max(1, chunk // depths)):
            taught_at = pairs.slot_M[index] + 1 + pairs.depth_M[index]
            positions, which = torch.unique(taught_at, return_inverse=True)
            logits_UV = (teacher.last_NT[positions] @ teacher.lm_head_VT.T).float() * teacher.logit_scale
            if teacher.softcap:
                logits_UV = torch.tanh(logits_UV / teacher.softcap) * teacher.softcap
            place = (chain, pairs.depth_M[index])

            def weigh(chosen, hit, place=place):
                shape = (int(place[0][-1]) + 1, depths)
                chosen_CD = chosen.new_zeros(shape).index_put_(place, chosen)
                hit_CD = hit.new_zeros(shape).index_put_(place, hit)
                return (weights(chosen_CD, hit_CD) * scale_D)[place]

            rows = Rows(x_MH[index], which, pairs.label_M[index], teacher.lse_N[positions], weigh)
            graded = objective(rows, lm_head_VH, logits_UV, needs_x=needs_x, needs_w=needs_w)
            loss_M.index_copy_(0, index, graded.loss)
            hit_M.index_copy_(0, index, graded.hit)
            total += (graded.loss * graded.weight).sum()
            if needs_x:
                dx.index_copy_(0, index, graded.dx)
            if needs_w:
                dw += graded.dw
        ctx.save_for_backward(dx, None if dw is None else dw.to(lm_head_VH.dtype))
        ctx.mark_non_differentiable(loss_M, hit_M)
        return total, loss_M, hit_M

    @staticmethod
    def backward(ctx, grad, *_):
        dx, dw = ctx.saved_tensors
        return *[None] * 6, None if dx is None else dx * grad, None if dw is None else dw * grad


def _whole_chains(order: Tensor, chain_M: Tensor, chains: int):
    """Chunks of rows, so many chains each: (their indices, their chain's number in the chunk)."""
    count = int(chain_M[-1]) + 1
    edges = torch.searchsorted(chain_M, torch.arange(0, count + chains, chains, device=chain_M.device)).tolist()
    for number, (a, b) in enumerate(pairwise(edges)):
        if b > a:
            yield order[a:b], chain_M[a:b] - number * chains


def pairs_at_once(vocab: int, device: torch.device) -> int:
    """1,024; on a CPU fewer where their logits would take more than 128 MB in float32.

    A GPU has the memory, and would spend more time adding up lm_head's gradient than on the products of small chunks.
    """
    return 1024 if device.type != "cpu" else max(64, min(1024, (1 << 25) // vocab))


def fused_loss(
    objective,
    weights,
    scale_D: Tensor,
    x_MH: Tensor,
    lm_head_VH: Tensor,
    pairs: Pairs,
    teacher: Teacher,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ weight · objective over M pairs, without ever holding their logits: (loss, loss per pair [M], hit bool [M]).

    x_MH: hidden after the head's norm. objective: of headtrain/heads/objectives.py, over one chunk of whole chains; a
    pair's weight is weights(chosen [C, D], hit [C, D]) at its chain and depth, times scale_D (float32 [D]). The
    gradients are made in the forward, chunk by chunk of about so many pairs (None: what suits vocabulary and device).
    """
    chunk = chunk or pairs_at_once(len(lm_head_VH), x_MH.device)
    return _FusedLoss.apply(objective, weights, scale_D, chunk, pairs, teacher, x_MH, lm_head_VH)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


# ---------------------------------------------------------------------------------------------------- the layer


class DecoderLayer(nn.Module):
    """Parameters of a decoder layer without biases, under the names engines load.

    inputs: width of what the query, key and value projections read. norms: names of the layer's RMS norms.
    """

    def __init__(self, c: HeadConfig, inputs: int, norms: tuple[str, ...]):
        super().__init__()
        h, i = c.hidden_size, c.intermediate_size
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.eps = c.rms_norm_eps
        self.self_attn = _linears(q_proj=(inputs, q), k_proj=(inputs, kv), v_proj=(inputs, kv), o_proj=(q, h))
        self.mlp = _linears(gate_proj=(h, i), up_proj=(h, i), down_proj=(i, h))
        for name in norms:
            setattr(self, name, nn.Module())
            getattr(self, name).weight = nn.Parameter(torch.ones(h))

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of inputs [..., inputs], one after another: [..., (G J + 2 J) D]."""
        return torch.cat([self.self_attn[f"{name}_proj"](x) for name in "qkv"], -1)

    def stacked(self) -> Tensor:
        """The weight of `project`, [(G J + 2 J) D, inputs]."""
        return torch.cat([self.self_attn[f"{name}_proj"].weight for name in "qkv"])

    def rest(self, residual: Tensor, attended_GJD: Tensor) -> Tensor:
        """The residual stream [..., H] after the layer, from the one before and what attention gave [..., G, J, D]."""
        x = residual + self.self_attn["o_proj"](attended_GJD.transpose(-2, -3).flatten(-3))
        inner = rms_norm(x, self.post_attention_layernorm.weight, self.eps)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](inner)) * self.mlp["up_proj"](inner))


def _linears(**sizes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
