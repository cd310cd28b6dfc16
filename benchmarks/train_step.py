"""EAGLE-3 training steps side by side, eager on a CPU with one thread: specforge's, speculators' and ours.

`make bench-train` (ARGS=--quick for one small row). Every measurement is a process of its own; the contenders take
turns, A B C A B C …. Results go to benchmarks/results/train_step.json and .md after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.measure import QUIET, ROOT, run
from benchmarks.steps import DECAY, Case

CONTENDERS = ("specforge", "speculators", "headtrain")
PEERS = CONTENDERS[:2]
DROP = 0.7  # position_keep of the rows that drop positions
DRAWS = 4  # timed steps per process where positions are dropped at random
SAME_LOSS = 1e-4  # largest relative difference
Cases = dict[str, Case]


def side_by_side(**options: Any) -> Cases:
    return {name: Case(name, **options) for name in CONTENDERS}


def full_rows() -> list[Cases]:
    dtypes, rows = ("fp32", "bf16"), []
    for dtype in dtypes:
        rows += [
            side_by_side(dtype=dtype),
            side_by_side(dtype=dtype, supervised=0.5),
            {"headtrain": Case(dtype=dtype), "dropping": Case(dtype=dtype, keep=DROP)},
        ]
    rows += [side_by_side(dtype=dtype, depths=3) for dtype in dtypes]
    return rows + [side_by_side(dtype=dtype, length=length) for length in (512, 1024, 4096) for dtype in dtypes]


def quick_rows() -> list[Cases]:
    small = {"length": 256, "depths": 3}
    return [side_by_side(**small), {"headtrain": Case(**small), "dropping": Case(**small, keep=DROP)}]


# ---------------------------------------------------------------------------------------------------- measuring


def measure_row(cases: Cases, rounds: int, repeats: int) -> dict[str, Any]:
    """All contenders of a row and the machine's matmul speed, taking turns; the best time, the median memory."""
    dtype = next(iter(cases.values())).dtype
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    speeds = []
    for number in range(rounds):
        speeds.append(run({"matmul": dtype}))
        for name, case in cases.items():
            steps = repeats if case.keep == 1 else max(repeats, DRAWS)
            answers[name].append(answer := run({"case": case.to_dict(), "repeats": steps, "seed": number}))
            best = min(t["core_s"] for t in answer["times"])
            print(f"  round {number + 1} {name:12} {best:8.2f} core-s  +{answer['memory'] / 1e6:,.0f} MB", flush=True)
    return {
        "case": next(iter(cases.values())).to_dict(),
        "matmul_flops_per_s": max(s["flops_per_s"] for s in speeds),
        "others": max(answer["others"] for found in [speeds, *answers.values()] for answer in found),
        "contenders": {name: summary(found) for name, found in answers.items()},
    }


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    times = sorted(t["core_s"] for answer in found for t in answer["times"])
    same = {key: found[0][key] for key in ("loss", "sum_D", "pairs_D", "entropy_D", "flops") if key in found[0]}
    memory = statistics.median(answer["memory"] for answer in found)
    return same | {"core_s": times[0], "median_core_s": statistics.median(times), "memory": memory, "rounds": found}


