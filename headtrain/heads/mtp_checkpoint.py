"""MTP modules in a target's checkpoint: found by their names, read, and written back without touching anything else.

transformers drops these tensors when it loads a target, so they are read from its safetensors files. A module is a
projection of two normed inputs, one decoder layer of the target's family, and a norm; families name them in three ways.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtrain import stored
from headtrain.config import TargetConfig
from headtrain.files import read_header
from headtrain.target import TargetError, model_path


@dataclass(frozen=True)
class Dialect:
    """Names of the module's tensors below `prefix` ({L}: the target's layers), and how engines feed it."""

    prefix: str
    fc: str
    embed_norm: str
    hidden_norm: str
    norm: str
    layer: str = ""  # of the decoder layer's tensors, below the prefix
    hidden_first: bool = False  # fc reads [hidden; embedding]
    skips_first: bool = False  # at position 0 the embedding counts as zero
    pre_norm: bool = False  # reads the target's last hidden state from before its final norm


DIALECTS = {
    "deepseek": Dialect("model.layers.{L}.", "eh_proj", "enorm", "hnorm", "shared_head.norm", skips_first=True),
    "qwen": Dialect("mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", layer="layers.0."),
    "mimo": Dialect(
        "model.mtp_layers.0.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm",
        hidden_first=True, skips_first=True, pre_norm=True,
    ),
}  # fmt: skip
NOT_READ = ("shared_head.head.weight", "embed_tokens.weight", "self_attn.rotary_emb.inv_freq")  # nor do engines
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EXPERT = re.compile(r"(.*mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


@dataclass
class Native:
    """A module as a checkpoint has it: tensors whose names begin with `prefix`, and the target's config.json."""

    dialect: str
    prefix: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]


def find(names: set[str], layers: int) -> tuple[str, str] | None:
    """(dialect, prefix) of the module among a checkpoint's tensor names; None where there is none."""
    for key, dialect in DIALECTS.items():
        tail = dialect.prefix.format(L=layers).removeprefix("model.") + dialect.fc + ".weight"
        for name in sorted(names):
            if name == tail or name.endswith(f".{tail}"):
                return key, name.removesuffix(dialect.fc + ".weight")
    return None


def locate_module(names: set[str], layers: int, where: str) -> tuple[str, str, list[str]]:
    """(dialect, prefix, names of its tensors). TargetError where there is no module, or more than one."""
    found = find(names, layers)
    if found is None:
        raise TargetError(
            f"{where} has no MTP layers (no model.layers.{layers}.eh_proj, mtp.fc or model.mtp_layers.0.input_proj in "
            "its safetensors files): train a head of another type, or a new module with head.init_from=scratch"
        )
    key, prefix = found
    layer = DIALECTS[key].layer
    second = prefix + layer.replace("0", "1")
    if not layer:
        second = re.sub(r"(\d+)\.$", lambda number: f"{int(number[1]) + 1}.", prefix)
    if any(name.startswith(second) for name in names):
        raise TargetError(
            f"{where} has several MTP modules ({prefix}* and {second}*), each for one draft position: only a single "
            "one, which drafts again from its own output, can be trained"
        )
    return key, prefix, [n for n in names if n.startswith(prefix) and n.removeprefix(prefix) not in NOT_READ]


def read_native(source: TargetConfig, layers: int) -> Native:
    """The module of a target's checkpoint. TargetError where there is none, or where it is quantised."""
    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    where, path, revision = f"target.model={source.model}", model_path(source), source.revision
    files = tensor_files(source)
    key, prefix, names = locate_module(set(files), layers, where)
    tensors = {}
    for file in sorted({files[name] for name in names}):
        with safe_open(cached_file(path, file, revision=revision), "pt") as handle:
            for name in sorted(n for n in names if files[n] == file):
                if (dtype := handle.get_slice(name).get_dtype()) not in DTYPES:
                    raise quantised(where, name, dtype)
                tensors[name] = handle.get_tensor(name)
    config = json.loads(Path(cached_file(path, "config.json", revision=revision)).read_text(encoding="utf-8"))
    return Native(key, prefix, tensors, config)


def quantised(where: str, name: str, dtype: str) -> TargetError:
    return TargetError(
        f"{where}: {name} is stored as {dtype}: a quantised MTP module cannot be trained; use a checkpoint in bfloat16"
    )


