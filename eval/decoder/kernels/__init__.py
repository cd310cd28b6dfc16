"""The decoder's kernels for NVIDIA GPUs, one file each, behind functions that also say in torch what they compute.

Each function runs the Triton kernel on a GPU, and torch's operators elsewhere or where the kernel does not take the
shape. None of them waits for the device.
Shapes: B rows, N tree nodes, L = N + 1 positions (the root first), V vocabulary, W draft vocab, M rows, K tokens.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from headtrain import attention
from headtrain.cache import KVCache
from headtrain.eval.decoder.sampling import Sampling, adjust, probabilities
from headtrain.eval.decoder.verify import TreeVerdict, greedy_tree, sampled_tree
from headtrain.tree import DraftTree

TRITON = importlib.util.find_spec("triton") is not None
FEW = 128  # new tokens whose attention is split over the keys; more of them fill a GPU in torch's own kernel


def install() -> None:
    """From now on a few new tokens over a cache attend by the kernel, in every target on a GPU."""
    attention.gpu_attention = _attention


def _attention(query, key, value, mask, scaling=None, softcap=None, s_aux=None) -> Tensor | None:
    """[B, L, heads, D]; None where `headtrain.attention.attention` is to go its plain way."""
    tensors = query, key, value
    if not TRITON or mask is None or mask.shape[1] != 1 or query.shape[2] > FEW:
        return None
    if query.is_cuda and query.get_device() != torch.cuda.current_device():  # of a target over several
        return None
    from headtrain.eval.decoder.kernels import triton_attention as kernel

    if max(x.shape[3] for x in tensors) > kernel.MAX_HEAD_DIM or key.shape[3] != value.shape[3]:
        return None
    if len({x.dtype for x in tensors}) > 1 or any(x.stride(3) != 1 for x in tensors):
        return None
    return kernel.tree_attention(*tensors, mask, scaling or query.shape[3] ** -0.5, softcap, s_aux)


def accept(
    logits_BLV: Tensor,
    tree: DraftTree,
    sampling: Sampling,
    accept_BN: Tensor | None = None,
    bonus_B: Tensor | None = None,
    seen_BLV: Tensor | None = None,
) -> TreeVerdict:
    """`verify.greedy_tree`, or above temperature 0 `verify.sampled_tree`, on the target's raw logits (any float dtype).

    accept_BN, bonus_B: float64 uniform numbers. seen_BLV: tokens before each position, for a repetition penalty.
    """
    nodes = tree.tokens, tree.parents, tree.counts
    on_gpu, temperature = logits_BLV.is_cuda and TRITON, sampling.temperature
    cuts = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    if sampling.greedy or (on_gpu and not cuts):
        x_BLV = logits_BLV
        if sampling.logit_bias or sampling.repetition_penalty != 1:
            x_BLV = adjust(logits_BLV, sampling, seen_BLV)
    else:
        x_BLV, temperature = probabilities(logits_BLV, sampling, seen_BLV), None
    if on_gpu:
        from headtrain.eval.decoder.kernels import triton_accept as kernel

        if sampling.greedy:
            return TreeVerdict(*kernel.greedy(x_BLV, *nodes))
        return TreeVerdict(*kernel.sampled(x_BLV, *nodes, tree.q, accept_BN, bonus_B, temperature))
    if sampling.greedy:
        return greedy_tree(x_BLV.argmax(-1), *nodes)
    return sampled_tree(x_BLV, *nodes, tree.q, accept_BN, bonus_B)


def compact(cache: KVCache, first_B: Tensor, path_BN: Tensor) -> None:
    """Moves the keys and values of accepted nodes behind the true prefix, in every layer.

    Node path_BN[b, d] (int64, ascending, -1 after the last), in slot first_B[b] + path_BN[b, d], goes to slot
    first_B[b] + d.
    """
    groups: dict[tuple, list[Tensor]] = {}
    for x in (*cache.keys.values(), *cache.values.values()):
        groups.setdefault((x.shape, x.stride(), x.dtype, x.device), []).append(x)
    for (*_, device), tensors in groups.items():
        first_B, path_BN = first_B.to(device), path_BN.to(device)
        if device.type == "cuda" and TRITON and device.index == torch.cuda.current_device():
            from headtrain.eval.decoder.kernels.triton_compact import compact as kernel

            kernel(tensors, first_B, path_BN)
            continue
        to_BN = first_B[:, None] + torch.arange(path_BN.shape[1], device=path_BN.device)
        from_BN = torch.where(path_BN < 0, to_BN, first_B[:, None] + path_BN)
        rows = torch.arange(len(path_BN), device=path_BN.device)[:, None]
        for x in tensors:
            x[rows, :, to_BN] = x[rows, :, from_BN]


def draft_topk(logits_MW: Tensor, k: int, d2t_W: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(float32 log-softmax, int64 draft ids, int64 target ids) of each row's k likeliest tokens, highest first, [M, K].

    d2t_W: int64, target id - draft id; None: the ids are the same.
    """
    if logits_MW.is_cuda and TRITON:
        from headtrain.eval.decoder.kernels import triton_topk as kernel

        if k <= kernel.MAX_K:
            return kernel.draft_topk(logits_MW, k, d2t_W)
    logits_MW = logits_MW.float()
    top_MK, ids_MK = logits_MW.topk(k, -1)
    return top_MK - logits_MW.logsumexp(-1, keepdim=True), ids_MK, ids_MK if d2t_W is None else ids_MK + d2t_W[ids_MK]
