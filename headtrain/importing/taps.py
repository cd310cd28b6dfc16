"""Which taps a foreign EAGLE-3 head reads: its layer ids, in whichever numbering they stand (headtrain/engines.py)."""

from __future__ import annotations

from headtrain.engines import (
    SGLANG_FIRST_IS_1_SINCE,
    TESTED_VERSIONS,
    TapsError,
    check_taps,
    default_taps,
    release,
    sglang_numbering,
    taps_from_ids,
)
from headtrain.importing.foreign import Foreign
from headtrain.importing.keys import HeadImportError

KEY = "eagle_aux_hidden_state_layer_ids"
ALWAYS, SOMETIMES = "sglang", "sglang_first_is_1"


def settle_taps(f: Foreign, count: int, dialect: str) -> list[int]:
    """The head's taps, ascending. count: how many fc reads; dialect: vllm, sglang, trtllm, eagle.

    HeadImportError where the ids mean different taps to different readers and nothing says which are meant.
    """
    layers = f.target.config.num_hidden_layers
    given, f.taps = f.taps, None
    where = f"{f.keys.where}: {KEY}" if given is None else "taps"
    try:
        taps = _from_ids(f, layers, dialect) if given is None else check_taps(given, layers)
    except TapsError as error:
        raise HeadImportError(f"{where}: {error}") from error
    if len(taps) != count:
        raise f.fault(f"fc.weight reads {count} layers of the target, but the taps are {taps}; give taps=[…]")
    f.said.append(f"taps {taps} of {layers} layers" + ("" if given is None else ", as given"))
    return taps


def _from_ids(f: Foreign, layers: int, dialect: str) -> list[int]:
    top, nested = f.keys.ids(KEY), f.keys.section("eagle_config").ids(KEY)
    if nested is None and top is None:
        f.said.append(f"{KEY} is not in config.json: the default taps of every engine")
        return default_taps(layers)
    if dialect == "trtllm" and nested is not None:
        return taps_from_ids("tensorrt_llm", nested, layers)
    if top is None:
        return _nested(f, nested, layers, dialect)
    taps = taps_from_ids("vllm", top, layers)
    if nested is not None and taps not in _readings(nested, layers).values():
        raise f.keys.fault(
            KEY,
            f"={top} means taps {taps}, and eagle_config.{KEY}={nested} means {_readings(nested, layers)[ALWAYS]}; "
            "say which are meant with taps=[…]",
        )
    return taps


def _readings(ids: list[int], layers: int) -> dict[str, list[int] | None]:
    """The taps that SGLang's two rules make of nested ids; None where there are no such blocks."""
    found: dict[str, list[int] | None] = {}
    for rule in (ALWAYS, SOMETIMES):
        try:
            found[rule] = taps_from_ids(rule, ids, layers)
        except TapsError:
            found[rule] = None
    return found


def _nested(f: Foreign, ids: list[int], layers: int, dialect: str) -> list[int]:
    """Taps of ids that stand in eagle_config alone, where SGLang looks for them."""
    if dialect == "vllm":
        f.said.append(f"eagle_config.{KEY}={ids} is read as by vLLM's older runner; its newer one ignores it")
        return taps_from_ids("vllm", ids, layers)
    if f.engine_version is not None:
        version, f.engine_version = f.engine_version, None
        release(version)
        return taps_from_ids(sglang_numbering(version, f.target.config.model_type), ids, layers)
    always, sometimes = _readings(ids, layers).values()
    if always and sometimes and always != sometimes:
        raise f.keys.fault(
            f"eagle_config.{KEY}",
            f"={ids} is ambiguous: taps {always} where 1 is added to every id (TensorRT-LLM, and SGLang but for "
            f"DeepSeek-like targets from {SGLANG_FIRST_IS_1_SINCE} on), taps {sometimes} where 1 is added only if the "
            f"first id is 1 (there) or never (vLLM); settle it with taps={_list(always)} or taps={_list(sometimes)}, "
            f"or with the SGLang release it was made for, engine_version={TESTED_VERSIONS['sglang']}",
        )
    return always or sometimes or taps_from_ids(ALWAYS, ids, layers)  # the last says what is wrong with them


def _list(taps: list[int]) -> str:
    return "[" + ",".join(map(str, taps)) + "]"
