"""A plain second way to compute an EAGLE-3 or EAGLE head, straight from its folder as engines read it.

Nothing here is shared with headtrain's heads: it reads config.json's engine keys (never our own section), takes one
operation after the other in float32, and drafts a chain from every slot of a text at once. What it drafts is what a
server would draft from the same folder, so that a difference to the trained head is a fault of the folder. A `Reading`
can be changed, to see which mistake would explain a head that drafts badly.

Shapes: T tokens, A taps, H hidden, R draft vocabulary, K drafts, N heads, J key heads, D head size, L blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headtrain.engines import engine_ids, taps_from_ids

KINDS = ("eagle", "eagle3")


@dataclass(frozen=True)
class Reading:
    """What an engine takes the folder to mean; every field is something that goes wrong in practice."""

    taps: tuple[int, ...]  # eagle: none, the last state is read
    rope: tuple[tuple[str, Any], ...]  # rope_theta, rope_type, …
    norm_before_residual: bool = False
    norm_output: bool = False
    absolute_map: bool = False  # d2t holds target ids instead of offsets
    shifted: bool = True  # slot p reads token p+1
    final_norm: str = "own"  # own | target: weights of the norm before lm_head
    embedding: str = "own"  # own (the target's where none is shipped) | target
    normed_last: bool = True  # eagle: the last state after the final norm


def as_served(engine: str, kind: str, config: dict[str, Any], blocks: int, sglang: str = "sglang") -> Reading:
    """The reading of an engine; TensorRT-LLM is told the layers at its start and is taken to be told the trained ones.
    sglang: how SGLang counts the target's layers.

    Raises TapsError for layer ids that the target does not have.
    """
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if engine == "sglang":
        ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if engine == "tensorrt_llm":
        ids = engine_ids(engine, config["headtrain"]["taps"], blocks) if config.get("headtrain") else None
    scaling = dict(config.get("rope_scaling") or {})
    kind_of_rope = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    rope = {"rope_theta": float(config.get("rope_theta") or 10000.0), "rope_type": kind_of_rope, **scaling}
    return Reading(
        taps=tuple(taps_from_ids(sglang if engine == "sglang" else engine, ids, blocks)) if kind == "eagle3" else (),
        rope=tuple(sorted(rope.items())),
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_output=bool(config.get("norm_output")),
    )


@dataclass
class Ends:
    """What the target lends a head, float32: embedding and lm_head [V, H], the weights of its final norm [H]."""

    embedding: Tensor
    lm_head: Tensor
    norm: Tensor


class Drafts(NamedTuple):
    ids_TK: Tensor  # target ids, int64 [T-1, K]
    clear_TK: Tensor  # how far the true token's logit stands out, [T-1, K]
    first_TR: Tensor  # logits of depth 0, [T-1, R]

    def accepted(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """(leading drafts of each slot that are the tokens to come; mean clearness) of slots with K tokens to come."""
        k = self.ids_TK.shape[1]
        count = max(0, len(ids_T) - 1 - k)
        truth_SK = torch.stack([ids_T[2 + depth : 2 + depth + count] for depth in range(k)], 1)
        return (self.ids_TK[:count] == truth_SK).long().cumprod(1).sum(1), self.clear_TK[:count].nanmean(1)


class PlainHead:
    """The head of a folder under a reading. A missing norm counts as ones, as engines fill it; more is a KeyError."""

    def __init__(self, kind: str, config: dict[str, Any], tensors: dict[str, Tensor], ends: Ends, reading: Reading):
        self.kind, self.config, self.ends, self.reading = kind, config, ends, reading
        self.w = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
        self.layer = "midlayer" if kind == "eagle3" else "layers.0"
        self.eps = config["rms_norm_eps"]
        self.heads, self.key_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.size = config.get("head_dim") or config["hidden_size"] // self.heads
        self.inverse, self.rope_scale = inverse_frequencies(dict(reading.rope), self.size, config)

    @torch.inference_mode()
    def drafts(self, ids_T: Tensor, taps_TAH: Tensor, last_TH: Tensor, k: int, forced: bool = False) -> Drafts:
        """Greedy chains from every slot but the last, each fed its own drafts, or with `forced` the true tokens.

        taps_TAH: at the reading's taps; last_TH: the target's last state, normed or not as the reading says.
        """
        slots = torch.arange(len(ids_T) - 1)
        feature = taps_TAH[:-1].flatten(1).float() @ self.w["fc.weight"].T if self.kind == "eagle3" else last_TH[:-1]
        read, keys, values, drafts, clear = [ids_T[:-1], ids_T[1:]], [], [], [], []
        first = None
        for depth in range(k):
            q, key, value, residual = self._enter(read[depth + self.reading.shifted], feature.float(), slots + depth)
            keys.append(key)
            values.append(value)
            x = residual + self._attend(q, keys, values) @ self.w[f"{self.layer}.self_attn.o_proj.weight"].T
            x = x + self._mlp(self._norm(x, "post_attention_layernorm"))
            logits, feature = self._leave(x)
            first = logits if first is None else first
            drafts.append(self._target_ids(logits.argmax(-1)))
            truth = ids_T.roll(-2 - depth)[:-1]
            clear.append(self._clearness(logits, truth))
            read.append(truth if forced else drafts[-1])
        return Drafts(torch.stack(drafts, 1), torch.stack(clear, 1), first)

    def _clearness(self, logits: Tensor, ids: Tensor) -> Tensor:
        """How far the logit of a token stands out, in standard deviations of all; NaN where it cannot be drafted."""
        words = torch.full((len(self.ends.embedding),), -1)
        words[self._target_ids(torch.arange(logits.shape[-1]))] = torch.arange(logits.shape[-1])
        own = logits.gather(-1, words[ids].clamp(min=0)[:, None])[:, 0]
        return torch.where(words[ids] >= 0, (own - logits.mean(-1)) / logits.std(-1), math.nan)

    def _enter(self, ids: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        own = self.w.get("embed_tokens.weight") if self.reading.embedding == "own" else None
        embedded = (self.ends.embedding if own is None else own)[ids]
        if self.kind == "eagle3":
            normed = self._norm(feature, "hidden_norm")
            x = torch.cat([self._norm(embedded, "input_layernorm"), normed], -1)
            residual = normed if self.reading.norm_before_residual else feature
        else:
            x = torch.cat([embedded, feature], -1) @ self.w["fc.weight"].T + self.w.get("fc.bias", torch.zeros(()))
            residual = x
        weights = [self.w[f"{self.layer}.self_attn.{name}_proj.weight"] for name in "qkv"]
        q, key, value = ((x @ weight.T).unflatten(-1, (-1, self.size)) for weight in weights)
        return self._rotate(q, positions), self._rotate(key, positions), value, residual

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rope as multiplication by complex numbers: dimension i is the real part, i + D/2 the imaginary one."""
        half = self.size // 2
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
            torch.full((len(positions), 1, half), self.rope_scale), (positions[:, None].float() * self.inverse)[:, None]
        )
        return torch.cat([turned.real, turned.imag], -1)

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Slot p sees true slots up to p, and of each later depth its own node alone. Returns [T-1, N D]."""
        group, n = self.heads // self.key_heads, len(q)
        keys, values = ([x.repeat_interleave(group, 1) for x in xs] for xs in (keys, values))
        scores = [torch.einsum("tnd,snd->nts", q, keys[0]).masked_fill(~torch.ones(n, n).tril().bool(), -math.inf)]
        scores += [(q * key).sum(-1).T[..., None] for key in keys[1:]]
        share = (torch.cat(scores, -1) / math.sqrt(self.size)).softmax(-1)
        out = torch.einsum("nts,snd->tnd", share[..., :n], values[0])
        for d, value in enumerate(values[1:]):
            out = out + share[..., n + d].T[..., None] * value
        return out.flatten(1)

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up, down = (self.w[f"{self.layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        gated = x @ gate.T
        return (gated * gated.sigmoid() * (x @ up.T)) @ down.T

    def _leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, what is fed back)"""
        if self.kind == "eagle":
            return x @ self.ends.lm_head.T * self.config.get("logit_scale", 1.0), x
        own = self.w.get("norm.weight", torch.ones_like(self.ends.norm))
        normed = self._rms(x, own if self.reading.final_norm == "own" else self.ends.norm)
        return normed @ self.w["lm_head.weight"].T, normed if self.reading.norm_output else x

    def _target_ids(self, draft_ids: Tensor) -> Tensor:
        """As an engine maps them: a missing d2t is zeros there. Ids outside of the vocabulary are moved to its end."""
        d2t = self.w.get("d2t")
        if d2t is None:
            return draft_ids
        ids = d2t[draft_ids] if self.reading.absolute_map else draft_ids + d2t[draft_ids]
        return ids.clamp(0, len(self.ends.embedding) - 1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self._rms(x, self.w.get(f"{self.layer}.{name}.weight", torch.ones(x.shape[-1])))

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * weight


def inverse_frequencies(rope: dict[str, Any], size: int, config: dict[str, Any]) -> tuple[Tensor, float]:
    """(inverse frequencies float32 [D/2], scaling of attention): plain rope here, the others by transformers."""
    if rope["rope_type"] == "default":
        return torch.tensor([rope["rope_theta"] ** (-2 * i / size) for i in range(size // 2)]), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    made = LlamaConfig(
        head_dim=size, max_position_embeddings=config["max_position_embeddings"], rope_parameters=dict(rope)
    )
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](made, device=None)
