"""Import of draft heads that others trained: `import_head(place, out, …)` makes a head folder of ours.

What a checkpoint is in shows in its config and its tensors' names (`detect`). A reader per head type turns both into
ours; files are opened by `weights`, config keys by `keys`, so that every fault is named; what a checkpoint does not say
gets the engines' default, and is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtrain.files import replacing, write_json
from headtrain.heads.base import Head, HeadConfig, check_tensors, head_class, load_head, section_config
from headtrain.heads.mtp_checkpoint import find
from headtrain.hub_read import head_folder, hub_id
from headtrain.importing import eagle, eagle3, medusa, mtp, weights
from headtrain.importing.foreign import Foreign
from headtrain.importing.keys import HeadImportError, Keys, rope

FORMATS = {
    "headtrain": "a head of ours, or an export of one",
    "eagle": "SafeAILab's EAGLE-1, -2 and -3",
    "sglang": "EAGLE-3 of SpecForge, for SGLang",
    "vllm": "EAGLE-3 and P-EAGLE for vLLM",
    "speculators": "EAGLE-3 and P-EAGLE of speculators",
    "trtllm": "EAGLE-3 of ModelOpt, for TensorRT-LLM",
    "medusa": "Medusa, in FasterDecoding's or vLLM's names",
    "mtp": "the MTP module of a target's own checkpoint",
}
MODELOPT = {rule[0] for rule in eagle3.ONLY_NESTED} - {"use_aux_hidden_state", "norm_before_fc"}
FILES = ["config.json", weights.INDEX, "*.safetensors"]
EAGLE3_MARKS = ("midlayer.", "layers.0.hidden_norm.")


@dataclass
class Imported:
    """What was imported: the folder, the head's type, the format it came in, and what its user should know."""

    folder: Path
    type: str
    format: str
    said: list[str]


def import_head(
    place: str,
    out: str | Path,
    format: str = "auto",
    target: str | None = None,
    taps: list[int] | None = None,
    engine_version: str | None = None,
) -> Imported:
    """Makes the head folder `out` of the checkpoint at `place`, a folder or a Hub id (`user/name@revision`).

    format: one of FORMATS, or auto. target: the model it drafts for (Hub id, folder, GGUF), where the checkpoint does
    not name it; only its config is read, but for what the head borrows. taps: which are meant, where its layer ids do
    not say so; engine_version: the SGLang release that its ids were written for.
    Tensors keep their values bit for bit. `out` is either complete or untouched. HeadImportError names the file, key
    or tensor that is wrong.
    """
    out, said = Path(out), []
    if format not in (*FORMATS, "auto"):
        raise HeadImportError(f"format={format}: unknown; there is auto, {', '.join(FORMATS)}")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise HeadImportError(f"out={out} exists; name a new folder")
    remote = hub_id(place) is not None and not Path(place).exists()
    folder = head_folder(place, ["config.json", weights.INDEX])  # no weights yet: it may be a whole target
    config = weights.read_object(folder / "config.json")
    if format == "auto":
        names = weights.listed(folder)
        if not remote or not names:
            folder = head_folder(place, FILES)
            names = set(weights.stored(folder))
        format = detect(config, names, str(folder))
    if format != "mtp" and config.get("quantization_config"):
        said.append("quantization_config is left out: it is another model's, the tensors here are not quantised")
    if format == "headtrain" and (folder / "adapter").is_dir():
        raise HeadImportError(f"{folder}: a head with an adapter of its target needs no import; use it as it is")
    if format == "mtp":
        head = mtp.read(place if remote else str(folder), said)
        unused = taps, engine_version
        tensors = {name: tensor.detach().contiguous() for name, tensor in head.portable_tensors().items()}
    else:
        folder = head_folder(place, FILES)
        f = Foreign(
            Keys(config, str(folder / "config.json"), said), weights.read(weights.stored(folder)), str(folder),
            target or _named_target(config), taps, engine_version, said,
        )  # fmt: skip
        head = _empty(_read(f, format), f)
        unused, tensors = (f.taps, f.engine_version), _one_dtype(f)
    for key, value in zip(("taps", "engine_version"), unused, strict=True):
        if value is not None:
            raise HeadImportError(f"{key}={value}: nothing of this checkpoint is unclear without it; leave it out")
    _write(out, head, tensors, {"format": format, "head": place if remote else folder.name, "said": said})
    return Imported(out, head.config.type, format, said)


