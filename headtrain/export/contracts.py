"""Engine contracts: which config keys and tensors a loader reads, and a check that a head's folder has just these.

vLLM does not report a missing tensor (it serves whatever was in memory), so completeness is checked here. A contract is
a JSON file beside this one. Its shapes are written in symbols: H hidden, I intermediate, n heads, j key/value heads,
D head_dim, V target vocabulary, R draft vocabulary, T target hidden, A taps; `A*T` is a product.
"""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from headtrain.engines import TapsError, default_taps, engine_ids, sglang_rules_agree

FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_TYPES = {"int": int, "float": (int, float), "bool": bool, "dict": dict, "list": list}


def load_contract(engine: str, head_type: str) -> dict[str, Any]:
    """The contract of one engine for one head type; FileNotFoundError names the file that is not there."""
    name = f"contracts_{engine}_{head_type}.json"
    file = resources.files("headtrain.export") / name
    if not file.is_file():
        raise FileNotFoundError(f"headtrain/export/{name}: there is no contract of {engine} for {head_type} heads")
    return json.loads(file.read_text(encoding="utf-8"))


def faults(contract: dict[str, Any], config: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """Every way in which a head's config and tensors miss the contract, each naming its key or tensor; [] = none.

    Tensors are judged only where the config says what shape they have, so a wrong key is not reported twice.
    """
    found = config_faults(contract, config)
    found += tap_faults(config)
    found += tensor_faults(contract, config, tensors)
    found += vocab_map_faults(config, tensors)
    return found


# ----------------------------------------------------------------------------------------------------- config


def config_faults(contract: dict[str, Any], config: dict[str, Any]) -> list[str]:
    found = []
    for key, rule in contract["config"].items():
        why = f" ({rule['why']})" if "why" in rule else ""
        if key not in config:
            if not rule.get("optional"):
                found.append(f"config.json: {key} is missing{why}")
        elif problem := _value_problem(rule, config[key]):
            found.append(f"config.json: {key}={config[key]!r} {problem}{why}")
    refused = contract["refused_config"]
    found += [f"config.json: {key} must not be there: {why}" for key, why in refused.items() if key in config]
    return found + _training_faults(config)


def _training_faults(config: dict[str, Any]) -> list[str]:
    """Where the keys that engines read say something else than our own section, which records the training."""
    ours = config.get("headtrain", {})
    pairs = {key: (config.get(key), value) for key, value in ours.items() if key in config}
    trained_rope = ours.get("rope", {})
    pairs["rope_theta"] = (config.get("rope_theta"), trained_rope.get("rope_theta"))
    for key in set(config.get("rope_parameters") or {}) | set(trained_rope if "rope_parameters" in config else {}):
        pairs[f"rope_parameters.{key}"] = (config["rope_parameters"].get(key), trained_rope.get(key))
    scaled = trained_rope.get("rope_type", "default") != "default"
    for key in (set(trained_rope) - {"rope_theta"}) if scaled else ():
        pairs[f"rope_scaling.{key}"] = ((config.get("rope_scaling") or {}).get(key), trained_rope[key])
    if not scaled and config.get("rope_scaling") is not None:
        pairs["rope_scaling"] = (config["rope_scaling"], None)
    return [
        f"config.json: {key}={written!r}, but the head was trained with {trained!r}"
        for key, (written, trained) in sorted(pairs.items())
        if written != trained
    ]


def _value_problem(rule: dict[str, Any], value: Any) -> str | None:
    if value is None:
        return None if rule.get("null") else "must not be null"
    if "value" in rule:
        return None if type(value) is type(rule["value"]) and value == rule["value"] else f"must be {rule['value']!r}"
    if "choices" in rule:
        return None if value in rule["choices"] else f"must be one of {', '.join(rule['choices'])}"
    kind = rule["type"]
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
        return f"must be of type {kind}"
    if kind in ("int", "float") and not (math.isfinite(value) and value > 0):
        return "must be above 0"
    return None


def tap_faults(config: dict[str, Any]) -> list[str]:
    """Whether both lists of layer ids say what the head was trained on (`headtrain.taps`)."""
    ours = config.get("headtrain", {})
    taps, blocks = ours.get("taps"), ours.get("target_layers")
    if not taps or not blocks:
        return ["config.json: headtrain.taps and headtrain.target_layers are needed to check the layer ids"]
    try:
        expected = engine_ids("vllm", taps, blocks)
        others = engine_ids("sglang", taps, blocks)
        fallback = default_taps(blocks) if blocks >= 7 else None
    except TapsError as error:
        return [f"config.json: headtrain.taps: {error}"]
    found = []
    ids, key = config.get("eagle_aux_hidden_state_layer_ids"), "eagle_aux_hidden_state_layer_ids"
    nested = (config.get("eagle_config") or {}).get(key)
    if ids is None and nested is not None:
        found.append(f"config.json: {key} is missing; vLLM would read eagle_config.{key}, which counts otherwise")
    elif ids is None and expected != fallback:
        found.append(f"config.json: {key} is missing; the taps {expected} are not the engine's default {fallback}")
    elif ids is not None and list(ids) != expected:
        found.append(f"config.json: {key}={ids} must be {expected} for taps {taps}")
    if nested is not None and list(nested) != others:
        found.append(f"config.json: eagle_config.{key}={nested} must be {others} for taps {taps} (counted from 0)")
    if len(taps) != 3 and config.get("num_aux_hidden_states") != len(taps):
        found.append(f"config.json: num_aux_hidden_states must be {len(taps)}, the number of taps (engines assume 3)")
    return found


def notes(config: dict[str, Any]) -> list[str]:
    """What a user of other engines should know about this folder; printed in the export's README."""
    ours = config["headtrain"]
    if sglang_rules_agree(ours["taps"], ours["target_layers"]):
        return []
    return [
        "SGLang: some releases add 1 to the layer ids only if the first one is 1. Those read this head's taps wrongly; "
        "use a release that always adds 1."
    ]


# ---------------------------------------------------------------------------------------------------- tensors


def expected_tensors(contract: dict[str, Any], config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """name -> {shape: tuple of int, dtype}, for this config. KeyError if a size is missing.

    `reduced` tensors are there only with a draft vocabulary smaller than the target's.
    """
    sizes = {symbol: config[key] for symbol, key in contract["symbols"].items()}
    sizes["T"] = config.get("target_hidden_size") or sizes["H"]
    sizes["A"] = len(config.get("headtrain", {}).get("taps") or config.get("eagle_aux_hidden_state_layer_ids") or "123")
    flags = {None: True, "reduced": sizes["R"] != sizes["V"]}

    def product(dimension: str) -> int:
        return math.prod(sizes[s] if s in sizes else int(s) for s in dimension.split("*"))

    return {
        name: {"shape": tuple(map(product, rule["shape"])), "dtype": rule.get("dtype", "float")}
        for name, rule in contract["tensors"].items()
        if flags[rule.get("when")]
    }


def tensor_faults(contract: dict[str, Any], config: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    if any(not isinstance(config.get(key), int) or config[key] < 1 for key in contract["symbols"].values()):
        return []  # reported as config faults
    expected = expected_tensors(contract, config)
    found = [f"tensor {name} is missing" for name in expected if name not in tensors]
    found += [f"tensor {name} is not one the engine knows" for name in sorted(tensors.keys() - expected.keys())]
    declared = FLOATS.get(config.get("torch_dtype"))
    for name, rule in expected.items():
        if name in tensors:
            found += _one_tensor(name, tensors[name], rule, declared)
    return found


def _one_tensor(name: str, tensor: Tensor, rule: dict[str, Any], declared: torch.dtype | None) -> list[str]:
    found = []
    if tuple(tensor.shape) != rule["shape"]:
        turned = " (it is transposed)" if tensor.shape != () and tuple(tensor.shape[::-1]) == rule["shape"] else ""
        found.append(f"tensor {name} has shape {list(tensor.shape)}, expected {list(rule['shape'])}{turned}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if rule["dtype"] == "float":
        if dtype not in FLOATS:
            found.append(f"tensor {name} has dtype {dtype}, expected one of {', '.join(FLOATS)}")
        elif declared is not None and tensor.dtype != declared:
            stated = str(declared).removeprefix("torch.")
            found.append(f"tensor {name} has dtype {dtype}, but config.json says torch_dtype {stated}")
        if tensor.is_floating_point() and (bad := int((~torch.isfinite(tensor)).sum())):
            found.append(f"tensor {name} has {bad} values that are NaN or infinite")
    elif dtype != rule["dtype"]:
        found.append(f"tensor {name} has dtype {dtype}, expected {rule['dtype']}")
    return found


def vocab_map_faults(config: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """d2t holds offsets (target_id = draft_id + d2t[draft_id]) to ascending target ids, and t2d marks exactly those."""
    d2t, t2d, vocab = tensors.get("d2t"), tensors.get("t2d"), config.get("vocab_size")
    if d2t is None or d2t.dtype != torch.int64 or d2t.dim() != 1 or not isinstance(vocab, int):
        return []  # a missing or mis-typed d2t is reported by name elsewhere
    ids = torch.arange(len(d2t)) + d2t
    sound = len(ids) > 0 and bool((ids >= 0).all()) and bool((ids < vocab).all()) and bool((ids.diff() > 0).all())
    marks = t2d if t2d is not None and t2d.dtype == torch.bool and t2d.shape == (vocab,) else None
    agrees = marks is None or (sound and int(marks.sum()) == len(ids) and bool(marks[ids].all()))
    if sound and agrees:
        return []
    if _looks_absolute(d2t, marks, vocab):
        return ["tensor d2t holds absolute target ids; it must hold offsets, target_id - draft_id"]
    if not sound:
        return [f"tensor d2t: draft_id + d2t[draft_id] must ascend within 0 … {vocab - 1}"]
    return ["tensor t2d does not mark exactly the target ids that d2t leads to"]


def _looks_absolute(d2t: Tensor, marks: Tensor | None, vocab: int) -> bool:
    within = bool((d2t >= 0).all()) and bool((d2t < vocab).all()) and bool((d2t.diff() > 0).all())
    return within and (marks is None or (bool(marks[d2t].all()) and int(marks.sum()) == len(d2t)))
