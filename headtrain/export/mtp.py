"""Export of a trained MTP module: the target's whole checkpoint with the module in it, as engines load the target.

Nothing else of the checkpoint changes but its README.md, which gets a section, and every tensor keeps its dtype. An
engine's format also checks that the engine knows the module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headtrain.config import TargetConfig
from headtrain.configload import load_resolved
from headtrain.engines import TESTED_VERSIONS, serve_command
from headtrain.export import ExportError
from headtrain.export.contracts import load_contract, value_faults
from headtrain.export.folder import HeadFolder
from headtrain.export.readme import ENGINES, expectation, measured
from headtrain.files import read_json

SERVED_BY = {"vllm": ["vllm"], "sglang": ["sglang"], "trtllm": ["tensorrt_llm"], "mtp": ["vllm", "sglang"]}


def export(
    head: HeadFolder, out_dir: Path, info: dict[str, Any], *, format: str, report: Path | None, dtype: str,
    version: str | None,
) -> Path:  # fmt: skip
    """See `headtrain.export.export`. The target is the one of the run that the head lies in."""
    from headtrain.heads.base import load_head
    from headtrain.heads.mtp_checkpoint import write_back

    if dtype != "bfloat16":
        raise ExportError(f"export dtype {dtype}: a module has the number format of its target; leave it out")
    if found := audit(head, info, format=format, version=version):
        raise ExportError(f"{head.path} does not go into the checkpoint of its target:", found)
    text = _readme(head, format, version, measured(head.path, report))
    try:
        write_back(load_head(head.path), _folder(head.path), out_dir, text)
    except OSError as error:
        raise ExportError(f"out={out_dir}: cannot be written ({error})") from error
    return out_dir


def audit(head: HeadFolder, info: dict[str, Any], *, format: str, version: str | None) -> list[str]:
    """See `headtrain.export.audit`. ExportError where there is no target to compare with."""
    from headtrain.heads.base import load_head
    from headtrain.heads.mtp_checkpoint import places

    folder = _folder(head.path)
    found = [
        f"tensor {name} has {bad} values that are NaN or infinite"
        for name, tensor in head.tensors.items()
        if tensor.is_floating_point() and (bad := int((~torch.isfinite(tensor)).sum()))
    ]
    try:
        places(load_head(head.path), folder)
    except ValueError as error:
        found.append(str(error))
    target = read_json(folder / "config.json", "download the target again")
    for engine in SERVED_BY[format] if format != "mtp" else ():
        found += _engine_faults(engine, head.ours["dialect"], target, version)
    return found


def _engine_faults(engine: str, dialect: str, target: dict[str, Any], version: str | None) -> list[str]:
    """What keeps an engine from running the module with a target of this config.json."""
    contract = load_contract(engine, "mtp")
    known, family = contract["dialects"][dialect], (target.get("text_config") or target).get("model_type")
    if contract.get("complete") and family not in known["families"]:
        every = sorted({f for names in contract["dialects"].values() for f in names["families"]})
        name = f"{ENGINES[engine]} {version or TESTED_VERSIONS[engine]}"
        return [f"{name} runs MTP modules of {', '.join(every)}, not of {family}; use format=vllm or format=sglang"]
    return value_faults(known["config"], (target.get("text_config") or {}) | target)


def _readme(head: HeadFolder, format: str, version: str | None, row: dict[str, Any] | None) -> str:
    k = row["k"] if row else min(3, head.ours["unroll"])
    lines = [
        "",
        "# Serving with the trained MTP module",
        "",
        f"This is the target's checkpoint; headtrain trained its MTP module ({head.ours['dialect']}) to draft "
        f"{head.ours['unroll']} tokens from its own output. Replace FOLDER by the place of this folder:",
        "",
    ]
    for engine in SERVED_BY[format]:
        contract = load_contract(engine, "mtp")
        lines += [
            f"{ENGINES[engine]} {version or contract['version']} (executed: {contract['executed']}):", "", "```",
            serve_command(engine, "FOLDER", None, k, head_type="mtp"), "```", "",
        ]  # fmt: skip
    return "\n".join([*lines, *expectation(row)]).rstrip("\n") + "\n"


def _folder(head_dir: Path) -> Path:
    """The folder of the target's checkpoint."""
    from transformers.utils.hub import cached_file

    from headtrain.target import model_path

    settings = head_dir.parent / "config.yaml"
    if not settings.is_file():
        raise ExportError(f"{head_dir} lies in no run folder ({settings} is missing), which says what its target is")
    target: TargetConfig = load_resolved(settings).target
    if target.adapter:
        raise ExportError(
            f"target.adapter={target.adapter}: the module was trained with it, and the checkpoint of {target.model} is "
            "without; merge it into the target first, and train on that"
        )
    return Path(cached_file(model_path(target), "config.json", revision=target.revision)).parent
