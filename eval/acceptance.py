"""One definition of every acceptance metric. Pure Python on step counts; `FORMULAS` is what reports print.

A step is one target forward after the prefill. It drafted some tokens and accepted the leading `accepted` of them; it
emitted accepted + 1 tokens, the last being the target's own (the bonus). Pooled = sums over all steps of all prompts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

FORMULAS = {
    "tau": "1 + accepted / steps, pooled over all steps of all prompts: tokens emitted per target forward",
    "alpha": "alpha_k = steps that accepted at least k draft tokens / all steps (unconditional)",
    "alpha_conditional": "steps that accepted at least k / steps that accepted at least k-1; null when there are none",
    "draft_acceptance_rate": "accepted / drafted",
    "speculative_tokens": "accepted + steps: tokens from speculation, without the one of each prompt's prefill",
    "tokens_per_call_with_prefill": "(accepted + steps + prompts) / steps: counts the prefill's token, not its forward",
    "tau_prompt_mean": "mean over prompts of 1 + accepted / steps: every prompt weighs the same",
}

Steps = Sequence[tuple[int, int]]  # (drafted, accepted) of each step of one prompt


def metrics(prompts: Sequence[Steps], k: int) -> dict[str, Any]:
    """All metrics of `FORMULAS` (None where a denominator is 0), the sums they come from, and lists over k = 1 … K.

    `extra` holds the numbers that other tools print under the same names; the headline is `tau`.
    """
    flat = [step for steps in prompts for step in steps]
    steps, drafted, accepted = len(flat), sum(d for d, _ in flat), sum(a for _, a in flat)
    reached = [sum(a >= depth for _, a in flat) for depth in range(k + 1)]  # reached[0] = all steps
    with_steps = [s for s in prompts if s]
    return {
        "steps": steps,
        "drafted": drafted,
        "accepted": accepted,
        "tau": _share(steps + accepted, steps),
        "alpha": [_share(n, steps) for n in reached[1:]],
        "alpha_conditional": [_share(n, before) for before, n in pairwise(reached)],
        "draft_acceptance_rate": _share(accepted, drafted),
        "speculative_tokens": steps + accepted,
        "extra": {
            "tokens_per_call_with_prefill": _share(steps + accepted + len(prompts), steps),
            "tau_prompt_mean": _share(sum(1 + sum(a for _, a in s) / len(s) for s in with_steps), len(with_steps)),
        },
    }


def tau_interval(prompts: Sequence[Steps], draws: int = 1000, seed: int = 0) -> list[float] | None:
    """[low, high]: 95 % bootstrap interval of the pooled tau, prompts drawn with replacement; None without steps."""
    sums = [(len(steps), sum(a for _, a in steps)) for steps in prompts if steps]
    if not sums:
        return None
    choose = random.Random(seed)
    taus = []
    for _ in range(draws):
        picked = choose.choices(sums, k=len(sums))
        taus.append(1 + sum(a for _, a in picked) / sum(n for n, _ in picked))
    taus.sort()
    return [taus[int(0.025 * draws)], taus[min(draws - 1, int(0.975 * draws))]]


def difference_interval(
    ours: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]], draws: int = 1000, seed: int = 0
) -> list[float] | None:
    """[low, high]: 95 % bootstrap interval of the difference of two pooled taus on the same prompts.

    ours, theirs: (steps, accepted) of each prompt, in the same order. Drawing whole prompts for both at once leaves out
    what makes a prompt easy or hard for either. None without steps.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a[0] and b[0]]
    if not pairs:
        return None
    choose, found = random.Random(seed), []
    for _ in range(draws):
        picked = choose.choices(pairs, k=len(pairs))
        (n, a), (m, b) = ((sum(pair[i][0] for pair in picked), sum(pair[i][1] for pair in picked)) for i in (0, 1))
        found.append(a / n - b / m)
    found.sort()
    return [found[int(0.025 * draws)], found[min(draws - 1, int(0.975 * draws))]]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
