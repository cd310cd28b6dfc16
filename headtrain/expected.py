"""What a report.json lets one expect of its head in an engine: acceptance per position, and what a step costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtrain.files import read_json


@dataclass
class Expected:
    """Of greedy chains of the head alone. alpha: share of steps that accept draft position 1, 2, … (unconditional)."""

    alpha: list[float]
    suite: str
    sha256: str | None  # of the measured weights
    predictions: list[dict[str, Any]] = field(default_factory=list)  # of the cost model: k, batch, step, …

    def tau(self, k: int) -> float | None:
        """Tokens per target forward with k drafts a step; None when fewer were measured."""
        return 1 + sum(self.alpha[:k]) if 0 < k <= len(self.alpha) else None

    def step_cost(self, k: int, batch: float) -> dict[str, Any] | None:
        """The cost model's prediction nearest to this K and batch; its `step`: cost of a step in plain steps."""
        near = [p for p in self.predictions if p["k"] == k]
        return min(near, key=lambda p: abs(math.log(p["batch"] / max(batch, 1))), default=None)


def find_report(place: str | None, head: Path | None = None) -> Path | None:
    """report.json at `place` (the file, or a run's folder), or of the run that a head or its export lies in."""
    if place is None:
        near = [folder / "report" / "report.json" for folder in (head.resolve().parents[:3] if head else [])]
        return next((path for path in near if path.is_file()), None)
    path = Path(place).expanduser()
    for file in (path, path / "report.json", path / "report" / "report.json"):
        if file.is_file():
            return file
    raise ValueError(f"report={place}: no such file; give a run's report/report.json")


def read_expected(path: Path, marks: Sequence[str] = ()) -> Expected:
    """What the report at `path` says of its head; of several, the one with one of these checksums. ValueError naming
    the file."""
    report = read_json(path, "make the report again (headtrain eval)")
    try:
        heads = [head for head in report["heads"] if len(report["heads"]) == 1 or head["sha256"] in marks]
        if len(heads) != 1:
            names = ", ".join(head["id"] for head in report["heads"])
            raise ValueError(f"report={path}: it measures several heads ({names}); give the report of the served one")
        mine = [row for row in report["results"] if greedy_chain(row, heads[0]["id"])]
        if not mine:
            raise ValueError(f"report={path}: it has no greedy chain of the head alone; run headtrain eval with k=[…]")
        best = max(mine, key=lambda row: (row["suite"] == "heldout", len(row["alpha"]), row["steps"]))
        series = [one for one in (report.get("cost") or {}).get("series") or [] if greedy_chain(one, heads[0]["id"])]
        series.sort(key=lambda one: one["suite"] != best["suite"])
        predictions = series[0]["predictions"] if series else []
        return Expected([float(share) for share in best["alpha"]], best["suite"], heads[0].get("sha256"), predictions)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"report={path}: not a report of headtrain's ({error!r}); give a run's report.json") from error


def greedy_chain(row: dict[str, Any], head: str | None) -> bool:
    """Whether a report's result is of greedy chains of this head alone; speed is measured on a few prompts only."""
    return (
        row["drafter"] == "head" and row.get("head") in (None, head) and row["temperature"] == 0
        and row.get("kind") != "speed"
        and (row.get("tree") or "chain") == "chain" and row.get("alpha", [0])[:1] not in ([], [None])
    )  # fmt: skip
