"""Medusa heads: FasterDecoding's names (`0.0.linear.weight`, `0.1.weight`), vLLM's (`blocks`, `lm_heads`), and those
that lie between (`medusa_heads.0.0.linear.weight`)."""

from __future__ import annotations

import re

import torch

from headtrain.heads.medusa import MedusaConfig
from headtrain.importing.foreign import Foreign
from headtrain.importing.vocab import reorder

BLOCK = re.compile(r"(?:medusa_heads\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
ROWS = re.compile(r"(?:medusa_heads\.)?(\d+)\.(\d+)\.weight")
OURS = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


def looks_like(names: set[str]) -> bool:
    return any(pattern.fullmatch(name) for name in names for pattern in (BLOCK, OURS))


def read(f: Foreign) -> MedusaConfig:
    """The head's config, its sizes from the tensors; these are renamed in place."""
    keys = f.keys
    rename(f)
    first = f.tensors.get("blocks.0.layers.0.weight")
    rows = f.tensors.get("lm_heads.0.weight")
    if first is None or rows is None or rows.dim() != 2 or not len(rows):
        raise f.fault("blocks.0.layers.0.weight or lm_heads.0.weight is missing (0.0.linear.weight, 0.1.weight)")
    found = [OURS.fullmatch(name) for name in f.tensors]
    heads, blocks = (1 + max(int(match[n]) for match in found if match) for n in (1, 2))
    if heads * blocks > len(f.tensors):
        raise f.fault(f"the last of its tensors is of head {heads} and block {blocks}, and many before it are missing")
    _counts(f, heads, blocks)
    (draft, width), hidden = rows.shape, len(first)
    if width != hidden:
        raise f.fault(f"lm_heads.0.weight has shape {[draft, width]}, not {hidden} columns")
    vocab = keys.whole("vocab_size", None) or (draft if "token_map" not in f.tensors else f.target.config.vocab_size)
    sizes = {"vocab_size": vocab, "target_hidden_size": hidden}
    config = MedusaConfig(
        hidden_size=hidden, draft_vocab_size=draft, unroll=heads, blocks=blocks,
        share_lm_head=_shared(f, heads), **sizes, **f.made_for_target(sizes),
    )  # fmt: skip
    settle(f, config)
    return config


def _shared(f: Foreign, heads: int) -> bool:
    """Whether there is one lm_head for all heads; copies of it, one for each, are taken out."""
    copies = [f.tensors.get(f"lm_heads.{n}.weight") for n in range(heads)]
    if f.keys.flag("original_lm_head", None):
        return True
    if heads == 1 or not all(copy is not None and torch.equal(copy, copies[0]) for copy in copies):
        return False
    for n in range(1, heads):
        del f.tensors[f"lm_heads.{n}.weight"]
    f.said.append("all heads have the same lm_head: kept once")
    return True


def settle(f: Foreign, config: MedusaConfig) -> None:
    """Biases that are not there, and the draft vocabulary."""
    for head in range(config.unroll):
        for block in range(config.blocks):
            name = f"blocks.{head}.layers.{block}."
            if f"{name}bias" not in f.tensors and (weight := f.tensors.get(f"{name}weight")) is not None:
                f.tensors[f"{name}bias"] = weight.new_zeros(len(weight))
    ids = f.tensors.get("token_map")
    if ids is None and config.draft_vocab_size < config.vocab_size:
        raise f.fault(f"token_map is missing: which tokens the {config.draft_vocab_size} rows of lm_heads are")
    if ids is None:
        return
    if ids.dtype not in (torch.int64, torch.int32) or ids.shape != (config.draft_vocab_size,):
        raise f.fault(f"token_map is {ids.dtype} {list(ids.shape)}, not int64 [{config.draft_vocab_size}]")
    ids = ids.long()
    if bool(((ids < 0) | (ids >= config.vocab_size)).any()) or len(ids.unique()) < len(ids):
        raise f.fault(f"token_map: {len(ids)} different tokens in 0 … {config.vocab_size - 1} are needed")
    reorder(f, ids, [name for name in f.tensors if name.startswith("lm_heads.")])
    f.tensors["token_map"] = ids.sort().values
    if config.draft_vocab_size == config.vocab_size:
        del f.tensors["token_map"]


def rename(f: Foreign) -> None:
    for name in sorted(f.tensors):
        if match := BLOCK.fullmatch(name):
            f.rename(name, f"blocks.{match[1]}.layers.{match[2]}.{match[3]}")
        elif match := ROWS.fullmatch(name):
            f.rename(name, f"lm_heads.{match[1]}.weight")
        elif name == "lm_head.weight":
            f.rename(name, "lm_heads.0.weight")


def _counts(f: Foreign, heads: int, blocks: int) -> None:
    """What config.json counts, against the tensors: it may count too few, as released ones do, not too many."""
    for key, found in (("medusa_num_heads", heads), ("medusa_num_layers", blocks)):
        stated = f.keys.whole(key, None)
        if stated and stated > found:
            raise f.keys.fault(key, f"={stated}, but the tensors are of {found}; copy the weights again")
        if stated and stated < found:
            f.said.append(f"{key} is {stated} in config.json: {found}, which the tensors are of")
