"""A checkpoint that is being imported: what its files say, what the user says, and what its target is."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtrain.config import TargetConfig
from headtrain.hub_read import hub_id
from headtrain.importing.keys import HeadImportError, Keys
from headtrain.target import TargetParts, load_parts, model_path

EMBEDDINGS = ("embed_tokens.weight", "embed.weight")


def source_of(place: str) -> TargetConfig:
    """A model given as a folder, a file or a Hub id, `user/name@revision`."""
    name, revision = (None if Path(place).exists() else hub_id(place)) or (place, None)
    return TargetConfig(model=name, revision=revision)


class TargetFacts:
    """A head's target: its text config, and its embedding and lm_head, which are read when they are needed."""

    def __init__(self, model: str):
        from transformers import AutoConfig

        self.source = source = source_of(model)
        try:
            self.config = AutoConfig.from_pretrained(model_path(source), revision=source.revision).get_text_config()
        except (OSError, ValueError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise HeadImportError(f"target={model}: its config.json cannot be read ({reason}); set target=…") from error

    @functools.cached_property
    def parts(self) -> TargetParts:
        return load_parts(self.source)


@dataclass
class Foreign:
    """`tensors`: what is left of the checkpoint's tensors while a reader renames them to ours. `said`: what the user
    should know: defaults, what was left out, what was settled how."""

    keys: Keys
    tensors: dict[str, Tensor]
    where: str  # the folder, for messages about tensors
    target_name: str | None = None
    taps: list[int] | None = None
    engine_version: str | None = None
    said: list[str] = field(default_factory=list)

    @functools.cached_property
    def target(self) -> TargetFacts:
        if not self.target_name:
            raise HeadImportError("target=… is missing: the checkpoint does not say which model it drafts for")
        return TargetFacts(self.target_name)

    def fault(self, problem: str) -> HeadImportError:
        return HeadImportError(f"{self.where}: {problem}")

    def made_for_target(self, sizes: dict[str, Any]) -> dict[str, Any]:
        """Settings of a HeadConfig that follow from the target; HeadImportError where it is another target's head."""
        theirs = self.target.config
        for key, ours in (("vocab_size", sizes["vocab_size"]), ("hidden_size", sizes["target_hidden_size"])):
            if (value := getattr(theirs, key, None)) != ours:
                raise self.fault(f"made for a target with {key} {ours}; target={self.target_name} has {value}")
        longest = getattr(theirs, "max_position_embeddings", None)
        if longest and longest != (stated := sizes.get("max_position_embeddings", longest)):
            self.said.append(f"max_position_embeddings {longest}, the target's, instead of {stated}")
        found = {"target_layers": theirs.num_hidden_layers, "made_for": {"family": theirs.model_type}}
        return found | ({"max_position_embeddings": longest} if longest else {})

    def strip(self) -> None:
        """Takes the prefix `model.` from the names, and buffers that are computed from the config."""
        for name in sorted(self.tensors):
            if name.endswith("rotary_emb.inv_freq"):
                del self.tensors[name]
            elif name.startswith("model."):
                self.rename(name, name.removeprefix("model."))

    def rename(self, old: str, new: str) -> None:
        if new in self.tensors:
            raise self.fault(f"tensors {old} and {new} are the same to an engine; remove one")
        self.tensors[new] = self.tensors.pop(old)

    def without_embedding(self) -> None:
        """Takes out an embedding that is the target's own; HeadImportError for one that is not."""
        for name in EMBEDDINGS:
            if (own := self.tensors.pop(name, None)) is None:
                continue
            theirs = self.target.parts.embedding
            if own.shape != theirs.shape or not _same(own, theirs):
                raise self.fault(f"{name} is not the embedding of target={self.target_name}, which such a head reads")
            self.said.append(f"{name} is the target's, bit for bit: left out")

    def split_fused(self, layer: str, sizes: dict[str, Any]) -> None:
        """qkv_proj and gate_up_proj, as engines fuse them in memory, into their parts."""
        rows = [sizes[key] * sizes["head_dim"] for key in ("num_attention_heads", *["num_key_value_heads"] * 2)]
        wide = [sizes["intermediate_size"]] * 2
        fused = {"self_attn.qkv": (rows, "self_attn.", "qkv"), "mlp.gate_up": (wide, "mlp.", ("gate", "up"))}
        for name, (lengths, stem, parts) in fused.items():
            if (whole := self.tensors.pop(f"{layer}{name}_proj.weight", None)) is None:
                continue
            if whole.dim() != 2 or len(whole) != sum(lengths):
                raise self.fault(f"{layer}{name}_proj.weight has shape {list(whole.shape)}, not {sum(lengths)} rows")
            for part, tensor in zip(parts, whole.split(lengths), strict=True):
                self.tensors[f"{layer}{stem}{part}_proj.weight"] = tensor.clone()


def _same(own: Tensor, theirs: Tensor) -> bool:
    """Whether one is the other, or the other rounded to its dtype."""
    return torch.equal(own, theirs.to(own.dtype)) or torch.equal(own.to(theirs.dtype), theirs)
