"""Attention for every family of targets in one function, registered in transformers as `headtrain`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

gpu_attention: Callable | None = None  # the decoder's kernel for few queries over a long cache, once it is installed
UNKNOWN_ARGUMENTS = ("indices", "block_indices", "position_bias", "sinks")  # change the result; not understood below


def attention(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **more):
    """Attention over [B, heads, L, D] queries and [B, J, S, D] keys, grouped, in torch's fused kernel where it can.

    Soft-capped scores (Gemma 2) and attention sinks (gpt-oss) take a plain path. Registered in transformers as
    `headtrain`, so that one function serves every family and no key is copied per query head. Windows come in the
    mask. ValueError for an argument of a family's attention that it would have to ignore.
    """
    if ignored := [name for name in UNKNOWN_ARGUMENTS if more.get(name) is not None]:
        raise ValueError(f"{type(module).__name__} passes {ignored[0]!r}, which headtrain's attention does not know")
    if gpu_attention is not None and query.is_cuda:
        out = gpu_attention(query, key, value, attention_mask, scaling, softcap, s_aux)
        if out is not None:
            return out, None
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    if softcap is None and s_aux is None:
        if groups > 1 and length <= 16:  # a few new tokens: the query heads of one key head stand as more queries
            query = query.unflatten(1, (-1, groups)).flatten(2, 3)
            if attention_mask is not None:
                attention_mask = attention_mask.repeat(1, 1, groups, 1)
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        if out.shape[2] != length:
            out = out.unflatten(2, (groups, length)).flatten(1, 2)
        return out.transpose(1, 2).contiguous(), None
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3)).float() * (scaling or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("headtrain", attention)
    AttentionMaskInterface.register("headtrain", eager_mask)  # where transformers itself calls the model
