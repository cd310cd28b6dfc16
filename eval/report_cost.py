"""The cost model applied to a report's results: predicted and measured speed-ups side by side, best K, bounds.

A series is one drafter (with its head) on one suite at one temperature with one tree shape and rule, over its K.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from headtrain.eval.cost import (
    BATCHES,
    Costs,
    Labels,
    Run,
    Steps,
    best,
    oracle,
    overhead_seconds,
    predict,
    stops_paying,
    without_prefill,
)
from headtrain.eval.report_data import known, prompt_steps, setting, step_nodes

Row = dict[str, Any]


def apply_costs(results: list[Row], rows: list[Row]) -> dict[str, Any] | None:
    """{rows, overhead_s, verify, series, combined} as docs/report.md describes them; None without cost rows."""
    if not rows:
        return None
    costs = Costs(rows)
    plain = {_place(row): row for row in results if row["drafter"] == "none" and _shares(row)}
    timed = [row for row in plain.values() if row.get("kind") == "speed"]
    overheads = [overhead_seconds(costs, row, row.get("batch") or 1) for row in timed]
    overhead = sum(overheads) / len(overheads) if overheads else 0.0
    series = [_one(costs, overhead, mine, plain) for mine in _grouped(results) if _labels(mine[0]) in costs]
    return {
        "rows": rows,
        "overhead_s": overhead,
        "verify": _verify(costs, rows),
        "series": [one for one in series if one],
        "combined": _combined(costs, overhead, results),
    }


def _place(row: Row) -> tuple:
    """Where a row was measured; its speed-up is over the plain row of the same place."""
    return row["suite"], row["temperature"], row.get("kind"), row.get("batch")


def _labels(row: Row) -> Labels:
    return row["drafter"], row.get("head"), row.get("tree") or "chain"


def _grouped(results: list[Row]) -> list[list[Row]]:
    groups: dict[tuple, list[Row]] = {}
    for row in results:
        suite, temperature, _, _, rule = setting(row)
        if row["drafter"] != "none" and _counts(row):
            groups.setdefault((suite, temperature, rule, *_labels(row)), []).append(row)
    return list(groups.values())


def _counts(row: Row) -> Steps:
    """(drafted tokens, or a tree's nodes; accepted) -> steps; empty where a row lacks its steps."""
    nodes, accepted = step_nodes(row) or [], row.get("accepted_per_step") or []
    return Counter(zip(nodes, accepted, strict=True)) if len(nodes) == len(accepted) else {}


def _shares(row: Row) -> bool:
    """Whether the shares of a timed row's wall time are known and leave something to decode."""
    forward, prefill = row.get("verify_share"), row.get("prefill_share")
    return known(forward) and known(prefill) and forward > 0 and prefill < 1


def _verify(costs: Costs, rows: list[Row]) -> list[dict[str, Any]]:
    """The time of a forward in plain forwards of the same batch."""
    sizes = sorted({(row["batch"], row["tokens"]) for row in rows if row["what"] == "verify"})
    return [{"batch": b, "tokens": n, "forwards": costs.verify(n, b) / costs.verify(1, b)} for b, n in sizes]


def _one(costs: Costs, overhead: float, mine: list[Row], plain: dict[tuple, Row]) -> dict[str, Any]:
    suite, temperature, _, tree, rule = setting(mine[0])
    labels = _labels(mine[0])

    def at_all(row: Row) -> list[int]:  # the K a row's steps can be predicted for
        return list(range(1, row["k"] + 1)) if tree == "chain" else [row["k"]]

    def deepest(rows: list[Row]) -> list[Row]:  # the rows to predict from: a chain's largest K, every K of a tree
        rows = sorted(rows, key=lambda row: (row["k"], row.get("steps") or 0))
        return rows[-1:] if tree == "chain" else list({row["k"]: row for row in rows}.values())

    accepting = deepest([row for row in mine if row.get("kind") != "speed"] or mine)
    counts = [(_counts(row), k) for row in accepting for k in at_all(row)]

    def here(batch: int) -> list[dict[str, Any]]:
        return [predict(costs, labels, steps, k, batch, overhead) for steps, k in counts]

    predictions = {batch: here(batch) for batch in BATCHES}
    checks = []
    for row in sorted(mine, key=lambda row: (row.get("kind") != "speed", row.get("batch") or 1, row["k"])):
        base = plain.get(_place(row))
        if base and _shares(row) and known(row.get("speedup")) and row["speedup"] > 0:
            beside = [other for other in mine if _place(other) == _place(row)]
            source = deepest(beside)[-1] if tree == "chain" else row
            checks.append(_check(predict(costs, labels, _counts(source), row["k"], row["batch"], overhead), row, base))
    return {
        "suite": suite, "temperature": temperature, "rule": rule, "drafter": labels[0], "head": labels[1], "tree": tree,
        "predictions": [p for batch in BATCHES for p in predictions[batch]],
        "best": [best(predictions[batch]) for batch in BATCHES],
        "stops_paying": stops_paying(lambda batch: best(here(batch))["speedup"]),
        "checks": checks,
        "oracle_k": _bound(costs, overhead, accepting[-1:]),
    }  # fmt: skip


def _check(found: dict[str, Any], row: Row, plain: Row) -> dict[str, Any]:
    """A measured speed-up, prefill left out, beside what the steps at the largest K of the same place predict."""
    measured = without_prefill(row, plain)
    return {
        "kind": row.get("kind"), "k": row["k"], "batch": row["batch"], "predicted": found["speedup"],
        "measured": measured, "error": found["speedup"] / measured - 1, "predicted_tau": found["tau"],
        "measured_tau": row["tau"],
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------- bounds


def _sure(row: Row) -> bool:
    """Whether a row's text is the plain greedy one, token for token, so that runs can be laid over each other."""
    return row["temperature"] == 0 and row.get("identical_to_plain") is True and not row.get("near_ties")


def _cost(costs: Costs, overhead: float, labels: Labels, k: int) -> Callable[[int], float]:
    """Seconds of a batch-1 step that drafts n tokens and verifies just them; a tree is drafted whole."""
    return lambda n: costs.draft(labels, n if labels[2] == "chain" else k, 1) + costs.verify(n + 1, 1) + overhead


def _bound(costs: Costs, overhead: float, rows: list[Row]) -> float | None:
    """Speed-up over plain steps, at batch 1, of always drafting just what is accepted, with the better of the rows."""
    plain = costs.verify(1, 1) + overhead
    prompts: dict[Any, list[tuple[int, Run]]] = {}
    for row in rows:
        cost = _cost(costs, overhead, _labels(row), row["k"])
        for prompt, accepted in prompt_steps(row):
            prompts.setdefault(prompt["id"], []).append((prompt["tokens"], (accepted, cost)))
    texts = [runs for runs in prompts.values() if len(runs) == len(rows) and len({tokens for tokens, _ in runs}) == 1]
    if not all(map(_sure, rows)) or not texts:
        return None
    bounds = [(runs[0][0], oracle(runs[0][0], [run for _, run in runs], plain)) for runs in texts]
    seconds = sum(s for _, s in bounds)
    return sum(tokens - 1 for tokens, _ in bounds) * plain / seconds if seconds else None


def _combined(costs: Costs, overhead: float, results: list[Row]) -> list[dict[str, Any]]:
    """The bound over all drafters of a suite together: the best drafter and K at every step."""
    suites: dict[str, dict[tuple, Row]] = {}
    for row in results:
        suite, _, _, _, rule = setting(row)
        usable = row["drafter"] != "none" and rule == "exact" and row.get("kind") != "speed" and _sure(row)
        if usable and _labels(row) in costs:
            mine = suites.setdefault(suite, {})
            if _labels(row) not in mine or row["k"] > mine[_labels(row)]["k"]:
                mine[_labels(row)] = row
    return [
        {"suite": suite, "drafters": sorted({row["drafter"] for row in rows.values()}), "speedup": bound}
        for suite, rows in suites.items()
        if len(rows) > 1 and (bound := _bound(costs, overhead, list(rows.values()))) is not None
    ]
