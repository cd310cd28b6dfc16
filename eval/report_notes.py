"""The report page's small print: every definition, every measurement, files and machine."""

from __future__ import annotations

from html import escape
from typing import Any

from headtrain.eval.acceptance import FORMULAS
from headtrain.eval.report_data import accepted_per_node, labels
from headtrain.eval.report_html import details, facts, joined, number, section, table, words
from headtrain.eval.report_words import drafter_name, model_name, suite_name, tree_words

SETTINGS = ("k", "temperature", "top_p", "top_k", "min_p", "rule", "dtype", "template", "max_new_tokens", "batch",
            "device")  # fmt: skip
SYMBOLS = {"tau": "τ", "alpha": "α_k", "alpha_conditional": "α_k, conditional"}

# What no formula of acceptance.py defines: every other figure and column of the page, by the words that stand there.
DEFINITIONS = {
    "accepted / drafted": "a tree counts as drafting its depth in each step, so that a chain compares",
    "accepted / nodes": "trees: accepted drafts / verified nodes; never to be held beside a chain's figures",
    "τ by domain, τ by temperature": "τ of each suite, or each temperature T, at otherwise equal settings",
    "τ by output depth": "τ of the steps that began after so many tokens of the answer; rare depths are left out",
    "tokens/s, tokens per second": "answer tokens / wall time, prefill included; plain: the same prompts, no drafts",
    "speed-up, speed-up by K, speed-up by batch": "tokens/s / plain; in the cost model without prefill",
    "where the time goes, verifying": "shares of the wall time: drafting is to propose and to take in what was "
    "settled, verifying is the target's forward and its verdict, the rest are prefill and bookkeeping",
    "cost of a step": "τ / speed-up, both of the timed answers: a drafted step in plain steps",
    "kind": "speed: plain and drafted in turn at batch 1; acceptance: batched, one after the other",
    "predicted, predicted at 32, predicted τ": "τ (v(1) + o) / (v(1 + drafted) + d + o). τ: the larger of two "
    "estimates from the steps at the largest K, truncated to min(accepted, K), or cut into as many steps of K drafts "
    "as their tokens need; v: a forward and d: drafting, timed at that batch; o: a plain step beside its forward",
    "measured, measured τ, error": "speed-up of a timed row, each run's prefill share taken out; predicted / it - 1",
    "best K, best K at 32": "the K with the largest predicted speed-up at that batch",
    "stops paying at": "the smallest batch whose best K is predicted slower than plain decoding; –: none up to 128",
    "oracle K": "predicted speed-up if every step drafted just what is accepted: a bound for stopping rules",
    "oracle bound": "the same with the best of all drafters at every token where one began a step",
    "plain forwards": "time of a forward of n positions per request / of one position, at the same batch and context",
    "identical": "token for token; where two logits are closer than 1e-4 of the largest, a near-tie is counted instead",
}  # fmt: skip


def definitions(report: dict[str, Any]) -> str:
    """A line for every number of the page, the settings they were measured with, and every measurement."""
    results = report["results"]
    rows = [(SYMBOLS.get(name, words(name)), formula) for name, formula in FORMULAS.items()]
    rows += DEFINITIONS.items()
    drafted = [row for row in results if row["drafter"] != "none"]
    values = {key: sorted({str(row[key]) for row in drafted if row.get(key) is not None}) for key in SETTINGS}
    values["mode"] = sorted({tree_words(row.get("tree") or "chain") for row in drafted})
    rows.append(
        ("measured with", "; ".join(f"{words(key)} {', '.join(found)}" for key, found in values.items() if found))
    )
    note = '<p class="soft">The counts of every single step are in report.json.</p>'
    every = details("Every measurement", _measurements(results), note)
    return section("How each number is defined", facts(rows), every)


def _measurements(results: list[dict[str, Any]]) -> str:
    header = (
        "suite", "drafter", "kind", "batch", "T", "K", "tree", "prompts", "steps", "accepted", "accepted / drafted",
        "accepted / nodes", "τ", "tokens/s", "plain", "speed-up",
    )  # fmt: skip
    names, rows = labels(results), []
    for r in results:
        named = [suite_name(r["suite"]), drafter_name(names[r["drafter"], r.get("head")])]
        rows.append([
            *map(escape, named), escape(str(r.get("kind") or "–")), str(r.get("batch") or "–"),
            f"{r['temperature']:g}", str(r["k"]), escape(str(r.get("tree") or "–")), number(r.get("prompts"), 0),
            number(r["steps"], 0), number(r.get("accepted"), 0), number(r.get("draft_acceptance_rate")),
            number(accepted_per_node(r)), number(r["tau"]), number(r.get("tokens_per_s"), 1),
            number(r.get("plain_tokens_per_s"), 1), number(r.get("speedup"), 2, "×"),
        ])  # fmt: skip
    return table(header, rows)


def environment(report: dict[str, Any]) -> str:
    """Files, versions, hardware, and what the report could not find."""
    e, target = report["environment"], report["target"]
    libraries = ("headtrain", "python", "torch", "transformers", "deepspeed")
    several = len(report["heads"]) > 1
    rows = [("target", joined(model_name(target["model"]), target["revision"], target["family"]))]
    rows += [
        (f"head {head['id']}" if several else "head",
         f"{head['path']}/model.safetensors, {head['bytes'] / 1e6:.1f} MB, sha256 {head['sha256']}")
        for head in report["heads"]
    ]  # fmt: skip
    rows += [
        ("exports", joined(*(item["path"] for item in report["exports"]))),
        ("machine", joined(*e["gpus"], e["cpu"], f"{e['cores']} cores")),
        ("software", joined(*(f"{name} {e[name]}" for name in libraries if e.get(name)))),
    ]
    notes = "".join(f"<li>{escape(text)}</li>" for text in report["warnings"])
    return section("Files and machine", facts(rows), f'<ul class="warnings">{notes}</ul>' if notes else "")
