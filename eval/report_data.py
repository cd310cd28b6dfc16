"""What a report shows, out of its results: comparisons of drafters, and τ by domain, temperature and output depth.

Pure functions of `results`; nothing here is text for a reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from headtrain.eval.acceptance import difference_interval

LEVEL_BAND = 0.02  # without intervals, acceptance lengths within 2 % count as level
DEPTH_EDGES = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, math.inf)  # of output depth, in tokens
DEPTH_STEPS = 20  # fewer steps than this say nothing about a depth
MEASURED = ("tau", "tau_ci", "alpha", "alpha_conditional", "steps", "accepted", "drafted", "tokens", "prompts", "batch")
TIMED = (
    "tokens_per_s", "plain_tokens_per_s", "speedup", "draft_share", "verify_share", "prefill_share",
    "concurrent_workers",
)  # fmt: skip
ORDER = {name: i for i, name in enumerate(("head", "ngram", "head+ngram", "head+ngram-tree"))}


def known(value: Any) -> bool:
    """Whether a number was measured (not None, not NaN)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def setting(row: dict[str, Any]) -> tuple[str, float, int, str, str]:
    """(suite, temperature, K, tree, rule): results that differ here are never compared. Chains: tree = `chain`."""
    return row["suite"], row["temperature"], row["k"], row.get("tree") or "chain", row.get("rule") or "exact"


def labels(results: list[dict[str, Any]]) -> dict[tuple[str, str | None], str]:
    """(drafter, head) -> its name in a comparison: the drafter, and its head where several were measured."""
    several = len({row["head"] for row in results if row.get("head")}) > 1
    pairs = {(row["drafter"], row.get("head")) for row in results}
    return {(d, h): f"{d}: {h}" if several and h else d for d, h in pairs}


