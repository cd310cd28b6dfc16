"""EAGLE-1 and EAGLE-2: one decoder layer that guesses the target's next hidden state from the last one.

Sources: Li et al., EAGLE (arXiv 2401.15077); drafting in dynamic trees, EAGLE-2 (2406.16858). Wiring as vLLM and SGLang
run it: features = the target's hidden state after its final norm; x = fc([token embedding; features]); x += attention
over x as it is (no norm before it); x += mlp(post_attention_layernorm(x)); logits = the target's lm_head(x), without a
norm; x is the next depth's features. With unroll 1 it is trained on the target's features alone, as in the paper; with
more also on its own.

Shapes: N packed positions, P sampled slots, H hidden (the target's too), C queries, keys and values, G query heads per
key head, J key heads, D head size. How it is unrolled and drafts: headtrain/heads/unrolled.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtrain.config import HeadSection
from headtrain.heads.base import Batch, HeadConfig, feature_size, logit_scale
from headtrain.heads.calibrate import ridge, slots_with_next
from headtrain.heads.layers import DecoderLayer
from headtrain.heads.unrolled import Unrolled
from headtrain.packed import frozen_product
from headtrain.target import TargetParts

SAMPLED = 1 << 16  # slots of the closed-form start


@dataclass
class EagleConfig(HeadConfig):
    type: str = "eagle"
    logit_scale: float = 1.0  # what the target multiplies the products of its lm_head with
    fc_bias: bool = False  # fc has a bias, as in heads of the original code; vLLM ignores it


class EagleHead(Unrolled):
    Config = EagleConfig
    config: EagleConfig
    borrows_lm_head = True

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        h = config.hidden_size
        self.fc = nn.Linear(2 * h, h, bias=config.fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(config, h, ("post_attention_layernorm",))])
        # Training sees features divided by their root mean square; a saved head has this folded into fc.
        self.register_buffer("feature_scale", torch.ones(h))
        self.output_scale = config.logit_scale
        self._lm_head: tuple[Tensor, Callable[[Tensor], Tensor]] | None = None

    # ------------------------------------------------------------------------------------------------ set-up

    @classmethod
    def fresh(cls, section: HeadSection, parts: TargetParts) -> EagleHead:
        head = cls(EagleConfig(**cls._sizes(section, parts), logit_scale=logit_scale(parts), freeze_lm_head=True))
        for p in head.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        return head

    def attach(self, embedding: Tensor, lm_head: Tensor | None = None) -> None:
        self._lent["embedding"] = embedding
        if lm_head is not None:
            self._lent["teacher"] = lm_head

    def start_from(self, parts: TargetParts, selected: Tensor, sample: Batch, seed: int | None) -> None:
        self.scale_features(feature_size(sample, self.config))
        nn.init.normal_(self.fc.weight, std=0.02)
        if seed is not None:
            self._calibrate(sample, parts.embedding)

    @torch.no_grad()
    def _calibrate(self, sample: Batch, embedding: Tensor) -> None:
        """The closed-form start: fc is the ridge regression of the next hidden state on what fc reads, and the layer
        adds nothing to it yet. No norm stands before attention, so its weights are made smaller by the state's size."""
        layer, slots = self.layers[0], slots_with_next(sample)[:SAMPLED]
        read_PH = embedding.to(slots.device)[sample.ids_N[slots + 1]].float()
        size = read_PH.square().mean().sqrt()
        last_NH, scale_H = sample.last_NT.float(), self.feature_scale.to(slots.device)
        weights = ridge(torch.cat([read_PH / size, last_NH[slots] * scale_H], 1), last_NH[slots + 1])
        weights[: read_PH.shape[1]] /= size
        self.fc.weight.copy_(weights.T)
        for name in "qkv":
            layer.self_attn[f"{name}_proj"].weight /= last_NH.square().mean().sqrt().cpu()
        for output in (layer.self_attn["o_proj"], layer.mlp["down_proj"]):
            nn.init.zeros_(output.weight)

    @torch.no_grad()
    def scale_features(self, rms_AT: Tensor) -> None:
        scale = 1.0 / rms_AT.flatten().clamp(min=1e-6).to(self.fc.weight.device)
        self.fc.weight[:, len(scale) :] *= self.feature_scale / scale
        self.feature_scale = scale

    # ------------------------------------------------------------------------------------------------ the network

    def _features(self, taps: Tensor | None, last: Tensor, noise: float = 0.0) -> Tensor:
        last = last.to(self.fc.weight.dtype)
        return last + (torch.rand_like(last) * 2 - 1) * noise / self.feature_scale.to(last) if noise else last

    def _projections(self) -> tuple[Tensor, ...]:
        """fc's embedding and feature halves, each [H, H], and q, k and v weights stacked [C, H]."""
        return *self.fc.weight.chunk(2, 1), self.layers[0].stacked()

    def _read(self, ids: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        return F.linear(F.embedding(ids, self._frozen("embedding")), weights[0], self.fc.bias)

    def _join(self, read: Tensor, features: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x = read + F.linear(features * self.feature_scale.to(features), weights[1])
        return F.linear(x, weights[2]), x

    def _enter(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        embedded = F.embedding(ids, self._frozen("embedding"))
        x = self.fc(torch.cat([embedded, features * self.feature_scale.to(features)], -1))
        return self.layers[0].project(x), x

    def _finish(self, residual: Tensor, attended_GJD: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers[0].rest(residual, attended_GJD)
        return x * self.output_scale, x

    def _logits(self, output: Tensor) -> Tensor:
        weight = self._output_weight
        if self._lm_head is None or self._lm_head[0] is not weight:
            self._lm_head = weight, frozen_product(weight)
        return self._lm_head[1](output)

    @property
    def _output_weight(self) -> Tensor:
        return self._frozen("teacher")

    # ------------------------------------------------------------------------------------------------ the folder

    def portable_tensors(self) -> dict[str, Tensor]:
        """Tensors under the names that vLLM and SGLang load. SGLang's fc has a bias, which vLLM ignores: zeros."""
        tensors = {name: t for name, t in self.state_dict().items() if name not in ("feature_scale", "d2t", "t2d")}
        weight, scale = self.fc.weight, torch.cat([torch.ones_like(self.feature_scale), self.feature_scale])
        tensors["fc.weight"] = (weight.float() * scale.float()).to(weight.dtype)
        tensors.setdefault("fc.bias", weight.new_zeros(len(weight)))
        return tensors

    def load_portable(self, tensors: dict[str, Tensor], where: str) -> None:
        super().load_portable(tensors, where)
        if not self.config.fc_bias and bool(tensors["fc.bias"].any()):
            raise ValueError(f"{where}: fc.bias is not zero; vLLM ignores it, so such a head drafts differently there")

    def portable_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """config.json as vLLM reads it, plus our own section. SGLang wants the architecture LlamaForCausalLMEagle."""
        config = {"architectures": ["LlamaForCausalLM"], **self._portable_sizes(dtype)}
        if self.config.logit_scale != 1:
            config["logit_scale"] = self.config.logit_scale
        if self.config.fc_bias:
            config["bias"] = True
        return config | {"headtrain": self.config.to_dict()}