def machine(rounds: int, repeats: int) -> dict[str, Any]:
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    packages = ("torch", "transformers", "specforge", "speculators")
    return {
        "cpu": model[0].split(":")[1].strip() if model else platform.machine(),
        "cores": os.cpu_count(), "threads": 1, "load_average": os.getloadavg()[0],
        "rounds": rounds, "steps_per_round": max(1, repeats), "versions": {name: version(name) for name in packages},
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- tables


def table(head: list[str], rows: list[list[str]]) -> str:
    """A markdown table; every column but the first is right-aligned."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *rows]) + "\n"


def name_of(case: dict[str, Any]) -> str:
    part = "" if case["supervised"] == 1 else f", {case['supervised']:.0%} supervised"
    return f"{case['length']:,} × {case['depths']} {case['dtype']}{part}"


def step_cells(row: dict[str, Any]) -> list[str]:
    found = row["contenders"]
    ours, faster = found["headtrain"], min((found[name] for name in PEERS), key=lambda peer: peer["core_s"])
    return [
        name_of(row["case"]),
        *(f"{found[name]['core_s']:.2f}" for name in CONTENDERS),
        f"**{faster['core_s'] / ours['core_s']:.2f}×**",
        *(f"{found[name]['memory'] / 1e6:,.0f}" for name in CONTENDERS),
        f"**{ours['memory'] / faster['memory']:.2f}×**",
        f"{row['case']['length'] / ours['core_s']:,.0f}",
        f"{ours['flops'] / ours['core_s'] / row['matmul_flops_per_s']:.0%}",
    ]


def drop_cells(row: dict[str, Any]) -> list[str]:
    """What is dropped is drawn anew each step, so the mean counts, brought to the expected number of pairs along the
    line between it and the whole step."""
    whole, dropping = row["contenders"]["headtrain"], row["contenders"]["dropping"]
    steps = [step for answer in dropping["rounds"] for step in answer["times"]]
    seconds, pairs = (statistics.mean(step[key] for step in steps) for key in ("core_s", "pairs"))
    kept, every = pairs / sum(whole["pairs_D"]), whole["pairs_D"]
    expected = sum(DROP**d * count for d, count in enumerate(every)) / sum(every)
    at_expected = seconds + (whole["core_s"] - seconds) * (expected - kept) / (1 - kept)
    return [
        name_of(row["case"]), f"{whole['core_s']:.2f}", f"{seconds:.2f}", f"{kept:.1%}", f"{at_expected:.2f}",
        f"{expected:.1%}", f"**{whole['core_s'] / at_expected:.2f}×**",
        f"{dropping['flops'] / at_expected / row['matmul_flops_per_s']:.0%}",
    ]  # fmt: skip


def same_formula(row: dict[str, Any]) -> bool:
    """With a prompt the peers also teach chains that begin in it, so that only fully supervised rows compare."""
    return PEERS[0] in row["contenders"] and row["case"]["dtype"] == "fp32" and row["case"]["supervised"] == 1


def same_losses(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """{peer: (its loss, ours by its formula)}, from the sums per depth of our own step on the same inputs.

    specforge: Σ 0.8^d · (sum of soft CE) / (all slots); speculators: Σ 0.8^d · (sum of KL) / (taught pairs of the
    depth), where KL is soft CE less the teacher's entropy.
    """
    found, mine = row["contenders"], row["contenders"]["headtrain"]
    decay = [DECAY**d for d in range(len(mine["sum_D"]))]
    by_slots = sum(w * s for w, s in zip(decay, mine["sum_D"], strict=True)) / row["case"]["length"]
    kl = zip(decay, mine["sum_D"], mine["entropy_D"], mine["pairs_D"], strict=True)
    by_pairs = sum(w * (s - entropy) / pairs for w, s, entropy, pairs in kl)
    by_formula = {"specforge": by_slots, "speculators": by_pairs}
    return {peer: (found[peer]["loss"], ours) for peer, ours in by_formula.items()}


def check_losses(row: dict[str, Any]) -> None:
    """RuntimeError if a peer's loss is not ours by its formula, within 1e-4."""
    for peer, (theirs, ours) in same_losses(row).items():
        if not abs(ours / theirs - 1) <= SAME_LOSS:
            raise RuntimeError(f"{name_of(row['case'])}: {peer}'s loss is {theirs}, ours by its formula {ours}")


def loss_rows(row: dict[str, Any]) -> list[list[str]]:
    return [
        [f"{peer}, {name_of(row['case'])}", f"{theirs:.6f}", f"{ours:.6f}", f"{abs(ours / theirs - 1):.1e}"]
        for peer, (theirs, ours) in same_losses(row).items()
    ]


def markdown(result: dict[str, Any]) -> str:
    about, rows = result["machine"], result["rows"]
    sides = [row for row in rows if PEERS[0] in row["contenders"]]
    drops = [row for row in rows if "dropping" in row["contenders"]]
    compared = [row for row in sides if same_formula(row)]
    others = max(row["others"] for row in rows)
    idle = "The machine was otherwise idle" if others <= QUIET else "**The machine was not idle**"
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    text = [
        "# The EAGLE-3 training step, eager on CPU\n",
        f"{versions}; {about['cpu']}, one thread. {idle}: anything else kept at most {others:.2f} cores busy during a "
        f"measurement. Times are the best of {about['rounds']} rounds × {about['steps_per_round']} steps, in "
        "core-seconds of forward and backward with the target's projection; memory is what the first step adds to the "
        "process, median of the rounds. [How it is measured](../../docs/benchmarks.md).\n",
        "## Side by side\n",
        "The ratios are against the peer that is faster in that row. Share of peak: FLOPs that the step cannot do "
        "without, per core-second, over the speed of a 2,048³ matrix product in that dtype.\n",
        table(
            ["tokens × depth", *(f"{name}, core-s" for name in CONTENDERS), "speed-up",
             *(f"{name}, MB" for name in CONTENDERS), "memory", "our tokens per core-s", "share of peak"],
            [step_cells(row) for row in sides],
        ),
    ]  # fmt: skip
    if drops:
        text += [
            f"## Dropping positions, r = {DROP}\n",
            "What is dropped is drawn anew in each step: the mean over the steps, and brought to the expected number "
            "of pairs.\n",
            table(
                ["tokens × depth", "all, core-s", "mean, core-s", "its pairs", "expected, core-s", "its pairs",
                 "speed-up", "share of peak"],
                [drop_cells(row) for row in drops],
            ),
        ]  # fmt: skip
    if compared:
        text += [
            "## The same loss\n",
            "The peer's loss, and ours by the peer's formula, with the same weights and inputs.\n",
            table(["row", "peer", "headtrain", "relative difference"], [c for row in compared for c in loss_rows(row)]),
        ]
    return "\n".join(text)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="one small row, written to runs/bench-quick")
    options.add_argument("--rounds", type=int, default=3, help="processes per contender and row")
    options.add_argument("--repeats", type=int, default=1, help="timed steps per process, after the first one")
    options.add_argument("--out", type=Path, help="folder of train_step.json and train_step.md")
    given = options.parse_args()
    peers.check()
    out = given.out or ROOT / ("runs/bench-quick" if given.quick else "benchmarks/results")
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": machine(given.rounds, given.repeats), "rows": []}
    for cases in quick_rows() if given.quick else full_rows():
        print(name_of(next(iter(cases.values())).to_dict()), "·", ", ".join(cases), flush=True)
        result["rows"].append(measure_row(cases, given.rounds, given.repeats))
        if (others := result["rows"][-1]["others"]) > QUIET:
            print(f"  the machine is not idle: anything else kept {others:.2f} cores busy", flush=True)
        (out / "train_step.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "train_step.md").write_text(markdown(result))
    print("\n" + markdown(result))
    for row in filter(same_formula, result["rows"]):
        check_losses(row)


if __name__ == "__main__":
    try:
        main()
    except (peers.PeerMissing, RuntimeError) as error:
        sys.exit(str(error))
