"""A frozen causal language model: where its parts are, how it is loaded, and one forward that returns taps.

This is the only file that knows where a transformers model keeps its embedding, blocks, final norm, lm_head and rope.
Shapes: B rows, L new tokens, S visible slots, H hidden, A taps, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headtrain import quantised, spread
from headtrain.adapter import merge_adapter
from headtrain.attention import register as _register_attention
from headtrain.cache import KVCache
from headtrain.config import TargetConfig
from headtrain.facts import check_rope, head_rope, text_marks
from headtrain.files import cache_dir, locate, locked, sha256_file
from headtrain.stored import Stored
from headtrain.team import Team, team_of

log = logging.getLogger(__name__)


class TargetError(ValueError):
    """The target cannot be found, read, or understood; the message says what to do."""


# ------------------------------------------------------------------------------------------------- GGUF


def dequantized_gguf(path: str) -> str:
    """Folder of the fp32 safetensors copy of a GGUF file, made once and kept in the cache under the file's sha256."""
    folder = cache_dir() / "gguf" / sha256_file(path)[:32]
    with locked(folder.with_suffix(".lock")):
        if folder.is_dir():
            return str(folder)
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        where = {"pretrained_model_name_or_path": str(Path(path).parent), "gguf_file": Path(path).name}
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(part)
        AutoTokenizer.from_pretrained(**where).save_pretrained(part)
        part.rename(folder)
    return str(folder)


# ------------------------------------------------------------------------------------------------- the target


@dataclass
class TargetStates:
    """One forward: `last_BLH` after the final norm; `taps_BLAH` un-normed residual stream, None when not asked for."""

    last_BLH: Tensor
    taps_BLAH: Tensor | None


STATEFUL = ("linear_attention", "conv", "hybrid")  # transformers' names of layers that keep a running state


