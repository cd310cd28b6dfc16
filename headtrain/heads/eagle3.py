"""EAGLE-3: one decoder layer over [token embedding; fused target features], unrolled over its own hidden states.

Source: Li et al., EAGLE-3 (arXiv 2503.01840). Wiring as vLLM, SGLang, TensorRT-LLM and llama.cpp run it:
features = fc(taps); x = features (or their norm); attention over [input_layernorm(e); hidden_norm(features)];
x += attention; x += mlp(post_attention_layernorm(x)); logits = lm_head(norm(x)); x, before the norm, is the next
depth's features.

Shapes: H hidden, A taps, T target hidden, C queries, keys and values, G query heads per key head, J key heads, D head
size. How it is unrolled and drafts: headtrain/heads/unrolled.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtrain.config import HeadSection
from headtrain.engines import check_taps, default_taps
from headtrain.heads.base import Batch, HeadConfig, feature_size
from headtrain.heads.calibrate import calibrate
from headtrain.heads.layers import DecoderLayer, rms_norm
from headtrain.heads.unrolled import Unrolled
from headtrain.target import TargetParts


class Eagle3Head(Unrolled):
    def __init__(self, config: HeadConfig):
        super().__init__(config)
        c = config
        self.fc = nn.Linear(len(c.taps) * c.target_hidden_size, c.hidden_size, bias=False)
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.midlayer = DecoderLayer(c, 2 * c.hidden_size, norms)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(c.hidden_size))
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(not c.freeze_lm_head)
        # Captured features differ in size by orders of magnitude from one dimension to the next. Training sees them
        # divided by their root mean square; a saved head has this folded into fc: engines see plain features.
        self.register_buffer("feature_scale", torch.ones(len(c.taps) * c.target_hidden_size))

    # ------------------------------------------------------------------------------------------------ set-up

    @classmethod
    def fresh(cls, section: HeadSection, parts: TargetParts) -> Eagle3Head:
        layers = parts.config.num_hidden_layers
        head = cls(
            cls.Config(
                **cls._sizes(section, parts),
                taps=check_taps(section.taps or default_taps(layers), layers),
                norm_before_residual=section.norm_before_residual,
                norm_output=section.norm_output,
                freeze_lm_head=section.freeze_lm_head,
            )
        )
        for p in head.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        return head

    def train_as(self, section: HeadSection) -> None:
        super().train_as(section)
        self.config.freeze_lm_head = section.freeze_lm_head
        self.lm_head.weight.requires_grad_(not section.freeze_lm_head)

    def attach(self, embedding: Tensor, lm_head: Tensor | None = None) -> None:
        self._lent["embedding"] = embedding
        if lm_head is not None:
            self._lent["teacher"] = lm_head[self.t2d.to(lm_head.device)]

    def start_from(self, parts: TargetParts, selected: Tensor, sample: Batch, seed: int | None) -> None:
        self.lm_head.weight.data.copy_(parts.lm_head[selected])
        self.norm.weight.data.copy_(parts.norm_weight)
        self.scale_features(feature_size(sample, self.config))
        nn.init.normal_(self.fc.weight, std=0.02)
        if seed is not None:
            self.attach(parts.embedding, parts.lm_head)
            calibrate(self, sample, parts, seed)

    def scale_features(self, rms_AT: Tensor) -> None:
        scale = 1.0 / rms_AT.flatten().clamp(min=1e-6).to(self.fc.weight.device)
        self.fc.weight.data *= self.feature_scale / scale
        self.feature_scale = scale

    # ------------------------------------------------------------------------------------------------ the network

    def _features(self, taps: Tensor, last: Tensor | None = None, noise: float = 0.0) -> Tensor:
        taps = taps.flatten(-2).to(self.fc.weight.dtype) * self.feature_scale.to(self.fc.weight.dtype)
        return self.fc(taps + (torch.rand_like(taps) * 2 - 1) * noise if noise else taps)

    def _projections(self) -> tuple[Tensor, Tensor]:
        """q, k and v weights stacked and split into their embedding and hidden halves, each [C, H]."""
        return self.midlayer.stacked().chunk(2, 1)

    def _read(self, ids: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        return F.linear(self._embed(ids), weights[0])

    def _join(self, read: Tensor, features: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        normed = self._normed(features)
        return read + F.linear(normed, weights[1]), normed if self.config.norm_before_residual else features

    def _enter(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._normed(features)
        qkv = self.midlayer.project(torch.cat([self._embed(ids), normed], -1))
        return qkv, normed if self.config.norm_before_residual else features

    def _finish(self, residual: Tensor, attended_GJD: Tensor) -> tuple[Tensor, Tensor]:
        x = self.midlayer.rest(residual, attended_GJD)
        normed = rms_norm(x, self.norm.weight, self.config.rms_norm_eps)
        return normed, normed if self.config.norm_output else x

    def _logits(self, output: Tensor) -> Tensor:
        return self.lm_head(output)

    @property
    def _output_weight(self) -> Tensor:
        return self.lm_head.weight

    def _embed(self, ids: Tensor) -> Tensor:
        embedded = F.embedding(ids, self._frozen("embedding"))
        return rms_norm(embedded, self.midlayer.input_layernorm.weight, self.config.rms_norm_eps)

    def _normed(self, features: Tensor) -> Tensor:
        return rms_norm(features, self.midlayer.hidden_norm.weight, self.config.rms_norm_eps)

    # ------------------------------------------------------------------------------------------------ the folder

    def portable_tensors(self) -> dict[str, Tensor]:
        """Tensors under the names every engine loads; d2t and t2d only with a reduced vocabulary."""
        tensors = dict(self.state_dict())
        tensors["fc.weight"] = (self.fc.weight.float() * tensors.pop("feature_scale").float()).to(self.fc.weight.dtype)
        if self.t2d_or_none is None:
            del tensors["d2t"], tensors["t2d"]
        return tensors

    def portable_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """config.json that vLLM, SGLang, TensorRT-LLM and llama.cpp read alike, plus our own section."""
        c = self.config
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **self._portable_sizes(dtype),
            "draft_vocab_size": c.draft_vocab_size,
            "norm_before_residual": c.norm_before_residual,
            "eagle_aux_hidden_state_layer_ids": list(c.taps),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in c.taps], "use_aux_hidden_state": True},
        }
        if c.norm_output:
            config["norm_output"] = True
        if c.target_hidden_size != c.hidden_size:
            config["target_hidden_size"] = c.target_hidden_size
        if len(c.taps) != 3:
            config["num_aux_hidden_states"] = len(c.taps)
        return config | {"headtrain": c.to_dict()}
