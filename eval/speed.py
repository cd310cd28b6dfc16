"""Timing at batch 1: plain decoding and every drafter answer the same prompt in turn, so that drift hits all alike."""

from __future__ import annotations

from typing import Any

from headtrain.eval.decoder.decode import Decoded, decode
from headtrain.eval.decoder.drafters import Drafter
from headtrain.target import Target


def race(
    target: Target, runs: list[tuple[Drafter, int]], prompt: list[int], turn: int, **options: Any
) -> list[Decoded]:
    """One answer per (drafter, k), in that order. `turn` moves the order of running, so that no run is always first.

    `options` are decode's: max_new_tokens, temperature, …
    """
    out: dict[int, Decoded] = {}
    for i in sorted(range(len(runs)), key=lambda i: (i - turn) % len(runs)):
        drafter, k = runs[i]
        out[i] = decode(target, drafter, [prompt], k=k, **options)[0]
    return [out[i] for i in range(len(runs))]


def rates(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Pooled over rows with `tokens` and seconds: tokens per second of wall time, and the shares of that time.

    The rest of the time is the prefill and the bookkeeping between steps.
    """
    total = sum(row["total_s"] for row in rows)
    share = {name: sum(row[f"{name}_s"] for row in rows) / total if total else None for name in ("draft", "verify")}
    tokens = sum(row["tokens"] for row in rows)
    return {
        "tokens_per_s": tokens / total if total else None,
        "draft_share": share["draft"],
        "verify_share": share["verify"],
        "prefill_share": sum(row["prefill_s"] for row in rows) / total if total else None,
    }
