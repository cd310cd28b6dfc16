"""Which taps a foreign EAGLE-3 head reads: its layer ids, in whichever numbering they stand (headtrain/engines.py)."""

from __future__ import annotations

from headtrain.engines import TESTED_VERSIONS, TapsError, check_taps, default_taps, taps_from_ids
from headtrain.importing.foreign import Foreign
from headtrain.importing.keys import HeadImportError

KEY = "eagle_aux_hidden_state_layer_ids"
ALWAYS, SOMETIMES = "sglang", "sglang_first_is_1"


def settle_taps(f: Foreign, count: int, dialect: str) -> list[int]:
    """The head's taps, ascending. count: how many fc reads; dialect: vllm, sglang, trtllm, eagle.

    HeadImportError where the ids mean different taps to different readers and nothing says which are meant.
    """
    layers, taps = f.target.config.num_hidden_layers, f.taps
    try:
        taps = check_taps(taps, layers) if taps is not None else _from_ids(f, layers, dialect)
    except TapsError as error:
        key = f"taps={taps}" if f.taps else f"{f.keys.where}: {KEY}"
        raise HeadImportError(f"{key}: {error}") from error
    if len(taps) != count:
        raise f.fault(f"fc.weight reads {count} layers of the target, but the taps are {taps}; give taps=[…]")
    return taps


def _from_ids(f: Foreign, layers: int, dialect: str) -> list[int]:
    top, nested = f.keys.ids(KEY), f.keys.section("eagle_config").ids(KEY)
    if nested is None and top is None:
        f.said.append(f"taps {default_taps(layers)}: no {KEY} in config.json, and every engine's default")
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
    found = _readings(ids, layers)
    always, sometimes = found[ALWAYS], found[SOMETIMES]
    if always is None and sometimes is None:
        return taps_from_ids(ALWAYS, ids, layers)  # says what is wrong with them
    if f.engine_version is not None:
        if f.engine_version != TESTED_VERSIONS["sglang"]:
            raise HeadImportError(
                f"engine_version={f.engine_version}: known is that SGLang {TESTED_VERSIONS['sglang']} adds 1 to every "
                "id; say which taps are meant with taps=[…]"
            )
        return taps_from_ids(ALWAYS, ids, layers)
    if dialect == "vllm":
        always, sometimes = taps_from_ids("vllm", ids, layers), None
        f.said.append(f"taps {always}: eagle_config.{KEY} as vLLM's older runner reads it; its newer one does not")
    if always and sometimes and always != sometimes:
        raise f.keys.fault(
            f"eagle_config.{KEY}",
            f"={ids} is ambiguous: taps {always} where 1 is added to every id (SGLang {TESTED_VERSIONS['sglang']}, "
            f"TensorRT-LLM), taps {sometimes} where 1 is added only if the first id is 1 (other SGLang releases, and "
            f"vLLM); settle it with taps={_list(always)} or taps={_list(sometimes)}, or with "
            f"engine_version={TESTED_VERSIONS['sglang']} for the former",
        )
    return always or sometimes


def _list(taps: list[int]) -> str:
    return "[" + ",".join(map(str, taps)) + "]"
