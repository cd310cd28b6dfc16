"""What a head takes over from its target's config: the sizes of attention and MLP, and rope, in the words of engines.
And what it keeps in mind of the target it was made for.

`config` is a transformers text config throughout, `raw` the content of a config.json.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from headtrain.config import TargetConfig
from headtrain.files import Manifest, fingerprint, read_json

log = logging.getLogger(__name__)

# The kinds of rope that heads and engines compute alike, and their keys besides rope_theta and rope_type. Other keys
# are the target's own affair: a head turns all of its dimensions, and YaRN's attention factor stays at its default.
ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
}
SENTENCE = "Hello, world!  12345 naïve façade\n\tif x == 1: return None  # ok 你好 🙂"  # tells tokenizers apart
LATENT_HEAD, MOST_KEY_HEADS = 64, 8  # of heads whose target's attention has no sizes to copy


def attention_sizes(config: Any) -> tuple[int, int, int]:
    """(query heads, key heads, head size) of a head of this target; the target's own where it has plain attention.

    Latent attention (MLA) has many thin heads over one latent, some families have none: there the head size is that of
    the target's values, and the query heads fill the hidden size.
    """
    heads, hidden = getattr(config, "num_attention_heads", None), config.hidden_size
    if heads and not getattr(config, "kv_lora_rank", None):
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        return heads, key_heads, getattr(config, "head_dim", None) or hidden // heads
    head_dim = min(getattr(config, "v_head_dim", None) or LATENT_HEAD, hidden)
    heads = hidden // head_dim
    return heads, max(j for j in range(1, MOST_KEY_HEADS + 1) if heads % j == 0), head_dim


def mlp_size(config: Any) -> int:
    """Width of a head's MLP: the target's, the largest where blocks differ, 4 hidden sizes where it says nothing."""
    size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return max(size) if isinstance(size, list | tuple) else size


def head_rope(config: Any) -> dict[str, Any]:
    """The rope of a head: rope_theta, rope_type and what scaling adds. A kind that is not in ROPES becomes plain."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if per_type := [value for value in rope.values() if isinstance(value, dict)]:
        rope = dict(rope.get("full_attention") or per_type[0])
    kind = rope.get("rope_type") or "default"
    if kind not in ROPES:
        log.info("the head has plain rope: %s, the target's, is not computed alike by all engines", kind)
        kind = "default"
    kept = {key: rope[key] for key in ROPES[kind] if rope.get(key) is not None}
    theta = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    return {"rope_theta": theta, "rope_type": kind, **kept}


def text_marks(tokenizer: Any) -> dict[str, str]:
    """What tells one tokenizer and one chat template from another: `tokenizer` and, if there is one, `chat_template`.

    A tokenizer counts by its words with their ids and by how it cuts a sentence, not by the files it comes in.
    """
    marks = {"tokenizer": fingerprint([tokenizer.get_vocab(), tokenizer.encode(SENTENCE, add_special_tokens=False)])}
    if template := getattr(tokenizer, "chat_template", None):
        marks["chat_template"] = fingerprint(template)
    return marks


def made_for(target: TargetConfig, run: Path, texts: dict[str, str]) -> dict[str, Any]:
    """What a head of this run is for, as kept in its config.json: the target's identity (no path of this machine), its
    number format, the words of its template, and what its captures hold.

    `doctor` compares it with what is served; engines do not read it.
    """
    made_from = Manifest(run / "captures").data.get("made_from", {})
    index = run / "captures" / "index.json"
    captures = read_json(index) if index.is_file() else {}
    return {
        "target": made_from.get("target", {}).get("identity"),
        "dtype": target.dtype,
        "template_kwargs": dict(target.template_kwargs),
        "captures": {key: captures.get(key) for key in ("dtype", "norm", "taps")},
        **texts,
    }


def check_rope(raw: dict[str, Any], config: Any) -> None:
    """ValueError where a config.json describes rope in the old and the new way and they differ.

    Warns where the target has rope and its config.json does not give rope_theta in any way.
    """
    found = []
    for level in (raw, raw.get("text_config") or {}):
        theta = {"rope_theta": level["rope_theta"]} if level.get("rope_theta") is not None else {}
        old = {**(level.get("rope_scaling") or {}), **theta}
        new = level.get("rope_parameters") or {}
        for key in old.keys() & new.keys():
            if old[key] != new[key]:
                where = key if key == "rope_theta" else f"rope_scaling.{key}"
                raise ValueError(
                    f"config.json gives {where}={old[key]} and rope_parameters.{key}={new[key]}; correct the wrong one"
                )
        found += [old.get("rope_theta"), new.get("rope_theta")]
        found += [value.get("rope_theta") for value in new.values() if isinstance(value, dict)]
    if getattr(config, "rope_parameters", None) and not any(found):
        theta = head_rope(config)["rope_theta"]
        log.warning("config.json has no rope_theta: %g is taken, the default of family %s", theta, config.model_type)


def tokens_of_start(taps: int, hidden: int) -> int:
    """How many tokens a fresh head is fitted to: those of a gigabyte of fp32 features, and 40,000 at least."""
    return max(40_000, (1 << 28) // (max(taps, 1) * hidden))
