"""MTP: the multi-token-prediction module that a target's checkpoint brings along, drafting again from its own output.

Sources: DeepSeek-V3 (arXiv 2412.19437), FastMTP (2509.18362). Wiring as vLLM runs it:
x = fc [embed_norm(e); hidden_norm(features)]; x = the family's decoder layer of x; output = norm(x); logits = the
target's lm_head of the output, which is also the next depth's features. The first features are the target's last
hidden state. The decoder layer is transformers' own class of the family, so that gates, biases, norms of queries and
keys, latent attention and experts are as the target has them.

Shapes: N packed positions, M active slots of a depth, H hidden, G query heads per key head, J key heads, D head size,
V draft vocabulary, B requests, L new tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtrain.config import SCRATCH, HeadSection
from headtrain.heads.base import Batch, HeadConfig, check_tensors
from headtrain.heads.calibrate import ridge, slots_with_next, temper, unit
from headtrain.heads.layers import depth_attention
from headtrain.heads.mtp_checkpoint import DIALECTS, EXPERT, merged, read_native, split
from headtrain.heads.unrolled import Unrolled
from headtrain.heads.vocab import draft_size
from headtrain.target import TargetError, TargetParts

BUILT_AS = {"mimo": "qwen2"}  # families whose code comes with the model: one of transformers' with the same layer
BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = "headtrain_mtp"  # the name of `_attention` in transformers


@dataclass
class MtpConfig(HeadConfig):
    dialect: str = "deepseek"
    prefix: str = ""  # of the module's tensors in the checkpoint
    native: bool = False  # from the target's checkpoint, to which it can be written back
    experts: str | None = None  # how the checkpoint has them: None (there are none), "single" tensors, or "merged"
    target: dict[str, Any] = field(default_factory=dict)  # config.json that the decoder layer is built from


class MtpHead(Unrolled):
    Config = MtpConfig
    config: MtpConfig
    borrows_lm_head = True

    def __init__(self, config: MtpConfig):
        super().__init__(config)
        h, self.dialect = config.hidden_size, DIALECTS[config.dialect]
        self.layer, rotary = build_layer(config.target, config.experts is not None)
        self._rotary = [rotary]  # in a list, so that its frequencies are not cast with the head
        self.fc = nn.Linear(2 * h, h, bias=False)
        kind = type(self.layer.input_layernorm)
        self.embed_norm, self.hidden_norm, self.norm = (kind(h, eps=config.rms_norm_eps) for _ in range(3))
        if self.dialect.pre_norm:  # of the target; what lies before it is had by division
            self.register_buffer("final_norm", torch.ones(h))

    # ------------------------------------------------------------------------------------------------ set-up

    @classmethod
    def fresh(cls, section: HeadSection, parts: TargetParts) -> MtpHead:
        if section.init_from == SCRATCH:
            return cls._random(section, parts)
        native = read_native(parts.source, parts.config.num_hidden_layers)
        experts = None
        if any(".mlp.experts." in name for name in native.tensors):
            experts = "single" if any(map(EXPERT.fullmatch, native.tensors)) else "merged"
        text = text_config(native.config)
        latent = getattr(text, "kv_lora_rank", None) is not None
        heads = text.num_attention_heads
        head = cls(
            MtpConfig(
                type="mtp", hidden_size=text.hidden_size, target_hidden_size=text.hidden_size,
                intermediate_size=text.intermediate_size, num_attention_heads=heads,
                num_key_value_heads=heads if latent else text.num_key_value_heads,
                head_dim=text.qk_nope_head_dim + text.qk_rope_head_dim if latent
                else getattr(text, "head_dim", None) or text.hidden_size // heads,
                vocab_size=len(parts.lm_head), draft_vocab_size=draft_size(section.draft_vocab, len(parts.lm_head)),
                rms_norm_eps=text.rms_norm_eps, max_position_embeddings=text.max_position_embeddings,
                target_layers=text.num_hidden_layers, unroll=section.unroll, dialect=native.dialect,
                prefix=native.prefix, native=True, experts=experts, target=native.config,
            )
        )  # fmt: skip
        check_tensors(head._portable(head._of_module()), native.tensors, f"target.model={parts.source.model}")
        head._fill(native.tensors)
        return head

    @classmethod
    def _random(cls, section: HeadSection, parts: TargetParts) -> MtpHead:
        """A new module of the target's dimensions with a plain dense layer, Llama's."""
        sizes, name = cls._sizes(section, parts), section.dialect or "deepseek"
        target = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_nextn_predict_layers": 1,
            "num_hidden_layers": sizes["target_layers"], "rope_parameters": sizes["rope"], "hidden_act": "silu",
            "tie_word_embeddings": False,
        }  # fmt: skip
        keys = (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "rms_norm_eps", "max_position_embeddings",
        )  # fmt: skip
        target |= {key: sizes[key] for key in keys}
        prefix = DIALECTS[name].prefix.format(L=sizes["target_layers"])
        head = cls(MtpConfig(**sizes, dialect=name, prefix=prefix, target=target))
        for p in head.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        return head

    def start_from(self, parts: TargetParts, selected: Tensor, sample: Batch, seed: int | None) -> None:
        if self.dialect.pre_norm:
            if bool((parts.norm_weight == 0).any()):
                raise ValueError("head.dialect=mimo: the target's final norm has zeros, and what it is given is lost")
            self.final_norm.copy_(parts.norm_weight)
        if self.config.native:
            return
        self.norm.weight.data.copy_(parts.norm_weight)
        if seed is not None:
            self.attach(parts.embedding, parts.lm_head)
            self._calibrate(parts, sample)

    @torch.no_grad()
    def _calibrate(self, parts: TargetParts, sample: Batch) -> None:
        """fc by regression on the direction of the token after next, a layer that adds nothing, and the norm scaled to
        where the loss is lowest."""
        self.to(sample.last_NT.device)
        slots, norm_H = slots_with_next(sample), parts.norm_weight.to(self.norm.weight)
        inputs = [
            self.embed_norm(F.embedding(sample.ids_N[slots + 1], self._frozen("embedding"))),
            self.hidden_norm(self._features(None, sample.last_NT[slots])),
        ]
        wanted_PH = unit(parts.lm_head.to(norm_H) / norm_H)[sample.ids_N[slots + 2]]
        self.fc.weight.copy_(ridge(torch.cat(inputs[:: -1 if self.dialect.hidden_first else 1], 1), wanted_PH).T)
        for layer in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
            layer.weight.zero_()
        temper(self, sample)

    def attach(self, embedding: Tensor, lm_head: Tensor | None = None) -> None:
        self._lent["embedding"] = embedding
        if lm_head is not None:  # drafts and teacher alike
            self._lent["teacher"] = lm_head[self.t2d.to(lm_head.device)]

    # ------------------------------------------------------------------------------------------------ the network

    def _features(self, taps: Tensor | None, last: Tensor, noise: float = 0.0) -> Tensor:
        x = last.to(self.fc.weight.dtype)
        if self.dialect.pre_norm:
            x = x / self.final_norm
        if noise:
            x = x + (torch.rand_like(x) * 2 - 1) * noise * x.square().mean(-1, keepdim=True).sqrt()
        return x

    def _projections(self) -> tuple[Tensor, Tensor]:
        """The parts of fc that read the embedding and the features, each [H, H]."""
        return self.fc.weight.chunk(2, 1)[:: -1 if self.dialect.hidden_first else 1]

    def _read(self, ids: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        return F.linear(self._embed(ids), weights[0])

    def _embed(self, ids: Tensor) -> Tensor:
        return self.embed_norm(F.embedding(ids, self._frozen("embedding")))

    def _seen(self, read: Tensor, positions: Tensor) -> Tensor:
        """What is read of tokens at positions, but at position 0 where the dialect skips it."""
        return read * (positions > 0)[..., None] if self.dialect.skips_first else read

    def _block(self, x_BLH: Tensor, positions_BL: Tensor, attend: Callable, pick: Callable) -> Tensor:
        """The decoder layer and the norm. pick: the slots that go on after attention."""
        rotary = self._rotary[0].to(x_BLH.device)
        attended_BLH = self.layer.self_attn(
            self.layer.input_layernorm(x_BLH), position_embeddings=rotary(x_BLH, positions_BL), attention_mask=None,
            attend=attend,
        )[0]  # fmt: skip
        x_BMH = pick(x_BLH + attended_BLH)
        return self.norm(x_BMH + self.layer.mlp(self.layer.post_attention_layernorm(x_BMH)))

    def _depth(self, features, slots, positions, read, weights, first, diagonals, segments):
        x_MH = self._seen(read(), positions) + F.linear(self.hidden_norm(features), weights[1])
        own: list[Tensor] = []

        def attend(q, k, v):
            (q_MGJD,), (k_MJD,), (v_MJD,) = q, k, v
            own.extend((k_MJD, v_MJD))
            scale = q.shape[-1] ** -0.5
            if first is not None:
                return depth_attention(q_MGJD, *first, [*diagonals, (k_MJD, v_MJD)], segments, scale)[None]
            found = depth_attention(q_MGJD.index_select(0, slots), k_MJD, v_MJD, [], segments, scale)
            return torch.zeros_like(q_MGJD).index_copy(0, slots, found)[None]

        pick = (lambda x: x) if first is not None else (lambda x: x.index_select(1, slots))
        output_MH = self._block(x_MH[None], positions[None], attend, pick)[0]
        return output_MH, output_MH, *own

    def _logits(self, output: Tensor) -> Tensor:
        return F.linear(output, self._frozen("teacher"))

    @property
    def _output_weight(self) -> Tensor:
        return self._frozen("teacher")

    # ------------------------------------------------------------------------------------------------ drafting

    @torch.no_grad()
    def extend(self, state, tokens_BL, taps_BLAT, last_BLT, counts_B) -> tuple[Tensor, Tensor]:
        slots_BL = state.settle(tokens_BL.shape[1], counts_B)
        rows, at = torch.arange(len(counts_B), device=counts_B.device), counts_B - 1
        features_BLH = self._features(None, last_BLT)
        logits_B1V, hidden_B1H = self._draft_on(state, tokens_BL, features_BLH, slots_BL, slots_BL, (rows, at))
        return logits_B1V[:, 0], hidden_B1H[:, 0]

    @torch.no_grad()
    def expand(self, state, tokens_BM, parents_BM=None) -> tuple[Tensor, Tensor]:
        slots_BM, positions_BM, features_BMH = state.branch(parents_BM)
        return self._draft_on(state, tokens_BM, features_BMH, slots_BM, positions_BM)

    def _draft_on(self, state, tokens_BL, features_BLH, slots_BL, positions_BL, last=None) -> tuple[Tensor, Tensor]:
        """Logits and hidden of new slots; of one slot of each row where `last` (rows, places in them) is given."""
        inputs = [self._seen(self._embed(tokens_BL), positions_BL), self.hidden_norm(features_BLH)]
        x_BLH = self.fc(torch.cat(inputs[:: -1 if self.dialect.hidden_first else 1], -1))

        def attend(q_BLGJD, k_BLJD, v_BLJD):
            state.write(slots_BL, k_BLJD, v_BLJD)
            if last is None:
                return state.attend(q_BLGJD)
            return state.attend(q_BLGJD[last][:, None]).expand_as(q_BLGJD)  # of the other slots nothing is needed

        hidden = self._block(x_BLH, positions_BL, attend, lambda x: x if last is None else x[last][:, None])
        state.remember(hidden)
        return self._logits(hidden), hidden

    # ------------------------------------------------------------------------------------------------ the folder

    def _of_module(self) -> dict[str, Tensor]:
        """The state that belongs to the module itself."""
        return {n: t for n, t in self.state_dict().items() if n not in ("d2t", "t2d", "final_norm")}

    def _theirs(self, name: str) -> str:
        """The checkpoint's name of a tensor of the module, experts merged."""
        first, _, rest = name.partition(".")
        below = self.dialect.layer + rest if first == "layer" else f"{getattr(self.dialect, first)}.{rest}"
        return self.config.prefix + below

    def _portable(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the module as the checkpoint has them."""
        named = {self._theirs(name): tensor for name, tensor in tensors.items()}
        return split(named) if self.config.experts == "single" else named

    def _fill(self, tensors: dict[str, Tensor]) -> None:
        """Takes over tensors under the checkpoint's names, and others of the state dict."""
        ours = {self._theirs(name): name for name in self._of_module()}
        self.load_state_dict({ours.get(name, name): t for name, t in merged(tensors).items()}, strict=False)

    def trained_tensors(self) -> dict[str, Tensor]:
        """The module's parameters under their names in the checkpoint."""
        return self._portable({name: p.detach() for name, p in self.named_parameters()})

    def portable_tensors(self) -> dict[str, Tensor]:
        """The module under its names in the checkpoint; d2t and t2d with a reduced vocabulary, and the target's final
        norm where it is needed."""
        tensors = self._portable(self._of_module())
        if self.t2d_or_none is not None:
            tensors |= {"d2t": self.d2t, "t2d": self.t2d}
        return tensors | ({"final_norm": self.final_norm} if self.dialect.pre_norm else {})

    def portable_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """The target's config.json, which engines read for the module too, plus our own section."""
        ours = {"torch_dtype": str(dtype).removeprefix("torch."), "headtrain": self.config.to_dict()}
        return {**self.config.target, **ours}

    def load_portable(self, tensors: dict[str, Tensor], where: str) -> None:
        check_tensors(self.portable_tensors(), tensors, where)
        self._fill(tensors)


# ------------------------------------------------------------------------------------------------ the family's layer


def text_config(target: dict[str, Any]) -> Any:
    """The text config of transformers that a target's config.json describes. TargetError for an unknown family."""
    from transformers import AutoConfig

    rest = {key: value for key, value in target.items() if key not in ("model_type", "auto_map", "quantization_config")}
    family = target["model_type"]
    try:
        return AutoConfig.for_model(BUILT_AS.get(family, family), **rest).get_text_config()
    except (ValueError, TypeError) as error:
        raise TargetError(f"MTP module of {family}: transformers cannot build its decoder layer ({error})") from error


def build_layer(target: dict[str, Any], sparse: bool) -> tuple[nn.Module, nn.Module]:
    """(a decoder layer with full attention, the rotary embedding) of the family of a config.json, random weights.

    sparse: with experts, where the family has them. TargetError naming the family where its layer is built otherwise.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, _attention)
    text = copy.deepcopy(text_config(target))
    one = {
        "num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": None, "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if sparse else "dense"], "first_k_dense_replace": int(not sparse),
        "mlp_only_layers": [] if sparse else [0], "decoder_sparse_step": 1,
    }  # fmt: skip
    for key, value in one.items():
        if getattr(text, key, None) is not None:
            setattr(text, key, value)
    decoder = AutoModelForCausalLM.from_config(text, attn_implementation=ATTENTION, dtype=torch.float32).get_decoder()
    layer = decoder.layers[0]
    parts = {name for name, _ in layer.named_children()}
    if parts != BLOCK or not hasattr(decoder, "rotary_emb"):
        raise TargetError(
            f"MTP module of {text.model_type}: its decoder layer is made of {', '.join(sorted(parts))}, not of "
            f"{', '.join(sorted(BLOCK))} with rope; it cannot be trained here"
        )
    return layer, decoder.rotary_emb


def _attention(module, query, key, value, attention_mask, scaling=None, attend=None, **more):
    """What transformers' layers call, with [B, heads, L, D]: hands on to attend(q [B, L, G, J, D], k, v [B, L, J, D]),
    which scales by D ** -0.5. Values narrower than D (latent attention) are padded."""
    if given := [name for name in ("softcap", "s_aux", "sliding_window") if more.get(name) is not None]:
        raise TargetError(f"MTP module: {type(module).__name__} passes {given[0]!r}, which its training does not know")
    head_dim, width, heads = query.shape[-1], value.shape[-1], key.shape[1]
    if (factor := scaling * head_dim**0.5) != 1:
        query = query * factor
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, F.pad(value, (0, head_dim - width))))
    out_BLGJD = attend(q.unflatten(2, (heads, -1)).transpose(2, 3), k, v)
    return out_BLGJD[..., :width].transpose(2, 3).flatten(2, 3), None
