"""Engine contracts: which config keys and tensors a loader reads, and a check that a head's folder has just these.

vLLM does not report a missing tensor (it serves whatever was in memory), so completeness is checked here. A contract is
a JSON file beside this one; it says which release was read (`version`), what was run (`executed`), and which other one
it changes (`like`: null takes an entry away). Shapes are written in
symbols: H hidden, I intermediate, n heads, j key/value heads, D head_dim, V target vocabulary, R draft vocabulary,
T target hidden, A taps; `A*T` is a product. `{i}` in a name stands for every number of its range.
"""

from __future__ import annotations

import json
import math
import re
from importlib import resources
from itertools import product
from typing import Any

import torch
from torch import Tensor

from headtrain.engines import TapsError, default_taps, engine_ids

FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_TYPES = {"int": int, "float": (int, float), "bool": bool, "dict": dict, "list": list, "text": str}


def load_contract(engine: str, head_type: str) -> dict[str, Any]:
    """The contract of one engine for one head type; FileNotFoundError names the file that is not there."""
    name = f"contracts_{engine}_{head_type}.json"
    file = resources.files("headtrain.export") / name
    if not file.is_file():
        raise FileNotFoundError(f"headtrain/export/{name}: there is no contract of {engine} for {head_type} heads")
    own = json.loads(file.read_text(encoding="utf-8"))
    if "like" not in own:
        return own
    base = load_contract(*own["like"].split("_", 1))
    for key in ("config", "refused_config", "tensors"):
        merged = base[key] | own.get(key, {})
        own[key] = {name: rule for name, rule in merged.items() if rule is not None}
    return base | own


