"""The report of a run: `build` gathers what was trained, on what, and how well it drafts, into report/report.json and
a self-contained report/report.html; `table` is the same as text for a terminal.

Nothing local leaks: paths are relative to the run folder, other places are cut to their last part, tokens are masked.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import struct
import time
from pathlib import Path
from typing import Any

from headtrain.eval.report_cost import apply_costs
from headtrain.eval.report_data import comparisons, known
from headtrain.eval.report_words import (
    drafter_name,
    engine_flags,
    forecast,
    headline,
    identity,
    limits,
    next_steps,
    setting_words,
    suite_name,
    verdict,
)
from headtrain.files import read_header, read_json, sha256_file, write_json, write_text
from headtrain.privacy import public

SCHEMA_VERSION = 2  # docs/report.md has the fields and what changed
LIBRARIES = ("torch", "transformers", "deepspeed", "safetensors")
STAGES = ("prompts", "responses", "captures")
# A result without one of these cannot be placed or compared; the others may be null.
NEEDED = ("suite", "drafter", "temperature", "k", "tau", "steps")



class ReportError(ValueError):
    """A run whose report cannot be made; the message names what is missing."""


def build(run: str | Path, results: dict[str, Any]) -> dict[str, Any]:
    """Writes report/report.json and report/report.html of a run folder and returns the report.

    results: what evaluation ends with: "results" [one dict per suite, head, drafter, temperature, k, tree, batch]; may
    have "costs" (rows of `measure_costs`), "heads" [{id, path in the run folder}] (default: head/) and "left_out".
    A piece that a run does not have (no training log, no manifest) becomes null and a line of `warnings`; a number that
    is NaN or infinite becomes null likewise. ReportError when the head or the results are missing.
    """
    from headtrain.eval.report_page import page

    run, warnings = Path(run), []
    rows = _checked(results, warnings)
    config = _yaml(run / "config.yaml", warnings)
    heads = [_head(run, place) for place in results.get("heads") or [{"id": "head", "path": "head"}]]
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run": _run_name(run, config),
        "heads": [head for head, _ in heads],
        "target": _target(config, heads[0][1]),
        "results": rows,
        "cost": _finite(apply_costs(rows, results.get("costs") or []), "cost model", warnings),
        "left_out_of_evaluation": results.get("left_out") or {},
        "training": training_facts(run, config, warnings),
        "data": data_facts(run, config, warnings),
        "environment": environment(config),
        "exports": _exports(run, config),
        "warnings": warnings,
    }
    report = public(report, run)
    report["summary"] = {
        "headline": headline(report),
        "verdict": verdict(report),
        "identity": identity(report),
        "forecast": forecast(report),
        "limits": limits(report),
        "next": next_steps(report, public(config, run)),
        "engines": engine_flags(report),
    }
    (run / "report").mkdir(parents=True, exist_ok=True)
    write_text(run / "report" / "report.html", page(report))
    write_json(run / "report" / "report.json", report)  # last: whoever sees it finds the page too
    return report


# ------------------------------------------------------------------------------------------------ the pieces


def _checked(results: dict[str, Any], warnings: list[str]) -> list[dict[str, Any]]:
    """The results with every number finite or null; each null that was NaN is a warning."""
    rows = results.get("results")
    if not rows:
        if left_out := ", ".join(f"{n} {why}" for why, n in (results.get("left_out") or {}).items()):
            raise ReportError(f"there are no results to report, since all prompts were left out: {left_out}")
        raise ReportError("there are no results to report: run `headtrain eval` on the head first")
    clean = []
    for i, row in enumerate(rows):
        if absent := [key for key in NEEDED if key not in row]:
            raise ReportError(f"result {i} has no {', '.join(absent)}")
        name = f"{row['suite']}, {row['drafter']}, K = {row['k']}"
        clean.append({key: _finite(value, f"{name}: {key}", warnings) for key, value in row.items()})
    return clean


def _finite(value: Any, name: str, warnings: list[str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        warnings.append(f"{name} is not a number ({value}); left empty")
        return None
    if isinstance(value, list | tuple):
        return [_finite(item, name, warnings) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item, f"{name}.{key}", warnings) for key, item in value.items()}
    return value


def _yaml(path: Path, warnings: list[str]) -> dict[str, Any]:
    if not path.is_file():
        warnings.append(f"{path.name} is missing: settings of the run are unknown")
        return {}
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(path), resolve=True) or {}


def _run_name(run: Path, config: dict[str, Any]) -> str:
    """How commands should name the run: as the user did when that is relative, else RUN_DIR."""
    for place in (config.get("run_dir"), run):
        if place and not Path(place).expanduser().is_absolute() and not str(place).startswith("~"):
            return str(place).rstrip("/")
    return "RUN_DIR"


def _head(run: Path, place: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the report says of a head, and the head's own description."""
    folder = run / place["path"]
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ReportError(f"{folder / name} is missing: train the head first (headtrain train)")
    ours = read_json(folder / "config.json", "copy the head again").get("headtrain")
    if not isinstance(ours, dict):
        raise ReportError(f"{folder / 'config.json'} has no `headtrain` section, so it is no head of headtrain's")
    weights = folder / "model.safetensors"
    sizes = [math.prod(t["shape"]) for t in read_header(weights)[0].values() if t["dtype"] in ("F32", "BF16", "F16")]
    keys = ("taps", "unroll", "draft_vocab_size", "vocab_size", "hidden_size", "norm_before_residual", "freeze_lm_head")
    head = {"id": place["id"], "type": ours.get("type"), "path": place["path"], "sha256": sha256_file(weights)}
    head |= {"parameters": sum(sizes), "bytes": weights.stat().st_size, **{key: ours.get(key) for key in keys}}
    return head | {"suite_coverage": suite_coverage(run, weights)}, ours


