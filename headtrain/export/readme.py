"""README.md of an export: how to serve it, and what acceptance to expect."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from headtrain.engines import servable_name
from headtrain.expected import greedy_chain
from headtrain.export import ExportError
from headtrain.export.folder import Layout
from headtrain.export.model_card import name_of
from headtrain.export.refusals import NAMES
from headtrain.files import read_json, sha256_file

ENGINES = {
    "vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM", "llama_cpp": "llama.cpp",
    "speculators": "the speculators library", "eagle": "the original EAGLE code",
    "medusa": "the original Medusa code",
}  # fmt: skip


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
    rows = [row for row in content["results"] if any(greedy_chain(row, head) for head in ids)]
    return max((row for row in rows if _known(row.get("tau"))), key=lambda row: row["tau"], default=None)


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def expectation(row: dict[str, Any] | None) -> list[str]:
    """The line about expected acceptance, of a report's row."""
    if not row:
        return []
    return [
        f"- expected acceptance length: {row['tau']:.2f} tokens per target forward on {row['suite']} "
        f"(tau = 1 + accepted / steps; {row.get('tree') or 'chain'}, K = {row['k']}, greedy, {row['dtype']}, "
        "own decoder)"
    ]


def drafts(layout: Layout, row: dict[str, Any] | None) -> int:
    """K of the launch command: the measured one where there is one."""
    return layout.k or (row["k"] if row else min(3, layout.config["headtrain"]["unroll"]))


def readme(layout: Layout, info: dict[str, Any], row: dict[str, Any] | None) -> str:
    """info: see `headtrain.export.export`; row: the report's result to quote, if there is one."""
    ours, contract, k = layout.config["headtrain"], layout.contract, drafts(layout, row)
    target = "TARGET" if info.get("adapter") else servable_name(info.get("model"))
    engine = ENGINES[contract["engine"]]
    release = contract["version"] + (f", for {layout.version}" if layout.version != contract["version"] else "")
    lines = [
        f"# {NAMES[ours['type']]} draft head for {engine}",
        "",
        f"Checked against the loader of {engine} {release} (executed: {contract['executed']}).",
        "",
        "Replace HEAD_FOLDER by the place of this folder"
        + (", and TARGET by the model the head was trained for:" if target == "TARGET" else ":"),
        "",
        "```",
        layout.command(target, "HEAD_FOLDER", k),
        "```",
        "",
    ]
    if ours.get("taps"):
        blocks = f"{ours['target_layers']} blocks (residual stream after that many blocks)"
        lines.append(f"- taps: {ours['taps']} of {blocks}")
    lines += [
        f"- draft vocabulary: {ours['draft_vocab_size']:,} of {ours['vocab_size']:,} tokens",
        f"- trained with an unroll depth of {ours['unroll']}; the command drafts {k} tokens a step",
        f"- weights: {layout.config['torch_dtype']}; longest context: {ours['max_position_embeddings']:,} positions",
        *expectation(row),
    ]
    if adapter := info.get("adapter"):
        base = name_of(info["model"]) if info.get("model") else "the target it was trained for"
        lines.append(f"- TARGET is {base} with the adapter {name_of(adapter)} merged into it; serve it so")
    return "\n".join([*lines, *(f"- {note}" for note in layout.notes)]) + "\n"
