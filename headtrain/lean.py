"""The blocks of a llama-like target in few operations, for CPUs, where much of a decoding step is overhead.

q, k and v are one product, gate and up another, all with packed weights; what depends on positions and masks is made
once per forward, not per block. The same function as the model's own up to rounding, which a probe confirms at load.
Shapes: B rows, L new tokens, S visible slots, H hidden, N query heads, J key heads, G = N / J, D head size, A taps.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtrain.cache import KVCache
from headtrain.packed import Product, can_pack, frozen_product, pack_linears
from headtrain.target import Target, TargetStates

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
FEW = 16  # up to so many new tokens, the query heads of one key head stand as more queries of it


def speed_up(target: Target) -> None:
    """Packs the linear layers of a target on a CPU and, where it can, lets it run by the lean forward.

    See pack_linears for what that costs in memory.
    """
    if target.device.type != "cpu" or target.lean is not None:
        return
    reason = unsuited(target)
    if reason is None:
        probe = {"tokens_BL": torch.arange(1, 9)[None] % target.vocab_size, "taps": (target.num_layers,)}
        own, target.lean = target.forward(**probe), Lean(target)
        ours = target.forward(**probe)
        pairs = ((ours.last_BLH, own.last_BLH), (ours.taps_BLAH, own.taps_BLAH))
        gap = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        if gap > (1e-3 if target.dtype == torch.float32 else 0.06):  # rounding alone makes 1e-4 of SmolLM2
            target.lean, reason = None, f"the lean one is off by {gap:.2g} of the largest value"
    if reason is not None:
        logging.getLogger(__name__).info("%s runs by its own forward: %s", target.name, reason)
    pack_linears(target.model if target.lean is None else target.lm_head)


def unsuited(target: Target) -> str | None:
    """Why a target cannot run by the lean forward; None where it can."""
    if target.config.model_type not in FAMILIES:
        return f"family {target.config.model_type} is not one of {', '.join(FAMILIES)}"
    linears = [layer for block in target.layers for layer in block.modules() if not list(layer.children())]
    linears = [layer for layer in linears if getattr(layer, "weight", None) is not None and layer.weight.dim() == 2]
    if len(linears) != 7 * target.num_layers or not all(type(x) is nn.Linear and can_pack(x.weight) for x in linears):
        return "its blocks are not made of seven linear layers each, in fp32 or bf16"
    return None


class _Block:
    """One block's weights; the linear layers of the model become views of the fused ones."""

    def __init__(self, layer: nn.Module):
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = _fused(attention.o_proj)
        self.gate_up, self.down = _fused(mlp.gate_proj, mlp.up_proj), _fused(mlp.down_proj)
        self.activation = mlp.act_fn
        self.before_attention, self.before_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.index, self.scaling, self.head_dim = attention.layer_idx, attention.scaling, attention.head_dim
        self.roped = bool(getattr(attention, "use_rope", True))  # SmolLM3 leaves some blocks without


def _fused(*layers: nn.Linear) -> Product:
    biases = [layer.bias for layer in layers]
    weight_OI = torch.cat([layer.weight for layer in layers])
    product = frozen_product(weight_OI, None if biases[0] is None else torch.cat(biases))
    for layer, weight in zip(layers, product.weight_OI.split([len(x.weight) for x in layers]), strict=True):
        layer.weight.data = weight
    return product


class Lean:
    """`Target.forward`'s blocks, from token ids to the final norm."""

    def __init__(self, target: Target):
        self.backbone, self.embed, self.norm = target.backbone, target.embed, target.norm
        self.blocks = [_Block(layer) for layer in target.layers]
        config = target.config
        self.kinds = getattr(config, "layer_types", None) or [""] * len(self.blocks)
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads

    def __call__(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        masks: Tensor | dict[str, Tensor],
        cache: KVCache | None,
        taps: tuple[int, ...],
    ) -> TargetStates:
        """masks: additive [B, 1, L, S], or one per layer type. Runs as many blocks as the backbone holds just now."""
        x_BLH = self.embed(tokens_BL)
        rotation = _rotation(*self.backbone.rotary_emb(x_BLH, positions_BL))
        if not isinstance(masks, dict):
            masks = dict.fromkeys(self.kinds, masks)
        seen = {kind: self._prepared(mask) for kind, mask in masks.items()}
        tapped = {}
        for block, kind, _ in zip(self.blocks, self.kinds, self.backbone.layers, strict=False):
            x_BLH = x_BLH + self._attention(
                block, _rms_norm(x_BLH, block.before_attention), rotation, seen[kind], cache
            )
            gate, up = block.gate_up(_rms_norm(x_BLH, block.before_mlp)).chunk(2, -1)
            x_BLH = x_BLH + block.down(block.activation(gate).mul_(up))
            if block.index + 1 in taps:
                tapped[block.index + 1] = x_BLH
        return TargetStates(_rms_norm(x_BLH, self.norm), torch.stack([tapped[k] for k in taps], 2) if taps else None)

    def _prepared(self, mask: Tensor | None) -> Tensor | None:
        """The mask as `_attention` uses it: none where one token sees everything, repeated where heads are queries."""
        if mask is None or (mask.shape[2] == 1 and not mask.any()):
            return None
        return mask.repeat(1, 1, self.heads // self.key_heads, 1) if mask.shape[2] <= FEW else mask

    def _attention(self, block: _Block, x_BLH: Tensor, rotation, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        n, j, length = self.heads, self.key_heads, x_BLH.shape[1]
        q_BLND, k_BLJD, v_BLJD = block.qkv(x_BLH).unflatten(-1, (n + 2 * j, block.head_dim)).split([n, j, j], 2)
        if block.q_norm is not None:
            q_BLND, k_BLJD = _rms_norm(q_BLND, block.q_norm), _rms_norm(k_BLJD, block.k_norm)
        if block.roped:
            q_BLND, k_BLJD = _rotate(q_BLND, *rotation), _rotate(k_BLJD, *rotation)
        k, v = k_BLJD.transpose(1, 2), v_BLJD.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, block.index)
        if length > FEW:
            q_BNLD = q_BLND.transpose(1, 2)
            out = F.scaled_dot_product_attention(q_BNLD, k, v, mask, scale=block.scaling, enable_gqa=n != j)
            return block.output(out.transpose(1, 2).flatten(2))
        q = q_BLND.unflatten(2, (j, n // j)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, J, G L, D]
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=block.scaling)
        return block.output(out.unflatten(2, (n // j, length)).permute(0, 3, 1, 2, 4).flatten(2))


def _rotation(cos_BLD: Tensor, sin_BLD: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for all heads [B, L, 1, D], sin with the sign of the half that it is multiplied with."""
    first, second = sin_BLD.chunk(2, -1)
    return cos_BLD[:, :, None], torch.cat([-first, second], -1)[:, :, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _rms_norm(x: Tensor, norm: nn.Module) -> Tensor:
    """As transformers' RMSNorm: in fp32, rounded before the weight. torch's own is slower for a few rows."""
    wide = x.float()
    scale = (wide * wide).mean(-1, keepdim=True).add_(norm.variance_epsilon).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(norm.weight)