def faults(contract: dict[str, Any], config: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """Every way in which a head's config and tensors miss the contract, each naming its key or tensor; [] = none.

    Tensors are judged only where the config says what shape they have, so a wrong key is not reported twice.
    """
    found = config_faults(contract, config)
    found += tap_faults(contract, config)
    found += tensor_faults(contract, config, tensors)
    found += vocab_map_faults(config, tensors)
    return found


def lookup(config: dict[str, Any], path: str) -> Any:
    """The value at a dotted path; None where it is not there."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


# ----------------------------------------------------------------------------------------------------- config


def config_faults(contract: dict[str, Any], config: dict[str, Any]) -> list[str]:
    found = value_faults(contract["config"], config)
    refused = contract["refused_config"]
    found += [f"config.json: {key} must not be there: {why}" for key, why in refused.items() if key in config]
    return found + _training_faults(contract, config)


def value_faults(rules: dict[str, dict[str, Any]], config: dict[str, Any]) -> list[str]:
    """Keys (dotted where nested) that are missing, or whose value is not what their rule says."""
    found = []
    for key, rule in rules.items():
        why = f" ({rule['why']})" if "why" in rule else ""
        section, _, last = key.rpartition(".")
        place = (lookup(config, section) if section else config) or {}
        if last not in place:
            if not rule.get("optional"):
                found.append(f"config.json: {key} is missing{why}")
        elif problem := _value_problem(rule, place[last]):
            found.append(f"config.json: {key}={place[last]!r} {problem}{why}")
    return found


def _training_faults(contract: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Where the keys that engines read say something else than our own section, which records the training."""
    ours = config.get("headtrain", {})
    pairs = {key: (config.get(key), value) for key, value in ours.items() if key in config}
    if "rope_theta" in contract["config"]:
        pairs |= _rope_pairs(config, ours.get("rope", {}))
    return [
        f"config.json: {key}={written!r}, but the head was trained with {trained!r}"
        for key, (written, trained) in sorted(pairs.items())
        if written != trained
    ]


def _rope_pairs(config: dict[str, Any], trained_rope: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(written, trained) of every key about rope, in the old and the new spelling."""
    pairs = {"rope_theta": (config.get("rope_theta"), trained_rope.get("rope_theta"))}
    for key in set(config.get("rope_parameters") or {}) | set(trained_rope if "rope_parameters" in config else {}):
        pairs[f"rope_parameters.{key}"] = (config["rope_parameters"].get(key), trained_rope.get(key))
    scaled = trained_rope.get("rope_type", "default") != "default"
    for key in (set(trained_rope) - {"rope_theta"}) if scaled else ():
        pairs[f"rope_scaling.{key}"] = ((config.get("rope_scaling") or {}).get(key), trained_rope[key])
    if not scaled and config.get("rope_scaling") is not None:
        pairs["rope_scaling"] = (config["rope_scaling"], None)
    return pairs


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
    if "min" in rule:
        return None if value >= rule["min"] else f"must be {rule['min']} or more"
    if kind in ("int", "float") and not (math.isfinite(value) and value > 0):
        return "must be above 0"
    return None


def tap_faults(contract: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Whether every list of layer ids says what the head was trained on (`headtrain.taps`), in its engine's numbers."""
    lists = contract.get("taps")
    ours = config.get("headtrain", {})
    taps, blocks = ours.get("taps"), ours.get("target_layers")
    if not lists:
        return []
    if not taps or not blocks:
        return ["config.json: headtrain.taps and headtrain.target_layers are needed to check the layer ids"]
    try:
        expected = {key: engine_ids(numbering, taps, blocks) for key, numbering in lists.items()}
        default = taps == default_taps(blocks) if blocks >= 7 else False
    except TapsError as error:
        return [f"config.json: headtrain.taps: {error}"]
    found = []
    there = {key for key in lists if lookup(config, key) is not None}
    reads = contract.get("reads")
    if reads and reads not in there and (there or not default):
        found.append(f"config.json: {reads} is missing; the engine would take other layers than the taps {taps}")
    for key in there:
        if (ids := list(lookup(config, key))) != expected[key]:
            found.append(f"config.json: {key}={ids} must be {expected[key]} for taps {taps}")
    if len(taps) != 3 and config.get("num_aux_hidden_states") != len(taps):
        found.append(f"config.json: num_aux_hidden_states must be {len(taps)}, the number of taps (engines assume 3)")
    return sorted(found)


# ---------------------------------------------------------------------------------------------------- tensors


def expected_tensors(contract: dict[str, Any], config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """name -> {shape: tuple of int, dtype, …}, for this config. KeyError if a size is missing.

    `when` says of a tensor what it is there for: a draft vocabulary smaller than the target's (`reduced`), the head's
    own embedding, an lm_head for each of its depths or one for all.
    """
    sizes = {symbol: lookup(config, key) for symbol, key in contract["symbols"].items()}
    ours, shared = config.get("headtrain", {}), bool(config.get("original_lm_head"))
    sizes["T"] = config.get("target_hidden_size") or sizes["H"]
    sizes["A"] = len(ours.get("taps") or config.get("eagle_aux_hidden_state_layer_ids") or "123")
    flags = {
        None: True, "reduced": sizes.get("R") != sizes["V"], "lm_head_each": not shared, "lm_head_shared": shared,
        "own_embedding": bool(ours.get("own_embedding") or config.get("embed_requires_grad")),
    }  # fmt: skip
    ranges = {letter: range(first, lookup(config, end)) for letter, (first, end) in contract.get("ranges", {}).items()}

    def multiplied(dimension: str) -> int:
        return math.prod(sizes[s] if s in sizes else int(s) for s in dimension.split("*"))

    found = {}
    for pattern, rule in contract["tensors"].items():
        letters = re.findall(r"\{(\w)\}", pattern) if flags[rule.get("when")] else None
        for numbers in product(*(ranges[letter] for letter in letters)) if letters is not None else ():
            at = dict(zip(letters, numbers, strict=True))
            found[pattern.format(**at)] = {
                "dtype": "float", **rule, "shape": tuple(map(multiplied, rule["shape"])),
                "same": rule["same"].format(**at) if "same" in rule else None,
            }  # fmt: skip
    return found


def tensor_faults(contract: dict[str, Any], config: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    needed = [*contract["symbols"].values(), *(end for _, end in contract.get("ranges", {}).values())]
    if any(not isinstance(size := lookup(config, key), int) or size < 1 for key in needed):
        return []  # reported as config faults
    expected = expected_tensors(contract, config)
    found = [f"tensor {name} is missing" for name in expected if name not in tensors]
    found += [f"tensor {name} is not one the engine knows" for name in sorted(tensors.keys() - expected.keys())]
    declared = FLOATS.get(config.get("torch_dtype"))
    for name, rule in expected.items():
        if name in tensors:
            found += _one_tensor(name, tensors[name], rule, declared)
            if rule["same"] in tensors and not torch.equal(tensors[name], tensors[rule["same"]]):
                found.append(f"tensor {name} must equal {rule['same']}: not all engines apply the same one")
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
        elif "zeros" in rule and bool(tensor.any()):
            found.append(f"tensor {name} must be zero: {rule['zeros']}")
        elif tensor.dim() > 1 and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
            found.append(f"tensor {name} holds {float(tensor.flatten()[0]):g} everywhere: it was never trained")
    elif dtype != rule["dtype"]:
        found.append(f"tensor {name} has dtype {dtype}, expected {rule['dtype']}")
    return found


def vocab_map_faults(config: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """d2t holds offsets (target_id = draft_id + d2t[draft_id]) to ascending target ids, and t2d marks exactly those;
    token_map holds ascending target ids themselves."""
    d2t, t2d, vocab = tensors.get("d2t"), tensors.get("t2d"), config.get("vocab_size")
    ids = tensors.get("token_map")
    if ids is not None and ids.dtype == torch.int64 and ids.dim() == 1 and isinstance(vocab, int) and not _ascend(
        ids, vocab
    ):
        return [f"tensor token_map must ascend within 0 … {vocab - 1}"]
    if d2t is None or d2t.dtype != torch.int64 or d2t.dim() != 1 or not isinstance(vocab, int):
        return []  # a missing or mis-typed d2t is reported by name elsewhere
    ids = torch.arange(len(d2t)) + d2t
    sound = _ascend(ids, vocab)
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
    return _ascend(d2t, vocab) and (marks is None or (bool(marks[d2t].all()) and int(marks.sum()) == len(d2t)))


def _ascend(ids: Tensor, vocab: int) -> bool:
    return len(ids) > 0 and bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab
