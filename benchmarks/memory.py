"""Peak memory of our training step against length and against draft vocabulary; a table and a plot for the docs.

`make bench-memory`. Each point is the first step of a fresh process, depth 7, bf16, half of the tokens supervised, all
packed as one document. Writes benchmarks/results/memory.json, memory.md and docs/img/training_memory.svg.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import ROOT, run
from benchmarks.steps import Case
from benchmarks.train_step import table

LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]
VOCABS = [8192, 32768, 131072]
VOCAB_LENGTH = 4096
HALF_BF16 = {"dtype": "bf16", "supervised": 0.5}


def point(case: Case) -> dict[str, Any]:
    """One measurement: memory in MB above where the process stood, and the seconds it took."""
    answer = run({"case": case.to_dict(), "repeats": 0, "seed": 0})
    memory, core_s = answer["memory"] / 1e6, answer["first"]["core_s"]
    print(f"{case.length:7,} tokens, draft vocabulary {case.draft_vocab:8,}: +{memory:8,.0f} MB", flush=True)
    return {"length": case.length, "draft_vocab": case.draft_vocab, "memory_mb": memory, "core_s": core_s}


def line(points: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Least-squares line through memory against `key`: slope (MB per unit), offset (MB), largest relative deviation."""
    x, y = (np.array([p[name] for p in points], dtype=float) for name in (key, "memory_mb"))
    slope, offset = np.polyfit(x, y, 1)
    deviation = np.abs(y / (slope * x + offset) - 1).max()
    return {"slope": float(slope), "offset": float(offset), "deviation": float(deviation)}


def markdown(result: dict[str, Any]) -> str:
    fit = result["line"]
    case = Case(**HALF_BF16)
    lengths = [
        [f"{p['length']:,}", f"{p['memory_mb']:,.0f}", f"{fit['slope'] * p['length'] + fit['offset']:,.0f}"]
        for p in result["lengths"]
    ]
    vocabs = [
        [f"{p['draft_vocab']:,}", f"{p['memory_mb']:,.0f}", f"{p['draft_vocab'] * case.shape.hidden * 2 / 1e6:,.0f}"]
        for p in result["vocabs"]
    ]
    return "\n".join(
        [
            "# Memory of our training step\n",
            f"What the first step of a fresh process adds to it: depth {case.depths}, bf16, half of the tokens "
            f"supervised, hidden size {case.shape.hidden}, one document, one thread, CPU.\n",
            f"Draft vocabulary {case.draft_vocab:,}: {1000 * fit['slope']:,.0f} MB per 1,000 tokens; no point is "
            f"further than {fit['deviation']:.1%} from the line.\n",
            table(["tokens", "memory, MB", "line, MB"], lengths),
            f"{VOCAB_LENGTH:,} tokens:\n",
            table(["draft vocabulary", "memory, MB", "of it lm_head's gradient, MB"], vocabs),
            "![Memory against length and draft vocabulary](../../docs/img/training_memory.svg)\n",
        ]
    )


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams |= {"svg.hashsalt": "headtrain", "svg.fonttype": "none", "font.size": 10}
    fit, figure = result["line"], plt.figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    lengths, memory = ([p[key] for p in result["lengths"]] for key in ("length", "memory_mb"))
    left.plot([0, lengths[-1]], [fit["offset"] / 1e3, (fit["slope"] * lengths[-1] + fit["offset"]) / 1e3], color="#999")
    left.plot(lengths, [m / 1e3 for m in memory], "o", color="#1f5fa8")
    left.set(xlabel="tokens in a batch (one document)", ylabel="memory of a step, GB", title="Length")
    left.set_xticks([0, 8192, 16384, 24576, 32768], ["0", "8k", "16k", "24k", "32k"])
    vocabs, memory = ([p[key] for p in result["vocabs"]] for key in ("draft_vocab", "memory_mb"))
    names = [f"{v // 1024}k" for v in vocabs]
    right.bar(names, [m / 1e3 for m in memory], width=0.5, color="#1f5fa8")
    right.set(xlabel="draft vocabulary", title=f"Draft vocabulary, {VOCAB_LENGTH:,} tokens")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a batch, at least two")
    options.add_argument("--vocabs", type=int, nargs="+", default=VOCABS, help="draft vocabularies")
    options.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of memory.json and .md")
    options.add_argument("--plot", type=Path, default=ROOT / "docs/img/training_memory.svg")
    given = options.parse_args()
    lengths = [point(Case(length=length, **HALF_BF16)) for length in given.lengths]
    vocabs = [point(Case(length=VOCAB_LENGTH, draft_vocab=size, **HALF_BF16)) for size in given.vocabs]
    result = {"lengths": lengths, "vocabs": vocabs, "line": line(lengths, "length")}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "memory.json").write_text(json.dumps(result, indent=1) + "\n")
    (given.out / "memory.md").write_text(markdown(result))
    plot(result, given.plot)
    print("\n" + markdown(result))


if __name__ == "__main__":
    main()
