"""The MTP module of a target's own checkpoint, as a head folder of ours."""

from __future__ import annotations

from pathlib import Path

import torch

from headtrain.config import HeadSection
from headtrain.heads.mtp import MtpHead
from headtrain.importing.foreign import source_of
from headtrain.importing.keys import HeadImportError
from headtrain.importing.weights import stored
from headtrain.target import load_parts


def read(place: str, said: list[str]) -> MtpHead:
    """The module of the checkpoint at `place`, a folder or a Hub id. TargetError where it has none."""
    if Path(place).is_dir():
        stored(Path(place))  # says which of its files is broken
    section = HeadSection(type="mtp", draft_vocab="full")
    parts = load_parts(source_of(place))
    head = MtpHead.fresh(section, parts)
    head.start_from(parts, torch.arange(len(parts.lm_head)), None, None)
    for name, tensor in head.trained_tensors().items():
        if not bool(torch.isfinite(tensor).all()):
            raise HeadImportError(f"{place}: tensor {name} has values that are NaN or infinite")
    said.append(f"unroll {section.unroll}, the default: no checkpoint says how deep training unrolled")
    return head
