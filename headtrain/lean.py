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
from headtrain.native import MULTIPLE, WIDEST, attention_kernel
from headtrain.packed import Product, can_pack, frozen_product, pack_linears
from headtrain.target import Target, TargetStates

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
FEW = 16  # up to so many new tokens, the query heads of one key head stand as more queries of it
QUERIES = 12  # up to so many of these queries, a kernel of our own does the attention
Rotation = tuple[Tensor, Tensor]  # cos and sin [B, L, 1, D], sin with the sign of the half that it is multiplied with


def speed_up(target: Target) -> None:
    """Packs the linear layers of a target on a CPU and, where it can, lets it run by the lean forward.

    See pack_linears for what that costs in memory. One whose blocks lie on several devices stays as it is.
    """
    if target.device.type != "cpu" or target.lean is not None or target.spread:
        return
    reason = unsuited(target)
    if reason is None:
        lean = Lean(target)
        gap, allowed = _gap(target, lean), 1e-4 if target.dtype == torch.float32 else 0.03
        if gap <= allowed:
            target.lean = lean
        else:
            reason = f"a block of the lean one is off by {gap:.2g} of its output (allowed {allowed})"
    if reason is not None:
        logging.getLogger(__name__).info("%s runs by its own forward: %s", target.name, reason)
    pack_linears(target.model if target.lean is None else target.lm_head)


def unsuited(target: Target) -> str | None:
    """Why a target cannot run by the lean forward; None where it can."""
    if target.config.model_type not in FAMILIES:
        return f"family {target.config.model_type} is not one of {', '.join(FAMILIES)}"
    linears = [layer for block in target.layers for layer in block.modules() if not list(layer.children())]
    linears = [layer for layer in linears if getattr(layer, "weight", None) is not None and layer.weight.dim() == 2]
    plain = [type(x) is nn.Linear and "forward" not in vars(x) and can_pack(x.weight) for x in linears]
    if len(linears) != 7 * target.num_layers or not all(plain):
        return "its blocks are not made of seven linear layers each, in fp32 or bf16"
    return None


@torch.inference_mode()
def _gap(target: Target, lean: Lean) -> float:
    """The largest distance of a block's output from the model's own, for the same input, as a share of its length.

    Block by block: through all of them mere rounding grows, in bf16 to a quarter of SmolLM2's last states.
    """
    tokens_1L, positions_1L = torch.arange(1, 9)[None] % target.vocab_size, torch.arange(8)[None]
    own = target.forward(tokens_1L, taps=tuple(range(1, target.num_layers + 1)))
    causal_1LL = torch.ones(1, 8, 8, dtype=torch.bool).tril()
    x_1LH = target.embed(tokens_1L)
    rotation, seen = lean.prepared(x_1LH, positions_1L, target._masks(causal_1LL, positions_1L, positions_1L))
    pairs = []
    for block, kind, own_1LH in zip(lean.blocks, lean.kinds, own.taps_BLAH.unbind(2), strict=True):
        pairs.append((lean.run(block, x_1LH, rotation, seen[kind], None), own_1LH))
        x_1LH = own_1LH
    pairs.append((_rms_norm(x_1LH, target.norm), own.last_BLH))
    return max(float(((a.float() - b).norm(dim=-1) / b.float().norm(dim=-1)).max()) for a, b in pairs)


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
        size = self.blocks[0].head_dim
        self.attend = None if size % MULTIPLE or size > WIDEST else attention_kernel()

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
        rotation, seen = self.prepared(x_BLH, positions_BL, masks)
        tapped = {}
        for block, kind, _ in zip(self.blocks, self.kinds, self.backbone.layers, strict=False):
            x_BLH = self.run(block, x_BLH, rotation, seen[kind], cache)
            if block.index + 1 in taps:
                tapped[block.index + 1] = x_BLH
        return TargetStates(_rms_norm(x_BLH, self.norm), torch.stack([tapped[k] for k in taps], 2) if taps else None)

    def prepared(self, x_BLH: Tensor, positions_BL: Tensor, masks: Tensor | dict[str, Tensor]) -> tuple[Rotation, dict]:
        """What all blocks share: the rotation of rope, and per layer type the mask as attention uses it."""
        cos_BLD, sin_BLD = self.backbone.rotary_emb(x_BLH, positions_BL)
        first, second = sin_BLD.chunk(2, -1)
        signed_BLD = torch.cat([-first, second], -1)
        if not isinstance(masks, dict):
            masks = dict.fromkeys(self.kinds, masks)
        return (cos_BLD[:, :, None], signed_BLD[:, :, None]), {kind: self._mask(m) for kind, m in masks.items()}

    def _mask(self, mask: Tensor | None) -> Tensor | None:
        """None where one token sees everything; fp32 [B, L, S] for the kernel; repeated where the heads are queries."""
        if mask is None or (mask.shape[2] == 1 and not mask.any()):
            return None
        if self._by_kernel(mask.shape[2]):
            return mask[:, 0].float().contiguous()
        return mask.repeat(1, 1, self.heads // self.key_heads, 1) if mask.shape[2] <= FEW else mask

    def _by_kernel(self, length: int) -> bool:
        return self.attend is not None and length * self.heads // self.key_heads <= QUERIES

    def run(self, block: _Block, x_BLH: Tensor, rotation: Rotation, mask: Tensor | None, cache: KVCache | None):
        """One block: the residual stream after it, [B, L, H]."""
        x_BLH = x_BLH + self._attention(block, _rms_norm(x_BLH, block.before_attention), rotation, mask, cache)
        gate, up = block.gate_up(_rms_norm(x_BLH, block.before_mlp)).chunk(2, -1)
        return x_BLH + block.down(block.activation(gate).mul_(up))

    def _attention(
        self, block: _Block, x_BLH: Tensor, rotation: Rotation, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        n, j, length = self.heads, self.key_heads, x_BLH.shape[1]
        q_BLND, k_BLJD, v_BLJD = block.qkv(x_BLH).unflatten(-1, (n + 2 * j, block.head_dim)).split([n, j, j], 2)
        if block.q_norm is not None:
            q_BLND, k_BLJD = _rms_norm(q_BLND, block.q_norm), _rms_norm(k_BLJD, block.k_norm)
        if block.roped:
            q_BLND, k_BLJD = _rotate(q_BLND, *rotation), _rotate(k_BLJD, *rotation)
        k, v = k_BLJD.transpose(1, 2), v_BLJD.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, block.index)
        if self._by_kernel(length):
            out_BLND = self.attend(q_BLND, k, v, mask, block.scaling)
            return block.output(out_BLND.flatten(2).to(x_BLH.dtype))
        if length > FEW:
            q_BNLD = q_BLND.transpose(1, 2)
            out = F.scaled_dot_product_attention(q_BNLD, k, v, mask, scale=block.scaling, enable_gqa=n != j)
            return block.output(out.transpose(1, 2).flatten(2))
        q = q_BLND.unflatten(2, (j, n // j)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, J, G L, D]
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=block.scaling)
        return block.output(out.unflatten(2, (n // j, length)).permute(0, 3, 1, 2, 4).flatten(2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _rms_norm(x: Tensor, norm: nn.Module) -> Tensor:
    """As transformers' RMSNorm: in fp32, rounded before the weight. torch's own is slower for a few rows."""
    wide = x.float()
    scale = (wide * wide).mean(-1, keepdim=True).add_(norm.variance_epsilon).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(norm.weight)
