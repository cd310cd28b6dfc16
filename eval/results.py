"""From the units of an evaluation to the results that reports show: one per setting, all counts kept."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from headtrain.eval.acceptance import metrics, tau_interval
from headtrain.eval.evaluate import Run, Unit, unit_file
from headtrain.files import read_json

TIE_SHARE = 0.001  # near-ties above this share of the steps make a drafter not identical


def finish(units: list[Unit], folder: str | Path, heads: list[dict[str, str]] | None = None) -> dict[str, Any]:
    """{"results", "costs", "heads", "units", "left_out"}: one result per (kind, suite, temperature, batch, run).

    heads: {"id", "path"} of the measured heads, handed on to the report. ValueError names a missing unit.
    """
    groups: dict[tuple, list[dict[str, Any]]] = {}
    facts: dict[tuple, dict[str, Any]] = {}
    left_out: dict[str, set[str]] = {}
    costs: list[dict[str, Any]] = []
    for unit in units:
        file = unit_file(folder, unit.name)
        if not file.is_file():
            raise ValueError(f"{file} is missing: the evaluation is not finished; start it again")
        written = read_json(file)
        if unit.kind == "cost":
            costs += written["rows"]
            continue
        for row in written["rows"]:
            if "left_out" in row:
                left_out.setdefault(row["left_out"], set()).add(f"{unit.suite} {row['id']}")
                continue
            run = Run(row["drafter"], row["k"], row["tree"], row["head"])
            key = (unit.kind, unit.suite, unit.temperature, unit.batch, run)
            groups.setdefault(key, []).append(row)
            facts.setdefault(key, written)
    results = [_result(key, rows, groups[(*key[:4], Run())], facts[key]) for key, rows in groups.items()]
    return {
        "results": results, "costs": costs, "heads": heads or [], "units": len(units),
        "left_out": {why: len(ids) for why, ids in left_out.items()},
    }  # fmt: skip


def _result(key: tuple, rows: list[dict], plain: list[dict], facts: dict[str, Any]) -> dict[str, Any]:
    from headtrain.eval.speed import rates

    kind, suite, temperature, batch, run = key
    steps = [list(zip(row["drafted"], row["accepted"], strict=True)) for row in rows]
    speed, base = rates(rows), rates(plain)["tokens_per_s"]
    near_ties = sum(row["near_ties"] for row in rows)
    checked = [row["identical"] for row in rows if row["identical"] is not None]
    numbers = metrics(steps, run.k)
    identical = all(checked) and near_ties <= TIE_SHARE * numbers["steps"] if checked else None
    branches = any(row["nodes"] != row["drafted"] for row in rows)
    told = ["id", "prompt_tokens", "tokens", "finish", "drafted", "accepted", "total_s"] + ["nodes"] * branches
    return {
        "kind": kind, "suite": suite, **asdict(run), "temperature": temperature, "batch": batch,
        **{name: facts[name] for name in ("top_p", "top_k", "min_p", "rule", "dtype", "template", "max_new_tokens")},
        "prompts": len(rows),
        "accepted_per_step": [accepted for row in rows for accepted in row["accepted"]],
        "drafted_per_step": [drafted for row in rows for drafted in row["drafted"]],
        "nodes_per_step": [nodes for row in rows for nodes in row["nodes"]] if branches else None,
        "tokens": sum(row["tokens"] for row in rows), **numbers, "tau_ci": tau_interval(steps), **speed,
        **{name: sum(row[name] for row in rows) for name in ("draft_s", "verify_s", "prefill_s", "total_s")},
        "plain_tokens_per_s": base, "speedup": speed["tokens_per_s"] / base if speed["tokens_per_s"] and base else None,
        "identical_to_plain": identical, "near_ties": near_ties,
        "differences": [f"{row['id']} {note}" for row in rows for note in row["differences"]],
        "device": facts["device"], "concurrent_workers": facts["concurrent_workers"],
        "per_prompt": [{name: row[name] for name in told} | {"steps": len(row["drafted"])} for row in rows],
    }  # fmt: skip
