"""Facts about engines: which layers each one means by a number, and the releases these facts were read from.

Everywhere in headtrain tap k (1 … L) is the residual stream after k blocks of a target with L blocks. Other numberings
are translated here and nowhere else. No engine and no torch is imported.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTED_VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23", "tensorrt_llm": "1.2", "llama_cpp": "b11434"}
EXPORT_FORMATS = {  # format: the engine whose releases it is about, None where there is no engine
    "eagle": None, "gguf": "llama_cpp", "medusa": None, "mtp": None, "sglang": "sglang", "speculators": None,
    "trtllm": "tensorrt_llm", "vllm": "vllm",
}  # fmt: skip


class TapsError(ValueError):
    """Taps that a target does not have, or that an engine cannot be told; the message says what to do."""


def release(text: str) -> tuple[int, ...]:
    """A release's numbers, for comparing: "0.32.0" -> (0, 32, 0), "b11434" -> (11434,). ValueError for other texts."""
    found = re.fullmatch(r"[bv]?(\d+(?:\.\d+)*)(?:\.?(?:a|b|rc|post|dev)\d*)*(?:\+[\w.]+)?", text)
    if not found:
        raise ValueError(f"engine_version={text}: this is no release, such as 0.32.0")
    return tuple(map(int, found[1].split(".")))


def default_taps(num_layers: int) -> list[int]:
    """[2, L//2, L-3], the trio every engine captures by default. Raises TapsError where they collide (L < 7)."""
    taps = [2, num_layers // 2, num_layers - 3]
    if min(taps) < 1 or not taps[0] < taps[1] < taps[2]:
        raise TapsError(
            f"the default taps {taps} of a target with {num_layers} blocks collide; set head.taps=[…] explicitly"
        )
    return taps


def check_taps(taps: Sequence[int], num_layers: int) -> list[int]:
    """The taps in ascending order, which is the order of the fc layer's column blocks in every engine.

    Raises TapsError for an empty list, a repeated tap, tap 0 (the embedding, before any block) or one beyond L.
    """
    taps = list(taps)
    if not taps:
        raise TapsError("head.taps is empty: name at least one of the target's blocks, 1 … " + str(num_layers))
    for tap in taps:
        if isinstance(tap, bool) or not isinstance(tap, int):
            raise TapsError(f"head.taps={taps}: {tap!r} is not a whole number")
        if not 1 <= tap <= num_layers:
            why = "0 would be the embedding, before any block" if tap == 0 else "there is no such block"
            raise TapsError(f"head.taps={taps}: {tap} is not allowed ({why}); the target has blocks 1 … {num_layers}")
    if len(set(taps)) < len(taps):
        raise TapsError(f"head.taps={taps}: a tap is named twice; engines drop the copy, and then fc does not fit")
    return sorted(taps)


SERVING = ("vllm", "sglang", "tensorrt_llm")  # engines for which a serve command is known
_VLLM = {  # speculative config, by type of head
    "eagle": {"method": "eagle"}, "eagle3": {"method": "eagle3"}, "medusa": {"method": "medusa"},
    "mtp": {"method": "mtp"}, "peagle": {"method": "eagle3", "parallel_drafting": True},
}  # fmt: skip
_SGLANG = {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN"}  # speculative algorithm
_TENSORRT = {"eagle3": "Eagle3", "mtp": "MTP"}  # decoding type


def serve_command(
    engine: str, target: str, head: str | None, k: int, *, head_type: str = "eagle3", width: int = 1,
    nodes: int | None = None, taps: Sequence[int] | None = None, layers: int | None = None,
) -> str:  # fmt: skip
    """The shell command that serves `target` with an exported head drafting k tokens a step; ValueError where there is
    none.

    head: its folder; None: inside the target's own (MTP). width, nodes: of a tree, the children of a node and the
    drafts verified (SGLang only; it counts the root as well). taps, layers: see `tensorrt_options`.
    """
    if engine == "vllm" and head_type in _VLLM:
        place = {"model": head} if head else {}
        spec = json.dumps({"method": "", **place, "num_speculative_tokens": k} | _VLLM[head_type])
        return f"vllm serve {target} --speculative-config {shlex.quote(spec)}"
    if engine == "sglang" and head_type in _SGLANG:
        place = shlex.quote(head) if head else target
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {_SGLANG[head_type]} "
            f"--speculative-draft-model-path {place} --speculative-num-steps {k} "
            f"--speculative-eagle-topk {width} --speculative-num-draft-tokens {(nodes or k) + 1}"
        )
    if engine == "tensorrt_llm" and head_type in _TENSORRT:
        text = tensorrt_options(head, k, head_type, taps, layers)
        return f"cat > speculative.yaml <<'END'\n{text}END\ntrtllm-serve {target} --config speculative.yaml"
    raise ValueError(
        f"no serve command is known for {head_type} heads in engine {engine!r}; known: {', '.join(SERVING)}"
    )


def serves(engine: str, head_type: str) -> bool:
    """Whether a serve command is known for heads of a type."""
    return head_type in {"vllm": _VLLM, "sglang": _SGLANG, "tensorrt_llm": _TENSORRT}.get(engine, {})


def format_of(engine: str) -> str:
    """The export format that an engine loads by the commands of `serve_command`."""
    return next(format for format, of in EXPORT_FORMATS.items() if of == engine)


def tensorrt_options(
    head: str | None, k: int, head_type: str = "eagle3", taps: Sequence[int] | None = None, layers: int | None = None
) -> str:
    """TensorRT-LLM's YAML file: which head drafts k tokens a step.

    taps, layers: the head's taps and the target's blocks; taps that are not the engine's default are named.
    """
    options = [f"decoding_type: {_TENSORRT[head_type]}", f"max_draft_len: {k}"]
    if head:
        options.append(f"speculative_model: {json.dumps(head)}")
    if taps and layers and (layers < 7 or list(taps) != default_taps(layers)):
        options.append(f"eagle3_layers_to_capture: {engine_ids('tensorrt_llm', taps, layers)}")
    return "".join(f"{line}\n" for line in ["speculative_config:", *(f"  {option}" for option in options)])


def servable_name(model: str | None) -> str:
    """The target as a serve command names it: a Hub id as it is; what lies on one machine only becomes TARGET."""
    model = model or ""
    return model if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).exists() else "TARGET"