def detect(config: dict[str, Any], names: set[str], where: str) -> str:
    """The format of a checkpoint with this config and these tensor names; HeadImportError where it is none."""
    bare = {name.removeprefix("model.") for name in names}
    nested = config.get("eagle_config") if isinstance(config.get("eagle_config"), dict) else {}
    key = "eagle_aux_hidden_state_layer_ids"
    if "headtrain" in config:
        return "headtrain"
    if "speculators_model_type" in config:
        return "speculators"
    if medusa.looks_like(names):
        return "medusa"
    if "fc.weight" in bare or any(name.startswith(EAGLE3_MARKS) for name in bare):
        if MODELOPT & nested.keys():
            return "trtllm"
        if config.get(key) is not None or any("mask_hidden" in name for name in names):
            return "vllm"
        return "sglang" if nested.get(key) is not None else "eagle"
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    if type(layers := text.get("num_hidden_layers")) is int and find(names, layers):
        return "mtp"
    seen = ", ".join(sorted(names)[:5])
    raise HeadImportError(
        f"{where}: no draft head that is known here (no fc.weight, no Medusa heads, no MTP module); its tensors: "
        f"{seen} … ({len(names)} in all)"
    )


def _read(f: Foreign, format: str) -> HeadConfig:
    if format == "headtrain":
        return _ours(f)
    if format == "medusa":
        return medusa.read(f)
    old = format == "eagle" and not any(n.removeprefix("model.").startswith(EAGLE3_MARKS) for n in f.tensors)
    return eagle.read(f) if old else eagle3.read(f, format)


def _ours(f: Foreign) -> HeadConfig:
    """The config that our own section records; the tensors may have another layout's names."""
    section = f.keys.section("headtrain", needed=True)
    config = section_config(section.raw, f.keys.where)
    config.rope = rope(Keys({"rope_parameters": config.rope}, f.keys.where, [], "headtrain."))
    for key in {"layers", "blocks", *(["unroll"] if config.type == "medusa" else [])} & section.raw.keys():
        section.whole(key, most=len(f.tensors))
    if config.type in ("eagle3", "peagle"):
        eagle3.rename(f, vars(config))
        eagle3.settle(f, config)
    elif config.type == "eagle":
        f.strip()
        eagle.settle(f)
    elif config.type == "medusa":
        medusa.rename(f)
        medusa.settle(f, config)
    return config


def _named_target(config: dict[str, Any]) -> str | None:
    """The target that a config names: speculators' verifier, the base model of a Medusa head."""
    if "speculators_config" in config:
        return eagle3.verifier(Keys(config, "config.json", []))
    base = config.get("base_model_name_or_path")
    return base if isinstance(base, str) else None


def _empty(config: HeadConfig, f: Foreign) -> Head:
    """A head of this config without storage, against which the tensors are checked."""
    try:
        with torch.device("meta"):
            head = head_class(config.type)(config)
            wanted = head.portable_tensors()
    except (RuntimeError, ValueError, TypeError, KeyError, ArithmeticError, AttributeError) as error:
        raise f.keys.fault("", f" describes no head that can be built ({error})") from error
    turned = [n for n, t in f.tensors.items() if n in wanted and t.shape != wanted[n].shape == t.shape[::-1]]
    if turned:
        raise f.fault(f"tensor {turned[0]} has shape {list(f.tensors[turned[0]].shape)}: it is transposed")
    check_tensors(wanted, f.tensors, f.where)
    for name, tensor in f.tensors.items():
        if tensor.is_floating_point() != wanted[name].is_floating_point():
            raise f.fault(f"tensor {name} is {tensor.dtype}, not like {wanted[name].dtype}")
    return head


def _one_dtype(f: Foreign) -> dict[str, Tensor]:
    """The tensors, all floating ones in one dtype: their own, or float32 where they differ."""
    kinds = {tensor.dtype for tensor in f.tensors.values() if tensor.is_floating_point()}
    if len(kinds) > 1:
        f.said.append("the tensors are of several dtypes: all are written in float32, which holds their values exactly")
    dtype = torch.float32 if len(kinds) > 1 else next(iter(kinds))
    return {n: (t.to(dtype) if t.is_floating_point() else t).contiguous() for n, t in f.tensors.items()}


def _write(out: Path, head: Head, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """The folder, once `load_head` has read it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    try:
        with replacing(out) as part:
            save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
            (part / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
            write_json(part / "config.json", head.portable_config(dtype))
            write_json(part / "import.json", record)
            load_head(part)
    except (OSError, SafetensorError) as error:
        raise HeadImportError(f"out={out}: cannot be written ({error})") from error
