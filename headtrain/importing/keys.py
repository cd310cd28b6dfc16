"""What a foreign config.json says, key by key: with the type and range it must have, and the engines' defaults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headtrain.facts import ROPES, check_rope

NEEDED = object()
LARGEST = 2**24  # of any size: what is above is no size of a head but a broken file
ROPE_DEFAULTS = {"partial_rotary_factor": 1.0, "rotary_dim": None}  # what else may stand there, with no effect


class HeadImportError(ValueError):
    """A checkpoint that is not imported; the message names the file, and the key or tensor, and what to do."""


class Keys:
    """One object of a config.json. `where`: its file, and the path inside it, for messages; a null counts as absent.

    Every value that is not there and for which a default is taken is added to `said`.
    """

    def __init__(self, raw: dict[str, Any], where: str, said: list[str], prefix: str = ""):
        self.raw, self.where, self.said, self.prefix = raw, where, said, prefix

    def fault(self, key: str, problem: str) -> HeadImportError:
        return HeadImportError(f"{self.where}: {self.prefix}{key}{problem}")

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def _take(self, key: str, default: Any, fits, kind: str) -> Any:
        value = self.raw.get(key)
        if value is None:
            if default is NEEDED:
                raise self.fault(key, " is missing")
            if default is not None:
                self.said.append(f"{self.prefix}{key} is not in config.json: {default}, as engines assume")
            return default
        if not fits(value):
            raise self.fault(key, f"={_short(value)} must be {kind}")
        return value

    def whole(self, key: str, default: Any = NEEDED, most: int = LARGEST) -> int:
        kind = f"a whole number in 1 … {most}"
        return self._take(key, default, lambda v: type(v) is int and 1 <= v <= most, kind)

    def number(self, key: str, default: Any = NEEDED) -> float:
        fits = lambda v: type(v) in (int, float) and 0 < v <= 2**53  # noqa: E731
        return self._take(key, default, fits, "a number above 0")

    def flag(self, key: str, default: bool | None) -> bool | None:
        return self._take(key, default, lambda v: isinstance(v, bool), "true or false")

    def text(self, key: str) -> str | None:
        return self._take(key, None, lambda v: isinstance(v, str), "a string")

    def ids(self, key: str) -> list[int] | None:
        fits = lambda v: isinstance(v, list) and v and all(type(i) is int for i in v)  # noqa: E731
        return self._take(key, None, fits, "a list of whole numbers")

    def texts(self, key: str) -> list[str]:
        fits = lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v)  # noqa: E731
        return self._take(key, None, fits, "a list of strings") or []

    def section(self, key: str, needed: bool = False) -> Keys:
        default = NEEDED if needed else None
        inner = self._take(key, default, lambda v: isinstance(v, dict), "an object") or {}
        return Keys(inner, self.where, self.said, f"{self.prefix}{key}.")

    def must_be(self, key: str, value: Any, why: str) -> None:
        """Raises unless the key is absent or has this value."""
        found = self.raw.get(key)
        if found is not None and (found != value or isinstance(found, bool) != isinstance(value, bool)):
            raise self.fault(key, f"={_short(found)}: {why}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


# ------------------------------------------------------------------------------------------------- what heads share

PLAIN = (  # key, the one value heads can have, why
    ("hidden_act", "silu", "heads have SiLU in their MLP"),
    ("attention_bias", False, "heads have no biases"),
    ("mlp_bias", False, "heads have no biases"),
    ("partial_rotary_factor", 1.0, "heads turn all dimensions of queries and keys"),
)


def layer_sizes(keys: Keys) -> dict[str, Any]:
    """The settings of a HeadConfig that every head with a decoder layer has, from the keys of a Llama config."""
    for rule in PLAIN:
        keys.must_be(*rule)
    if (keys.has("sliding_window") and keys.raw.get("use_sliding_window") is not False) or set(
        keys.texts("layer_types")
    ) - {"full_attention"}:
        raise keys.fault("sliding_window", " or layer_types: heads see the whole text, and a window cannot be kept")
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    return {
        "hidden_size": hidden,
        "target_hidden_size": keys.whole("target_hidden_size", None) or hidden,
        "intermediate_size": keys.whole("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("num_key_value_heads", heads),
        "head_dim": keys.whole("head_dim", hidden // heads or NEEDED),
        "vocab_size": keys.whole("vocab_size"),
        "rms_norm_eps": float(keys.number("rms_norm_eps", 1e-6)),
        "rope": rope(keys),
        "max_position_embeddings": keys.whole("max_position_embeddings", 2048, 2**40),
    }


def rope(keys: Keys) -> dict[str, Any]:
    """rope_theta, rope_type and what scaling adds, from the old keys (rope_theta, rope_scaling), the new one
    (rope_parameters) or both. HeadImportError where they differ, or for a rope that heads do not have."""
    theta = {"rope_theta": keys.number("rope_theta")} if keys.has("rope_theta") else {}
    old, new = (_one_rope(keys.section(name)) for name in ("rope_scaling", "rope_parameters"))
    try:
        check_rope({**theta, "rope_scaling": old, "rope_parameters": new}, SimpleNamespace())
        if theta:
            check_rope({**theta, "rope_parameters": old}, SimpleNamespace())
    except ValueError as error:
        raise HeadImportError(f"{keys.where}: {error}") from error
    if old and new and old.keys() - new.keys() - {"rope_theta"}:
        raise keys.fault("rope_parameters", f"={new} lacks what rope_scaling={old} has; correct the wrong one")
    found = {**old, **theta, **new}
    if "rope_theta" not in found:
        found["rope_theta"] = keys.number("rope_theta", 10000.0)
    kind = found.setdefault("rope_type", "default")
    return {"rope_theta": found["rope_theta"], "rope_type": kind, **{k: found[k] for k in ROPES[kind] if k in found}}


def _one_rope(keys: Keys) -> dict[str, Any]:
    """A rope description whose type is called rope_type (`type` in old files) and whose values are numbers."""
    kinds = {keys.text(name) for name in ("type", "rope_type")} - {None}
    if not keys.raw:
        return {}
    kind = next(iter(kinds), "default")
    if len(kinds) > 1 or kind not in ROPES:
        raise keys.fault("rope_type", f" is {', '.join(sorted(kinds))}; heads have one of {', '.join(ROPES)}")
    found: dict[str, Any] = {"rope_type": kind}
    for key in keys.raw.keys() - {"type", "rope_type"}:
        if key in ROPE_DEFAULTS:
            keys.must_be(key, ROPE_DEFAULTS[key], "heads turn all dimensions of queries and keys")
        elif not keys.has(key):
            continue
        elif key == "truncate":
            found[key] = keys.flag(key, None)
        elif key in (*ROPES[kind], "rope_theta"):
            found[key] = keys.number(key)
        else:
            raise keys.fault(key, f"={_short(keys.raw[key])}: a rope of type {kind} has no such setting here")
    if missing := set(ROPES[kind]) - found.keys() - {"beta_fast", "beta_slow", "truncate"}:
        raise keys.fault(min(missing), f" is missing, which a rope of type {kind} needs")
    return found
