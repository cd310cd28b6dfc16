"""Export of EAGLE-3 heads to vLLM. The trained head's folder already has vLLM's names and shapes, so this is a check
against the contract, a cast, and a README with the command that serves it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from headtrain.engines import servable_name, serve_command
from headtrain.export import ExportError
from headtrain.export.contracts import FLOATS, faults, load_contract, notes
from headtrain.files import fsync_folder, read_json, sha256_file

OUR_FILES = {"config.json", "model.safetensors", "README.md", "manifest.json"}


def export(head_dir: Path, out_dir: Path, target_info: dict[str, Any], *, report: Path | None, dtype: str) -> Path:
    """See `headtrain.export.export`."""
    if dtype not in FLOATS:
        raise ExportError(f"export dtype {dtype!r} is unknown; there is: {', '.join(FLOATS)}")
    config, tensors = read_head(head_dir)
    kind = config.get("headtrain", {}).get("type")
    if kind != "eagle3":
        raise ExportError(f"{head_dir / 'config.json'}: headtrain.type={kind!r}; vllm takes: eagle3")
    contract = load_contract("vllm", kind)
    found = faults(contract, config, tensors) + target_faults(config, target_info)
    if found:
        raise ExportError(f"{head_dir} does not meet the contract of vLLM {contract['version']}:", found)
    tensors = {n: t.to(FLOATS[dtype]) if t.is_floating_point() else t for n, t in tensors.items()}
    config = {**config, "torch_dtype": dtype, **({"dtype": dtype} if "dtype" in config else {})}
    if found := faults(contract, config, tensors):  # float16 can overflow
        raise ExportError(f"{head_dir} cannot be written as {dtype}:", found)
    text = readme(config, target_info, measured(head_dir, report), contract["version"], dtype)
    return write_folder(out_dir, config, tensors, text)


def read_head(head_dir: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors of a head's folder; ExportError naming the file that is missing or broken."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in ("config.json", "model.safetensors"):
        if not (head_dir / name).is_file():
            raise ExportError(f"{head_dir} is not a head's folder: {name} is missing")
    try:
        config = read_json(head_dir / "config.json", "copy the head again")
        tensors = load_file(head_dir / "model.safetensors")
    except (ValueError, SafetensorError) as error:
        raise ExportError(f"{head_dir}: cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ExportError(f"{head_dir / 'config.json'}: holds a {type(config).__name__}, not an object")
    return config, tensors


def target_faults(config: dict[str, Any], target_info: dict[str, Any]) -> list[str]:
    """Where the head was made for another target than the one named."""
    theirs = {
        "vocab_size": config.get("vocab_size"),
        "hidden_size": config.get("target_hidden_size") or config.get("hidden_size"),
        "num_layers": config.get("headtrain", {}).get("target_layers"),
        "max_position_embeddings": config.get("max_position_embeddings"),
    }
    return [
        f"the target has {key} {target_info[key]}, but the head was made for {value}"
        for key, value in theirs.items()
        if target_info.get(key) is not None and target_info[key] != value
    ]


def measured(head_dir: Path, report: Path | None) -> dict[str, Any] | None:
    """The report's greedy chain of this head alone with the highest tau; None without a report about these weights."""
    path = report or head_dir.parent / "report" / "report.json"
    if not path.is_file():
        if report:
            raise ExportError(f"report={report}: no such file")
        return None
    content = read_json(path)
    mark = sha256_file(head_dir / "model.safetensors")
    ids = [head.get("id") for head in content.get("heads", []) if head.get("sha256") == mark]
    if not ids:
        if report:
            raise ExportError(f"report={report} is about other weights than {head_dir / 'model.safetensors'}")
        return None
    rows = [r for r in content["results"] if r["drafter"] == "head" and r.get("head") in (None, *ids)]
    rows = [r for r in rows if r["temperature"] == 0 and r.get("tree") == "chain" and _known(r.get("tau"))]
    return max(rows, key=lambda r: r["tau"]) if rows else None


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def readme(config: dict[str, Any], target_info: dict[str, Any], row: dict | None, version: str, dtype: str) -> str:
    """README.md of the export; `row` is the report's result to quote, if there is one."""
    ours = config["headtrain"]
    target = "TARGET" if target_info.get("adapter") else servable_name(target_info.get("model"))
    k = row["k"] if row else 3
    lines = [
        "# EAGLE-3 draft head for vLLM",
        "",
        f"Checked against vLLM {version}'s loader. Replace HEAD_FOLDER by the place of this folder"
        + (", and TARGET by the model the head was trained for:" if target == "TARGET" else ":"),
        "",
        "```",
        serve_command("vllm", target, "HEAD_FOLDER", k),
        "```",
        "",
        f"- taps: {ours['taps']} of {ours['target_layers']} blocks (residual stream after that many blocks)",
        f"- draft vocabulary: {config['draft_vocab_size']:,} of {config['vocab_size']:,} tokens",
        f"- trained to draft {ours['unroll']} tokens; num_speculative_tokens above is {k}",
        f"- weights: {dtype}; longest context: {config['max_position_embeddings']:,} positions",
    ]
    if row:
        lines.append(
            f"- expected acceptance length: {row['tau']:.2f} tokens per target forward on {row['suite']} "
            f"(tau = 1 + accepted / steps; {row.get('tree') or 'chain'}, K = {k}, greedy, {row['dtype']}, own decoder)"
        )
    if adapter := target_info.get("adapter"):
        lines.append(f"- TARGET is {target_info.get('model')} with the adapter {adapter} merged into it; serve it so")
    lines += [f"- {note}" for note in notes(config)]
    return "\n".join(lines) + "\n"


def write_folder(out_dir: Path, config: dict[str, Any], tensors: dict[str, Tensor], text: str) -> Path:
    """Writes everything beside out_dir, flushes it, and puts it in place with one rename."""
    from safetensors.torch import save_file

    if out_dir.exists():
        if not out_dir.is_dir():
            raise ExportError(f"{out_dir} is a file; name a folder")
        if strange := sorted(p.name for p in out_dir.iterdir() if p.name not in OUR_FILES):
            raise ExportError(f"{out_dir} holds other files ({', '.join(strange)}); name an empty or new folder")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    part = out_dir.with_name(f".{out_dir.name}.{os.getpid()}.part")
    aside = out_dir.with_name(f".{out_dir.name}.{os.getpid()}.old")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        (part / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
        (part / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        (part / "README.md").write_text(text, encoding="utf-8")
        for file in part.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        fsync_folder(part)
        with contextlib.suppress(FileNotFoundError):
            out_dir.rename(aside)
        part.rename(out_dir)
        fsync_folder(out_dir.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)
    return out_dir