# ------------------------------------------------------------------------------------------------ numberings


@dataclass(frozen=True)
class Numbering:
    """How one engine counts: `write` turns ascending taps into its ids, `read` its ids into the taps it captures."""

    name: str
    key: str  # where the engine looks for the ids; it counts blocks from 0
    write: Callable[[list[int]], list[int]]
    read: Callable[[list[int]], list[int]]
    note: str


def _same(taps: list[int]) -> list[int]:
    return list(taps)


def _ascending(ids: list[int]) -> list[int]:
    return sorted(set(ids))


def _minus_one(taps: list[int]) -> list[int]:
    return [tap - 1 for tap in taps]


def _plus_one(ids: list[int]) -> list[int]:
    return [i + 1 for i in ids]


def _read_if_first_is_1(ids: list[int]) -> list[int]:
    return _plus_one(ids) if ids[0] == 1 else list(ids)


def _write_if_first_is_1(taps: list[int]) -> list[int]:
    if taps[0] == 1:
        raise TapsError(
            f"taps {taps}: SGLang releases that add 1 only when the first id is 1 cannot be told to start at tap 1; "
            "choose another first tap or a release that always adds 1"
        )
    return _minus_one(taps) if taps[0] == 2 else list(taps)


TOP, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids"
_ALL = (
    Numbering("vllm", TOP, _same, _ascending, "id v is the input of block v, so v = k; sorted and made unique"),
    Numbering("llama_cpp", TOP, _same, _same, "exactly three ids, counted as vLLM does"),
    Numbering("sglang", NESTED, _minus_one, _plus_one, "releases that always add 1: id v is the output of block v"),
    Numbering(
        "sglang_first_is_1",
        NESTED,
        _write_if_first_is_1,
        _read_if_first_is_1,
        "releases that add 1 only when the first id is 1, and take the ids as taps otherwise",
    ),
    Numbering(
        "tensorrt_llm",
        "eagle3_layers_to_capture",
        _minus_one,
        lambda ids: _ascending(_plus_one(ids)),
        "launch option, a set of blocks counted from 0; never read from the head's folder",
    ),
)
NUMBERINGS = {numbering.name: numbering for numbering in _ALL}


def engine_ids(engine: str, taps: Sequence[int], num_layers: int) -> list[int]:
    """The ids that make `engine` (a key of NUMBERINGS) capture these taps of a target with `num_layers` blocks."""
    return _numbering(engine).write(check_taps(taps, num_layers))


def taps_from_ids(engine: str, ids: Sequence[int] | None, num_layers: int) -> list[int]:
    """The taps that `engine` captures when its key holds `ids`; None = the key is absent and the engine falls back."""
    if ids is None:
        return default_taps(num_layers)
    return check_taps(_numbering(engine).read(list(ids)), num_layers)


def sglang_rules_agree(taps: Sequence[int], num_layers: int) -> bool:
    """Whether one id list means the same taps to all SGLang releases; if not, an export has to state the release."""
    try:
        return engine_ids("sglang", taps, num_layers) == engine_ids("sglang_first_is_1", taps, num_layers)
    except TapsError:
        return False


# SGLang from 0.5.13 to 0.5.23, by its sources: families whose targets it captures by the rule of "sglang_first_is_1".
# All others, and earlier releases (0.5.11 to 0.5.12.post1 were read), always add 1.
SGLANG_FIRST_IS_1_SINCE = "0.5.13"
SGLANG_FIRST_IS_1 = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "kimi_k25",
)  # fmt: skip


def sglang_numbering(version: str, family: str | None) -> str:
    """The key of NUMBERINGS by which a release of SGLang reads layer ids for targets of a family (a model_type)."""
    changed = family in SGLANG_FIRST_IS_1 and release(version) >= release(SGLANG_FIRST_IS_1_SINCE)
    return "sglang_first_is_1" if changed else "sglang"


def _numbering(engine: str) -> Numbering:
    if engine not in NUMBERINGS:
        raise TapsError(f"no layer numbering is known for engine {engine!r}; known: {', '.join(sorted(NUMBERINGS))}")
    return NUMBERINGS[engine]