def _target(config: dict[str, Any], head: dict[str, Any]) -> dict[str, Any]:
    section = config.get("target", {})
    out = {key: section.get(key) for key in ("model", "family", "revision", "dtype", "template_kwargs")}
    return out | {
        "layers": head.get("target_layers"),
        "hidden": head.get("target_hidden_size"),
        "vocab": head.get("vocab_size"),
        "max_position_embeddings": head.get("max_position_embeddings"),
    }


def training_facts(run: Path, config: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """The curves of training/log.jsonl, the chosen checkpoint (best.json) and the settings that made the head."""
    section = config.get("train", {})
    facts: dict[str, Any] = {key: section.get(key) for key in ("lr", "optimizer", "schedule", "objective", "precision")}
    facts |= dict.fromkeys(("steps", "epochs", "seconds", "tokens", "skipped", "accuracy", "valid_alpha", "best"))
    facts["curves"] = {}
    if not (run / "training").is_dir():
        warnings.append("there is no training folder: this run did not train the head, so how it was made is unknown")
        return facts
    path = run / "training" / "best.json"
    if path.is_file():
        facts["best"] = read_json(path)
    else:
        warnings.append("training/best.json is missing: which checkpoint was chosen is unknown")
    if facts["best"] and facts["best"].get("step") == 0:
        warnings.append("the chosen checkpoint is that of step 0: training never improved on the head it started from")
    trained, valid = _log(run / "training" / "log.jsonl", warnings)
    if trained:
        last = trained[-1]
        facts |= {"steps": last["step"], "epochs": last.get("epoch"), "seconds": last.get("elapsed_s")}
        facts |= {"tokens": sum(line.get("tokens", 0) for line in trained), "skipped": last.get("skipped")}
        facts["accuracy"] = last.get("accuracy_all")
    if valid:
        facts["valid_alpha"] = valid[-1].get("alpha")

    def curve(lines: list[dict[str, Any]], key: str) -> list[list[Any]]:
        return [[line["step"], line.get(key)] for line in lines]

    facts["curves"] = {"loss": curve(trained, "loss"), "accuracy": curve(trained, "accuracy_all")}
    facts["curves"] |= {"alpha": curve(valid, "alpha"), "tau": curve(valid, "tau")}
    return _finite(facts, "training", warnings)


def _log(path: Path, warnings: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training lines, validation lines) of the log, by step. A step logged twice counts with its last line."""
    if not path.is_file():
        warnings.append("training/log.jsonl is missing: there are no training curves")
        return [], []
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    broken = 0
    with open(path, encoding="utf-8") as handle:
        for text in handle:
            try:
                line = json.loads(text)
                found[(int(line["step"]), "loss" in line)] = line
            except (ValueError, KeyError, TypeError):
                broken += 1
    if broken:
        warnings.append(f"training/log.jsonl: {broken} lines could not be read")
    lines = [found[key] for key in sorted(found)]
    return [line for line in lines if "loss" in line], [line for line in lines if "loss" not in line and "tau" in line]


def data_facts(run: Path, config: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Counts and reasons of the data stages' manifests, and the numbers the headline needs."""
    facts: dict[str, Any] = {"stages": {}}
    for stage in STAGES if (run / "training").is_dir() else ():
        path = run / stage / "manifest.json"
        if not path.is_file():
            warnings.append(f"{stage}/manifest.json is missing: what went in and was left out there is unknown")
            continue
        manifest = read_json(path)
        facts["stages"][stage] = {key: manifest.get(key) for key in ("complete", "counts", "left_out", "on_policy")}
    counts = facts["stages"].get("responses", {}).get("counts") or {}
    section = config.get("data", {})
    given = (section.get("responses") or {}).get("backend", "local") == "given"
    # given answers that came as the target's own token ids are on-policy; the stage knows
    facts["on_policy"] = not given or facts["stages"].get("responses", {}).get("on_policy") is True
    facts["sources"] = [source.get("source") for source in section.get("prompts") or []]
    facts["responses_used"] = counts.get("train", counts.get("rows"))
    facts["response_tokens"] = counts.get("supervised_train")
    return facts


def suite_coverage(run: Path, weights: Path) -> dict[str, float]:
    """Per suite: the share of the target's own answer tokens that the draft vocabulary holds, a ceiling for alpha_1."""
    held = _draft_ids(weights)
    totals: dict[str, list[int]] = {}
    for path in sorted((run / "report" / "units").glob("acceptance-*.json")) if held is not None else []:
        unit = read_json(path)
        for row in unit["rows"]:
            if row.get("drafter") == "none" and unit["temperature"] == 0:
                total = totals.setdefault(unit["suite"], [0, 0])
                total[0] += sum(i in held for i in row["ids"])
                total[1] += len(row["ids"])
    return {suite: inside / tokens for suite, (inside, tokens) in totals.items() if tokens}


def _draft_ids(path: Path) -> set[int] | None:
    """The draft vocabulary's target ids (a mask `t2d`, or Medusa's list `token_map`); None with a full vocabulary."""
    header, base = read_header(path)
    name = next((name for name in ("t2d", "token_map") if name in header), None)
    if name is None:
        return None
    first, last = header[name]["data_offsets"]
    with open(path, "rb") as handle:
        handle.seek(base + first)
        data = handle.read(last - first)
    if name == "t2d":
        return {i for i, held in enumerate(data) if held}
    return {i for (i,) in struct.iter_unpack("<q", data)}


def _exports(run: Path, config: dict[str, Any]) -> list[dict[str, str]]:
    """Exports that lie in the run folder, and those that the run makes after this report."""
    there = {path.parent.name for path in (run / "export").glob("*/config.json")}
    planned = config.get("export", {}).get("formats") or []
    return [{"engine": name, "path": f"export/{name}"} for name in sorted(there | set(planned))]


def environment(config: dict[str, Any]) -> dict[str, Any]:
    """Versions and hardware; no host or user name."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    def installed(name):
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "headtrain": installed("headtrain"),
        "python": platform.python_version(),
        **{name: installed(name) for name in LIBRARIES},
        "system": platform.system(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": gpus,
        "training_threads": config.get("train", {}).get("threads"),
    }


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


# ------------------------------------------------------------------------------------------- for a terminal


def table(report: dict[str, Any], run: str | Path | None = None) -> str:
    """Acceptance and speed side by side, one block per suite and setting, then where everything lies.

    `run`: the run folder, put before the paths; without it they stay relative to it.
    """
    summary = report["summary"]
    blocks = [summary["headline"], *map(_block, comparisons(report["results"]))]
    blocks += [summary["verdict"], summary["identity"], *filter(None, [summary.get("forecast")])]
    blocks += [f"warning: {text}" for text in report["warnings"]]
    root = f"{run}/" if run is not None else ""
    places = [("head", root + head["path"]) for head in report["heads"]]
    places.append(("report", f"{root}report/report.html"))
    places += [("export", root + item["path"]) for item in report["exports"] if _made(run, item["path"])]
    blocks.append("\n".join(f"{name:<8}{place}" for name, place in places))
    return "\n\n".join(blocks)


def _made(run: str | Path | None, place: str) -> bool:
    """Whether an export lies there; a report is made before the exports that quote it."""
    return run is None or (Path(run) / place / "config.json").is_file()


def _block(group: dict[str, Any]) -> str:
    rows = group["drafters"]
    prompts = max((row["prompts"] or 0 for row in rows.values()), default=0)
    title = f"{suite_name(group['suite'])}: {prompts} prompts, {setting_words(group)}"
    header = ["", "τ", *(f"α{n}" for n in range(1, group["k"] + 1)), "tokens/s", "plain", "speed-up"]
    lines = [header]
    for name, row in rows.items():
        alpha = (row["alpha"] or []) if name != "none" else []
        cells = [drafter_name(name), number(row["tau"])]
        cells += [number(alpha[n] if n < len(alpha) else None) for n in range(group["k"])]
        speedup = 1.0 if name == "none" and known(row["tokens_per_s"]) else row["speedup"]
        cells += [number(row["tokens_per_s"], 1), number(row["plain_tokens_per_s"], 1)]
        lines.append([*cells, f"{number(speedup)}×" if known(speedup) else "–"])
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = [
        line[0].ljust(widths[0])
        + "".join("  " + cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines
    ]
    return "\n".join([title, *text])


def number(value: Any, digits: int = 2) -> str:
    """A number as the report shows it; a dash for what was not measured."""
    return f"{value:.{digits}f}" if known(value) else "–"