class Target:
    """A loaded target. `model`, `tokenizer`, `config` (the text config), `layers`, `embed`, `norm`, `lm_head`."""

    def __init__(self, model: nn.Module, tokenizer: Any, name: str, template_kwargs: dict | None = None):
        self.model, self.tokenizer, self.name = model.eval().requires_grad_(False), tokenizer, name
        self.template_kwargs = dict(template_kwargs or {})
        self.config = model.config.get_text_config()
        self.embed = model.get_input_embeddings()
        self.lm_head = model.get_output_embeddings()
        if self.lm_head is None:
            raise TargetError(f"{name}: {type(model).__name__} has no lm_head; a causal language model is needed")
        self.backbone, self.layers, self.norm = _find_parts(model, self.config.num_hidden_layers, name)
        parameters = inspect.signature(self.backbone.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.layer_types = set(getattr(self.config, "layer_types", None) or [])
        self.spread: str | None = None  # the devices that its blocks lie on, where these are several
        self.team: Team | None = None  # the processes that run it together, where it is split by matrices
        self.quantised: str | None = None  # how its weights are stored, where not plainly
        self.lean: Callable[..., TargetStates] | None = None  # the same blocks in fewer operations (headtrain/lean.py)
        self.decodes: set[str] = set()  # the ways of decoding that were found to work: chains, trees

    @classmethod
    def load(cls, config: TargetConfig, dtype: str | None = None) -> Target:
        """Loads the model of a recipe's `target` section in `dtype` (default: the section's) and checks it.

        Raises TargetError when the place does not exist or the parts found do not reproduce the model's own logits.
        """
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        _register_attention()
        path, dtype, device = model_path(config), dtype or config.dtype, config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
        try:
            tokenizer = with_template(AutoTokenizer.from_pretrained(path, **options), config)
            own, places = AutoConfig.from_pretrained(path, **options), None
            if note := quantised.check(own, device):
                log.warning("%s: %s", config.model, note)
            team = team_of(config)
            if team or spread.wanted(config):
                bones = _without_weights(config, path, tokenizer)
            if team:
                options["distributed_config"] = spread.by_matrices(config, bones)
            elif spread.wanted(config):
                places = spread.device_map(replace(config, dtype=dtype), bones, path)
            elif quantised.settings(own):  # not all kinds can be moved later
                places = {"": device}
            model, loaded = AutoModelForCausalLM.from_pretrained(
                path,
                output_loading_info=True,
                dtype=getattr(torch, dtype),
                attn_implementation=config.attn_implementation,
                device_map=places,
                **options,
            )
            if missing := sorted(loaded["missing_keys"]):  # random weights stand there
                raise ValueError(f"its files lack {', '.join(missing[:5])} ({len(missing)} in all); complete them")
            quantised.check_used(model, loaded["unexpected_keys"])
            if config.adapter:
                model = merge_adapter(model, config)
        except (OSError, ValueError) as error:
            why = spread.NOT_IN_FILES if "offload_folder" in str(error) else error
            raise TargetError(f"target.model={config.model}: {why}") from error
        model = model if places or team else model.to(device)
        target = cls(model, tokenizer, config.model or path, config.template_kwargs)
        target.quantised = quantised.in_words(own)
        target.team = team
        if team or spread.wanted(config):
            target.spread = f"{team.size} processes" if team else spread.in_words(places)
            log.info("%s lies on %s", target.name, target.spread)
        target.self_check()
        return target

    device = property(lambda self: self.embed.weight.device)
    dtype = property(lambda self: self.embed.weight.dtype)
    hidden_size = property(lambda self: self.config.hidden_size)
    vocab_size = property(lambda self: self.lm_head.weight.shape[0])
    num_layers = property(lambda self: len(self.layers))

    def agreed(self, tokens_B: Tensor) -> Tensor:
        """Tokens that were chosen here, as all processes that run this target go on with them."""
        return tokens_B if self.team is None else self.team.agreed(tokens_B)

    def lent(self) -> tuple[Tensor, Tensor]:
        """The weights of embedding and lm_head, [V, H] each, in the target's dtype, for heads that borrow them."""
        weights = self.embed.weight, self.lm_head.weight
        if weights[1].dtype in quantised.PLAIN and type(weights[1].data) is Tensor:
            return weights
        with torch.inference_mode():  # quantised: what it makes of each dimension alone
            return weights[0], self.lm_head(torch.eye(self.hidden_size, dtype=self.dtype, device=self.device)).T

    @property
    def stateful(self) -> str | None:
        """The kind of layer that keeps a running state instead of every token's keys; None where there is none."""
        return next((kind for kind in STATEFUL if kind in self.layer_types), None)

    @property
    def eos_ids(self) -> set[int]:
        """Every token id that ends a response: the generation config's and the tokenizer's."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        ids = set(ids if isinstance(ids, list) else [] if ids is None else [ids])
        return ids | ({self.tokenizer.eos_token_id} - {None})

    @torch.inference_mode()
    def forward(
        self,
        tokens_BL: Tensor,
        cache: KVCache | None = None,
        slots_BL: Tensor | None = None,
        positions_BL: Tensor | None = None,
        mask_BLS: Tensor | None = None,
        taps: tuple[int, ...] = (),
        window: int | None = None,
    ) -> TargetStates:
        """Runs new tokens through the blocks, with the earlier ones in `cache`.

        slots_BL: int64, the cache slot of each new token (default: 0 … L-1). A token sees all slots up to its own.
        positions_BL: rope positions, default = slots. mask_BLS: bool, who sees which slot, instead of the causal rule.
        taps: 1 … num_layers; tap k is the residual stream after k blocks, before any final norm.
        window: S, at least the largest slot + 1; who knows it saves a wait for the device.
        """
        batch, length = tokens_BL.shape
        if slots_BL is None:
            slots_BL, window = torch.arange(length, device=tokens_BL.device).expand(batch, length), window or length
        if window is None:
            window = int(slots_BL.max()) + 1
        if mask_BLS is None:
            mask_BLS = torch.arange(window, device=tokens_BL.device) <= slots_BL[..., None]
        if positions_BL is None:
            positions_BL = slots_BL
        options: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            cache.begin(slots_BL, window)
            options[self._cache_argument] = cache
        for k in taps:
            if not 1 <= k <= self.num_layers:
                raise TargetError(f"tap {k} does not exist: {self.name} has blocks 1 … {self.num_layers}")
        masks = self._masks(mask_BLS, positions_BL, slots_BL)
        if self.lean is not None:
            return self.lean(tokens_BL, positions_BL, masks, cache, taps)
        with self._tapped(taps) as tapped:
            output = self.backbone(input_ids=tokens_BL, attention_mask=masks, position_ids=positions_BL, **options)
        taps_BLAH = torch.stack([tapped[k].to(self.device) for k in taps], 2) if taps else None
        return TargetStates(output.last_hidden_state, taps_BLAH)

    def last_states(self, tokens_BL: Tensor) -> Tensor:
        """Last hidden states after the final norm, [B, L, H], of rows padded at their ends; gradients flow."""
        batch, length = tokens_BL.shape
        at_BL = torch.arange(length, device=tokens_BL.device).expand(batch, length)
        masks = self._masks(at_BL[:, None] <= at_BL[..., None], at_BL, at_BL)
        options = {"attention_mask": masks, "position_ids": at_BL, "use_cache": False}
        return self.backbone(input_ids=tokens_BL, **options).last_hidden_state

    def logits(self, last: Tensor) -> Tensor:
        """lm_head with the family's scaling: [..., V], in the model's dtype, from hidden [..., H] after the norm."""
        logits = self.lm_head(last)
        if scaling := getattr(self.config, "logits_scaling", None):  # Granite
            logits = logits / scaling
        if scale := getattr(self.config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if cap := getattr(self.config, "final_logit_softcapping", None):  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    def rope(self) -> dict[str, Any]:
        """The rope of heads for this target, as a plain dict: rope_theta, rope_type and what scaling adds."""
        return head_rope(self.config)

    def self_check(self) -> None:
        """Raises TargetError unless lm_head(final norm(last block)) equals the model's own logits on a probe."""
        probe = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        try:
            with torch.inference_mode():
                theirs = self.model(input_ids=probe).logits.float()
                states = self.forward(probe, taps=(self.num_layers,))
                ours = {
                    "forward": self.logits(states.last_BLH).float(),
                    "norm of the last tap": self.logits(self.norm(states.taps_BLAH[:, :, 0])).float(),
                }
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            family = self.config.model_type
            raise TargetError(f"{self.name}: the {family} family cannot be run here: {error}") from error
        tolerance = (1e-4 if self.dtype == torch.float32 else 0.06) * float(theirs.abs().max())
        for way, logits in ours.items():
            if (gap := float((logits - theirs).abs().max())) > tolerance:
                raise TargetError(
                    f"{self.name}: logits through {way} are off the model's own by {gap:.3g} (allowed {tolerance:.3g});"
                    f" the {self.config.model_type} family needs an adapter in headtrain/target.py"
                )

    @contextlib.contextmanager
    def _tapped(self, taps: tuple[int, ...]):
        found: dict[int, Tensor] = {}
        handles = []
        for k in taps:

            def keep(_module, _inputs, output, k=k):
                found[k] = output[0] if isinstance(output, tuple) else output

            handles.append(self.layers[k - 1].register_forward_hook(keep))
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def _masks(self, mask_BLS: Tensor, positions_BL: Tensor, slots_BL: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive masks [B, 1, L, S] in the model's dtype; one per layer type where a family has windows or chunks.

        Both are counted in positions: two nodes of a tree may lie in different slots and stand at the same position.
        """

        def additive(mask):
            zeros = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
            return zeros.masked_fill_(~mask, torch.finfo(self.dtype).min)[:, None]

        config, kinds = self.config, self.layer_types
        window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
        sliding = window and (not kinds or "sliding_attention" in kinds) and getattr(config, "use_sliding_window", True)
        chunked = chunk and "chunked_attention" in kinds
        if not sliding and not chunked:
            return additive(mask_BLS)
        where_BS = torch.arange(mask_BLS.shape[-1], device=mask_BLS.device).expand(len(mask_BLS), -1)
        if positions_BL is not slots_BL:
            where_BS = where_BS.scatter(1, slots_BL, positions_BL)
        masks = {"full_attention": mask_BLS}
        if sliding:
            masks["sliding_attention"] = mask_BLS & (where_BS[:, None] > positions_BL[..., None] - window)
        if chunked:
            masks["chunked_attention"] = mask_BLS & (where_BS[:, None] // chunk == positions_BL[..., None] // chunk)
        if not kinds or kinds == {"sliding_attention"}:
            return additive(masks["sliding_attention"])
        return dict.fromkeys(kinds) | {kind: additive(mask) for kind, mask in masks.items()}


def model_path(config: TargetConfig) -> str:
    """Where transformers can load `target.model` from: a Hub id or a folder (a GGUF is converted once)."""
    if not config.model:
        raise TargetError("target.model is not set: give a Hub id, a folder, a .gguf file or package:NAME/FILE")
    path = locate(config.model)
    if path.endswith(".gguf"):
        if not os.path.isfile(path):
            raise TargetError(f"target.model={config.model}: no such file")
        return dequantized_gguf(path)
    return path


def _find_parts(model: nn.Module, num_layers: int, name: str) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """The module that owns the list of blocks, that list, and the final norm beside it."""
    for module in model.modules():
        for child in module.children():
            if not (isinstance(child, nn.ModuleList) and len(child) == num_layers):
                continue
            norms = {n: c for n, c in module.named_children() if re.search(r"norm|ln_f", n)}
            final = [n for n in norms if "emb" not in n] or list(norms)  # LFM2 calls its final norm embedding_norm
            if final:
                return module, child, norms[final[-1]]
    raise TargetError(f"{name}: found no list of {num_layers} blocks with a final norm in {type(model).__name__}")


# ------------------------------------------------------------------------------------------------- parts for training


@dataclass
class TargetParts:
    """The few tensors of a target that training needs, in its checkpoint's dtype: `embedding` and `lm_head`, both
    [V, T], `norm_weight` [T]; its text config, rope description and end tokens; where they come from."""

    embedding: Tensor
    lm_head: Tensor
    norm_weight: Tensor
    config: Any
    rope: dict[str, Any]
    eos_ids: set[int]
    source: TargetConfig | None = None
    texts: dict[str, str] = field(default_factory=dict)  # marks of its tokenizer and chat template (facts.text_marks)


def with_template(tokenizer: Any, config: TargetConfig) -> Any:
    """The tokenizer with the chat template of the file target.chat_template, where that is set."""
    if config.chat_template:
        tokenizer.chat_template = Path(locate(config.chat_template)).expanduser().read_text(encoding="utf-8")
    return tokenizer


def load_parts(config: TargetConfig) -> TargetParts:
    """Reads the embedding, lm_head and final norm of a target from its safetensors files, without loading the rest."""
    try:
        target, stored = outline(config)
        tensors = {**stored.ends(target.embed, target.lm_head, config), "norm_weight": stored.norm_weight(target.norm)}
    except (OSError, ValueError) as error:
        raise TargetError(f"target.model={config.model}: {error}") from error
    return TargetParts(
        config=target.config, rope=target.rope(), eos_ids=target.eos_ids, source=config,
        texts=text_marks(target.tokenizer) | ({"quantised": target.quantised} if target.quantised else {}), **tensors,
    )  # fmt: skip


def outline(config: TargetConfig) -> tuple[Target, Stored]:
    """The target without weights (on the meta device), and its stored tensors. OSError or ValueError."""
    from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig

    path = model_path(config)
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    tokenizer = with_template(AutoTokenizer.from_pretrained(path, **options), config)
    target = _without_weights(config, path, tokenizer)
    target.quantised = quantised.in_words(target.model.config)
    check_rope(PreTrainedConfig.get_config_dict(path, revision=config.revision)[0], target.config)
    with contextlib.suppress(OSError):  # a folder without generation_config.json: the tokenizer's end token stands
        target.model.generation_config = GenerationConfig.from_pretrained(path, revision=config.revision)
    return target, Stored(path, config.revision, target.model)


def _without_weights(config: TargetConfig, path: str, tokenizer: Any) -> Target:
    """The target's modules on torch's meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    code = {"trust_remote_code": config.trust_remote_code}
    own = AutoConfig.from_pretrained(path, revision=config.revision, **code)
    with torch.device("meta"):
        return Target(AutoModelForCausalLM.from_config(own, **code), tokenizer, config.model or path)
