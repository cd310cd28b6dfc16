"""Drafters, one file each: `make_drafter` builds one by the name that recipes and reports use."""

from __future__ import annotations

from dataclasses import dataclass

from headtrain.config import DRAFTERS, HEAD_DRAFTERS
from headtrain.eval.decoder.drafters.adaptive import AdaptiveDrafter
from headtrain.eval.decoder.drafters.base import Drafter, News
from headtrain.eval.decoder.drafters.draft_model import ModelDrafter
from headtrain.eval.decoder.drafters.head import HeadDrafter
from headtrain.eval.decoder.drafters.hybrid import HybridDrafter
from headtrain.eval.decoder.drafters.layer_skip import LayerSkipDrafter
from headtrain.eval.decoder.drafters.ngram import NgramDrafter
from headtrain.eval.decoder.drafters.ngram_map import NgramMapDrafter
from headtrain.eval.decoder.drafters.none import NoDrafter
from headtrain.eval.decoder.drafters.prompt_lookup import PromptLookupDrafter
from headtrain.eval.decoder.drafters.shape import TreeShape
from headtrain.eval.decoder.drafters.suffix import SuffixDrafter
from headtrain.eval.decoder.sampling import Sampling
from headtrain.heads.base import Head
from headtrain.target import Target

NAMES = ("none", *DRAFTERS)
FREE = tuple(name for name in NAMES if name not in HEAD_DRAFTERS)
HYBRID_SHORTEST = 2  # a single repeated token says less than the head does

__all__ = [
    "FREE", "NAMES", "Drafter", "Drafting", "HeadDrafter", "HybridDrafter", "News", "NgramDrafter", "NoDrafter",
    "make_drafter",
]  # fmt: skip


@dataclass(frozen=True)
class Drafting:
    """How to draft, for all drafters; each reads what is its own. None: the drafter's own default."""

    tree: str = "chain"  # heads: `chain`, `4x16` or `iid-2x8`
    draft_model: Target | None = None
    skip_from: int | None = None  # layer_skip: the number of the target's first layers that draft
    ngram_n: int | None = None  # n-gram drafters: tokens of a key (`ngram`: 3 down to 1 by default; maps: 3)
    ngram_m: int | None = None  # n-gram drafters: tokens of a draft at most (`ngram`: K by default; maps: 8)
    ngram_hits: int = 1  # n-gram maps: earlier occurrences that a key needs
    min_confidence: float = 0.0  # heads, draft_model, layer_skip: draft on while the confidences' product is this high
    plain_below: float = 0.0  # all: below this rolling acceptance a request decodes plainly; 0: never


def make_drafter(
    name: str,
    head: Head | None = None,
    sampling: Sampling | None = None,
    drafting: Drafting = Drafting(),
    target: Target | None = None,
) -> Drafter:
    """A drafter by its name (one of NAMES). `head`: for heads; `target`: for draft_model and layer_skip.

    ValueError names the known drafters, or says what the named one lacks.
    """
    if name not in NAMES:
        raise ValueError(f"drafter {name!r}: unknown; known drafters: {', '.join(NAMES)}")
    if name not in FREE and head is None:
        raise ValueError(f"drafter {name!r} needs a trained head; give one, or evaluate only {', '.join(FREE)}")
    drafter = _make(name, head, sampling or Sampling(), drafting, target)
    return AdaptiveDrafter(drafter, drafting.plain_below) if drafting.plain_below and name != "none" else drafter


def _make(name: str, head: Head | None, sampling: Sampling, drafting: Drafting, target: Target | None) -> Drafter:
    match name:
        case "none":
            return NoDrafter()
        case "prompt_lookup":
            return PromptLookupDrafter()
        case "suffix":
            return SuffixDrafter()
        case "ngram":
            return _ngram(drafting, shortest=1)
        case "ngram-map-k" | "ngram-map-k4v":
            sizes = {"n": drafting.ngram_n, "m": drafting.ngram_m}
            return NgramMapDrafter(name, hits=drafting.ngram_hits, **{k: v for k, v in sizes.items() if v is not None})
        case "layer_skip":
            if drafting.skip_from is None or target is None:
                raise ValueError("drafter 'layer_skip' needs the target and skip_from, how many of its layers draft")
            return LayerSkipDrafter(sampling, target, drafting.skip_from, drafting.min_confidence)
        case "draft_model":
            if drafting.draft_model is None or target is None:
                raise ValueError("drafter 'draft_model' needs the target and draft_model, a smaller one of its family")
            return ModelDrafter(sampling, target, drafting.draft_model, drafting.min_confidence)
    drafter = HeadDrafter(head, sampling, TreeShape.parse(drafting.tree), drafting.min_confidence)
    if name == "head":
        return drafter
    return HybridDrafter(drafter, _ngram(drafting, HYBRID_SHORTEST), in_one_tree=name == "head+ngram-tree")


def _ngram(drafting: Drafting, shortest: int) -> NgramDrafter:
    if drafting.ngram_n is None:
        return NgramDrafter(shortest, most=drafting.ngram_m)
    return NgramDrafter(drafting.ngram_n, drafting.ngram_n, drafting.ngram_m)
