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


class TapsError(ValueError):
    """Taps that a target does not have, or that an engine cannot be told; the message says what to do."""


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


def serve_command(
    engine: str, target: str, head: str, k: int, *, width: int = 1, nodes: int | None = None,
    taps: Sequence[int] | None = None, layers: int | None = None,
) -> str:  # fmt: skip
    """The shell command that serves `target` with an exported EAGLE-3 head drafting k tokens a step.

    width, nodes: of a tree, the children of a node and the drafts verified (SGLang only; it counts the root as well).
    taps, layers: the head's taps and the target's blocks; TensorRT-LLM is told taps that are not its default.
    """
    if engine == "vllm":
        spec = json.dumps({"method": "eagle3", "model": head, "num_speculative_tokens": k})
        return f"vllm serve {target} --speculative-config {shlex.quote(spec)}"
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {shlex.quote(head)} --speculative-num-steps {k} "
            f"--speculative-eagle-topk {width} --speculative-num-draft-tokens {(nodes or k) + 1}"
        )
    if engine == "tensorrt_llm":
        options = ["decoding_type: Eagle3", f"max_draft_len: {k}", f"speculative_model: {json.dumps(head)}"]
        if taps and layers and (layers < 7 or list(taps) != default_taps(layers)):
            options.append(f"eagle3_layers_to_capture: {engine_ids(engine, taps, layers)}")
        lines = ["speculative_config:", *(f"  {option}" for option in options)]
        text = "\n".join(lines)
        return f"cat > speculative.yaml <<'END'\n{text}\nEND\ntrtllm-serve {target} --config speculative.yaml"
    raise ValueError(f"no serve command is known for engine {engine!r}; known: {', '.join(SERVING)}")


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


def _numbering(engine: str) -> Numbering:
    if engine not in NUMBERINGS:
        raise TapsError(f"no layer numbering is known for engine {engine!r}; known: {', '.join(sorted(NUMBERINGS))}")
    return NUMBERINGS[engine]
