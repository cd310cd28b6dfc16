"""Drafters, one file each: `make_drafter` builds one by the name that recipes and reports use."""

from __future__ import annotations

from headtrain.eval.decoder.drafters.base import Drafter, News
from headtrain.eval.decoder.drafters.head import HeadDrafter
from headtrain.eval.decoder.drafters.hybrid import HybridDrafter
from headtrain.eval.decoder.drafters.ngram import NgramDrafter
from headtrain.eval.decoder.drafters.none import NoDrafter
from headtrain.eval.decoder.sampling import Sampling
from headtrain.heads.base import Head

NAMES = ("none", "ngram", "head", "head+ngram")
HYBRID_SHORTEST = 2  # a single repeated token says less than the head does

__all__ = ["NAMES", "Drafter", "HeadDrafter", "HybridDrafter", "News", "NgramDrafter", "NoDrafter", "make_drafter"]


def make_drafter(name: str, head: Head | None = None, sampling: Sampling | None = None) -> Drafter:
    """`none`, `ngram`, `head` or `head+ngram`; ValueError names the known ones, or says that a head is missing."""
    if name not in NAMES:
        raise ValueError(f"drafter {name!r}: unknown; known drafters: {', '.join(NAMES)}")
    if name == "none":
        return NoDrafter()
    if name == "ngram":
        return NgramDrafter()
    if head is None:
        raise ValueError(f"drafter {name!r} needs a trained head; give one, or evaluate only none and ngram")
    drafter = HeadDrafter(head, sampling or Sampling())
    return drafter if name == "head" else HybridDrafter(drafter, NgramDrafter(shortest=HYBRID_SHORTEST))