def comparisons(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results side by side: one entry per (suite, temperature, k, tree, rule) with every drafter's numbers.

    Acceptance comes from the row with the most steps (all prompts, batched), speed from the row that was timed for it
    (kind `speed`; where there is none, the row with the smallest batch). Order: as measured.
    """
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in results:
        if row["drafter"] != "none":
            groups.setdefault(setting(row), []).append(row)
    for row in results:  # plain decoding has no k: it stands beside every setting of its suite and temperature
        if row["drafter"] == "none":
            for key in [k for k in groups if k[:2] == setting(row)[:2]]:
                groups[key].append(row)
    names = labels(results)
    return [
        dict(zip(("suite", "temperature", "k", "tree", "rule"), key, strict=True))
        | {"drafters": _by_drafter(rows, names)}
        for key, rows in groups.items()
    ]


def _by_drafter(rows: list[dict[str, Any]], names: dict[tuple, str]) -> dict[str, dict[str, Any]]:
    found: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["drafter"], row.get("head")), []).append(row)

    def place(key: tuple[str, str | None]) -> tuple:
        return key[0] == "none", ORDER.get(key[0], len(ORDER)), key[0], key[1] or ""

    out = {}
    for key in sorted(found, key=place):
        mine = found[key]
        accepting = max(mine, key=lambda row: (row.get("kind") != "speed", row.get("steps") or 0))
        timed = min(mine, key=lambda row: (row.get("kind") != "speed", row.get("batch") or 0))
        one = {key: accepting.get(key) for key in MEASURED} | {key: timed.get(key) for key in TIMED}
        one |= {f"timed_{key}": timed.get(key) for key in ("tau", "batch", "prompts", "kind")}
        one |= {"drafter": key[0], "head": key[1], "by_prompt": by_prompt(accepting), "depths": by_depth(accepting)}
        out[names[key]] = one
    return out


def step_nodes(row: dict[str, Any]) -> list[int] | None:
    """The nodes that each step verified: of a chain its drafted tokens, as of a tree whose nodes were not written."""
    return row.get("nodes_per_step") or row.get("drafted_per_step")


def accepted_per_node(row: dict[str, Any]) -> float | None:
    """Of a tree: accepted drafts / verified nodes; None for a chain."""
    nodes, accepted = sum(step_nodes(row) or []), row.get("accepted")
    tree = (row.get("tree") or "chain") != "chain"
    return accepted / nodes if tree and nodes and known(accepted) else None


def prompt_steps(row: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """(entry of per_prompt, accepted of its steps in order), cut from the flat counts; nothing where it has none."""
    at, flat = 0, row.get("accepted_per_step") or []
    for prompt in row.get("per_prompt") or []:
        yield prompt, flat[at : at + prompt["steps"]]
        at += prompt["steps"]


def by_prompt(row: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(steps, accepted) of every prompt of a result."""
    return {prompt["id"]: (prompt["steps"], sum(accepted)) for prompt, accepted in prompt_steps(row)}


def by_depth(row: dict[str, Any]) -> list[dict[str, Any]]:
    """τ of the steps that started after so many emitted tokens: [{from, to, steps, tau}], `to` exclusive.

    The prefill's token is emitted first, so a prompt's first step starts at depth 1. Depths with fewer than
    DEPTH_STEPS steps are left out.
    """
    sums = [[0, 0] for _ in DEPTH_EDGES[1:]]
    for _, accepted in prompt_steps(row):
        emitted = 1
        for a in accepted:
            place = next(i for i, edge in enumerate(DEPTH_EDGES[1:]) if emitted < edge)
            sums[place][0] += 1
            sums[place][1] += a
            emitted += a + 1
    return [
        {"from": low, "to": None if high == math.inf else high, "steps": steps, "tau": 1 + accepted / steps}
        for (low, high), (steps, accepted) in zip(pairwise(DEPTH_EDGES), sums, strict=True)
        if steps >= DEPTH_STEPS
    ]


def main_comparison(groups: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The setting the headline is about: first suite, lossless rule, lowest temperature, where most is gained.

    Where the suite has the head on its own, only such settings count, each by what the head gains there.
    """
    if not groups:
        return None

    def gain(group: dict[str, Any]) -> tuple[float, float]:
        rows = [head] if (head := pick(group, "head")) else drafted(group).values()
        speeds = [row["speedup"] for row in rows if known(row["speedup"])]
        taus = [row["tau"] for row in rows if known(row["tau"])]
        return max(speeds, default=0.0), max(taus, default=0.0)

    first = groups[0]["suite"]
    mine = [group for group in groups if group["suite"] == first]
    mine = [group for group in mine if (row := pick(group, "head")) and known(row["tau"])] or mine
    mine = [group for group in mine if group["rule"] != "typical"] or mine
    lowest = min(group["temperature"] for group in mine)
    return max((group for group in mine if group["temperature"] == lowest), key=gain)


def first_of_each_suite(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The setting to show first of every suite."""
    suites = dict.fromkeys(group["suite"] for group in groups)
    return [main_comparison([group for group in groups if group["suite"] == suite]) for suite in suites]


def drafted(group: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The drafters of a comparison without plain decoding."""
    return {name: row for name, row in group["drafters"].items() if name != "none"}


def pick(group: dict[str, Any], drafter: str, head: str | None = None) -> dict[str, Any] | None:
    """A drafter's numbers in a comparison, of this head; without one, of the head with the largest τ."""
    rows = [row for row in group["drafters"].values() if row["drafter"] == drafter and head in (None, row["head"])]
    return max(rows, key=lambda row: row["tau"] if known(row["tau"]) else 0.0) if rows else None


def by_domain(groups: list[dict[str, Any]], like: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """suite -> drafters' numbers, of the comparisons that differ from `like` in nothing but the suite."""
    same = [g for g in groups if all(g[key] == like[key] for key in ("temperature", "k", "tree", "rule"))]
    return {group["suite"]: group["drafters"] for group in same}


def by_temperature(groups: list[dict[str, Any]], like: dict[str, Any]) -> dict[float, dict[str, dict[str, Any]]]:
    """temperature -> drafters' numbers, of the comparisons that differ from `like` in nothing but the temperature."""
    same = [g for g in groups if all(g[key] == like[key] for key in ("suite", "k", "tree", "rule"))]
    return {group["temperature"]: group["drafters"] for group in sorted(same, key=lambda group: group["temperature"])}


def against(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """`above`, `below` or `level`: our acceptance length beside theirs; None when either was not measured.

    On the same prompts: level when the 95 % interval of the paired difference holds 0. Else with intervals of each:
    level as long as they overlap; without: level within 2 %.
    """
    if not (known(ours.get("tau")) and known(theirs.get("tau"))):
        return None
    mine, others = ours.get("by_prompt") or {}, theirs.get("by_prompt") or {}
    if mine and mine.keys() == others.keys():
        interval = difference_interval(list(mine.values()), [others[prompt] for prompt in mine])
        if interval:
            return "above" if interval[0] > 0 else "below" if interval[1] < 0 else "level"
    ours_ci, theirs_ci = ours.get("tau_ci"), theirs.get("tau_ci")
    if ours_ci and theirs_ci and all(map(known, [*ours_ci, *theirs_ci])):
        if ours_ci[0] > theirs_ci[1]:
            return "above"
        return "below" if ours_ci[1] < theirs_ci[0] else "level"
    ratio = ours["tau"] / theirs["tau"]
    return "level" if abs(ratio - 1) <= LEVEL_BAND else ("above" if ratio > 1 else "below")