def tensor_files(source: TargetConfig) -> dict[str, str]:
    """Tensor name -> file, of a target's safetensors files."""
    path = model_path(source)
    try:
        return stored.tensor_files(path, source.revision)
    except OSError as error:
        raise TargetError(f"target.model={source.model}: {error}") from error


# ---------------------------------------------------------------------------------------------------- experts


def merged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as transformers computes with them: gate_up_proj [E, 2 I, H] and down_proj [E, H, I]."""
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    out = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
        else:
            out[name] = tensor
    for stem, each in experts.items():
        if any(each.get(e, {}).keys() != {"gate", "up", "down"} for e in range(len(each))):
            raise ValueError(f"{stem}*: an expert lacks its gate_proj, up_proj or down_proj, or a number is left out")
        ordered = [each[e] for e in range(len(each))]
        out[stem + "gate_up_proj"] = torch.stack([torch.cat([x["gate"], x["up"]]) for x in ordered])
        out[stem + "down_proj"] = torch.stack([x["down"] for x in ordered])
    return out


def split(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `merged`."""
    out = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if not stem.endswith("mlp.experts"):
            out[name] = tensor
            continue
        for e, expert in enumerate(tensor):
            parts = zip(("gate", "up"), expert.chunk(2), strict=True) if kind == "gate_up_proj" else [("down", expert)]
            out |= {f"{stem}.{e}.{part}_proj.weight": weight for part, weight in parts}
    return out


# ---------------------------------------------------------------------------------------------------- writing back


def places(head: Any, target: Path) -> dict[str, tuple[Path, int, dict[str, Any]]]:
    """Where a checkpoint has the tensors of an mtp head that came from it: name -> (file, where its tensors begin,
    header entry). ValueError names what does not fit."""
    if not head.config.native:
        raise ValueError(
            f"this module was trained from scratch: {target} has no MTP layers to write back, and no engine serves one "
            "on this target"
        )
    new, found, faults = head.trained_tensors(), {}, []
    for shard in sorted(target.glob("*.safetensors")):
        header, base = read_header(shard)
        here = {name: (shard, base, entry) for name, entry in header.items() if name in new}
        twice = sorted(here.keys() & found.keys())  # which of them an engine reads is not known
        faults += [f"{name} is in {found[name][0].name} and in {shard.name}: remove one" for name in twice]
        found |= here
    faults += [f"{name} is missing" for name in sorted(new.keys() - found.keys())]
    for name, (_, _, entry) in sorted(found.items()):
        if entry["shape"] != list(new[name].shape):
            faults.append(f"{name} has shape {entry['shape']}, not {list(new[name].shape)}")
        elif entry["dtype"] not in DTYPES:
            faults.append(f"{name} is quantised ({entry['dtype']})")
    if faults:
        raise ValueError(f"{target} is not the checkpoint that this module came from: " + "; ".join(faults))
    return found


def write_back(head: Any, target_folder: str | Path, out_folder: str | Path, readme: str = "") -> list[str]:
    """Writes the target's checkpoint with the module's trained tensors in it; returns their names.

    head: an mtp head that came from this checkpoint. Every file of the folder is there again: shards without a trained
    tensor as hard links (copies where the disk has none), the others with just the bytes of these tensors replaced, in
    the dtype they had. readme: appended to its README.md. out_folder is either complete or untouched. ValueError names
    what does not fit.
    """
    target, out = Path(target_folder), Path(out_folder)
    at = places(head, target)
    if out.exists():
        raise ValueError(f"{out} exists; write to a new folder")
    new = head.trained_tensors()

    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    changed = {shard for shard, _, _ in at.values()}
    try:
        for file in sorted(p for p in target.rglob("*") if p.is_file()):
            copy = part / file.relative_to(target)
            copy.parent.mkdir(parents=True, exist_ok=True)
            _place(file, copy, link=file.suffix == ".safetensors" and file not in changed)
        for name, (shard, base, entry) in at.items():
            with open(part / shard.name, "r+b") as handle:
                handle.seek(base + entry["data_offsets"][0])
                value = new[name].detach().cpu().to(DTYPES[entry["dtype"]]).contiguous()
                handle.write(value.flatten().view(torch.uint8).numpy().tobytes())
        if readme:
            with open(part / "README.md", "a", encoding="utf-8") as handle:
                handle.write(readme)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # gone already when it was renamed
    return sorted(new)


def _place(file: Path, copy: Path, link: bool) -> None:
    if link:
        try:
            os.link(file.resolve(), copy)
            return
        except OSError:  # another disk, or one without links
            pass
    shutil.copy2(file, copy)
