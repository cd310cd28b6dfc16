"""The cost model: what a step takes for so many drafts and requests, and so where drafting pays.

`measure_costs` times the target's forward and every drafter; the rest are pure functions of those times and of the
steps that a decoder recorded. With the tokens of a step τ(K), drafting d, a forward v and bookkeeping o:

    speed-up(K, B) = τ(K) · (v(1, B) + o) / (v(1 + drafted, B) + d(K, B) + o)

Prefill is left out on both sides. τ(K) comes from steps at a larger K in two ways, of which the larger is taken, since
each can only fall short. Truncated to min(accepted, K), a step is exact for greedy chains from the same token, whose
first K drafts do not depend on how many follow; but easy stretches, which few long steps cross, weigh too little. Cut
into as many steps of K drafts as its tokens need, it weighs right, as in copies of earlier text; but a head that drafts
anew in the middle may do better. A tree's nodes depend on its depth, so a tree is only predicted at the depths that
were decoded.
Shapes: B requests, L positions of one forward, N nodes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headtrain.eval.decoder.drafters.base import Drafter, News
    from headtrain.target import Target

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # positions per request at which a forward is timed
DEPTHS = (1, 2, 4, 8, 16, 32, 64)  # K at which a chain's drafting is timed
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # for which speed-ups are predicted
STRIDE = 2  # tokens a drafter is told per step while it is timed: about what a step settles
Text = tuple[list[int], list[int]]  # token ids of a prompt and of its answer
Labels = tuple[str, str | None, str]  # drafter, head, tree


# ------------------------------------------------------------------------------------------------- measuring


def measure_costs(
    target: Target, runs: Sequence[tuple[dict[str, Any], Drafter, int]], texts: Sequence[Text],
    batches: Iterable[int], rounds: int = 7,
) -> list[dict[str, Any]]:  # fmt: skip
    """Times of a forward (`what` "verify") and of drafting ("draft"): rows of tokens, batch, context, seconds.

    runs: (labels for the rows: drafter, head, tree; the drafter; its largest K). texts: finished answers, along which
    the drafters walk, so that an n-gram finds what it would find; a batch larger than their number repeats them.
    All things timed take turns, `rounds` times, so that a busy machine slows them alike; a forward counts with its
    median, drafting, which may take two ways, with its mean but for the slowest and fastest tenth.
    """
    if not texts:
        raise ValueError("the cost model needs at least one prompt with an answer to time drafters on")
    widest = 1 + max((drafter.nodes(k) for _, drafter, k in runs), default=max(TOKENS) - 1)
    rows = []
    for batch in sorted(set(batches)):
        here = [texts[i % len(texts)] for i in range(batch)]
        context = sum(len(prompt) + len(answer) // 2 for prompt, answer in here) // batch
        labels: list[dict[str, Any]] = []
        once: list[Callable[[], float]] = []
        for tokens, forward in _forwards(target, here, context, widest):
            labels.append({"what": "verify", "tokens": tokens})
            once.append(forward)
        for names, drafter, k in runs:
            walk = _Walk(target, drafter, here, k)
            for depth in sorted({k, *(d for d in DEPTHS if d < k and not drafter.branches)}):
                labels.append({"what": "draft", **names, "k": depth, "tokens": drafter.nodes(depth)})
                once.append(lambda walk=walk, depth=depth: walk.step(depth))
        seconds: list[list[float]] = [[] for _ in once]
        for turn in range(rounds + 1):
            for times, run in zip(seconds, once, strict=True):
                taken = run()
                if turn:  # the first is what is set up once
                    times.append(taken)
        for label, times in zip(labels, seconds, strict=True):
            middle = statistics.median(times) if label["what"] == "verify" else _trimmed(times)
            rows.append(label | {"batch": batch, "context": context, "seconds": middle})
    return rows


def _trimmed(times: list[float]) -> float:
    off = len(times) // 10
    return statistics.fmean(sorted(times)[off : len(times) - off])


def _clock(target: Target) -> float:
    if target.device.type == "cuda":
        import torch

        torch.cuda.synchronize(target.device)
    return time.perf_counter()


def _forwards(target: Target, texts: list[Text], context: int, widest: int):
    """(tokens, function that runs one verification of so many positions per request and returns its seconds)."""
    import torch

    from headtrain.cache import cache_for

    sizes = [n for n in TOKENS if n < widest] + [widest]
    most = getattr(target.config, "max_position_embeddings", None) or math.inf
    context = max(1, min(context, int(min(most, 2**31)) - widest))
    ids = [(prompt + answer) * -(-context // len(prompt + answer)) for prompt, answer in texts]
    tokens_BL = torch.tensor([row[:context] for row in ids], device=target.device)
    cache = cache_for(target.stateful, len(texts), context + widest)
    with torch.inference_mode():
        target.forward(tokens_BL, cache)

    @torch.inference_mode()
    def once(count: int) -> float:
        before = cache.snapshot() if target.stateful else {}
        new_BL = tokens_BL[:, -1:].expand(-1, count).contiguous()
        slots_BL = torch.arange(context, context + count, device=target.device).expand(len(texts), count)
        began = _clock(target)
        target.logits(target.forward(new_BL, cache, slots_BL).last_BLH).argmax(-1).tolist()
        taken = _clock(target) - began
        if target.stateful:
            cache.states = before
        return taken

    for count in sizes:
        yield count, lambda count=count: once(count)


class _Walk:
    """A drafter taken along finished texts as if the target had settled STRIDE tokens a step."""

    def __init__(self, target: Target, drafter: Drafter, texts: list[Text], deepest: int):
        import torch

        from headtrain.cache import cache_for

        self.target, self.drafter = target, drafter
        self.prompts = [prompt for prompt, _ in texts]
        self.rows = [prompt + answer for prompt, answer in texts]
        width = max(map(len, self.rows))
        self.ids_BL = torch.tensor([row + [0] * (width - len(row)) for row in self.rows], device=target.device)
        # drafting on the target's own layers reads it
        self.cache = cache_for(target.stateful, len(texts), width + deepest + 1)
        with torch.inference_mode():
            self.states = target.forward(self.ids_BL, self.cache, taps=drafter.taps)
        self.steps_left = 0

    def _news(self, starts: list[int], counts: list[int]) -> News:
        import torch

        from headtrain.eval.decoder.drafters.base import News

        device, states = self.target.device, self.states
        offsets_L = torch.arange(max(counts), device=device)
        slots_BL = (torch.tensor(starts, device=device)[:, None] + offsets_L).clamp_max(self.ids_BL.shape[1] - 1)
        rows_B1 = torch.arange(len(starts), device=device)[:, None]
        after_BL = (slots_BL + 1).clamp_max(self.ids_BL.shape[1] - 1)
        taps = None if states.taps_BLAH is None else states.taps_BLAH[rows_B1, slots_BL]
        tokens = [row[s + 1 : s + 1 + n] for row, s, n in zip(self.rows, starts, counts, strict=True)]
        counts_B = torch.tensor(counts, device=device)
        return News(self.ids_BL[rows_B1, after_BL], counts_B, taps, states.last_BLH[rows_B1, slots_BL], tokens)

    def step(self, k: int) -> float:
        """Seconds to propose k deep and to take in the next tokens; begins anew where the shortest answer ends."""
        import torch

        if not self.steps_left:
            self.drafter.bind(self.target, self.cache)
            self.drafter.start(self.prompts, self.cache.capacity)
            self.at = [len(prompt) for prompt in self.prompts]
            self.drafter.observe(self._news([0] * len(self.at), self.at))
            answers = [len(row) - len(prompt) for row, prompt in zip(self.rows, self.prompts, strict=True)]
            self.steps_left = max(1, (min(answers) - 1) // STRIDE)
        counts = [max(1, min(STRIDE, len(row) - 1 - at)) for row, at in zip(self.rows, self.at, strict=True)]
        news = self._news(self.at, counts)
        uniform_BN = torch.rand(len(self.at), self.drafter.nodes(k), dtype=torch.float64).to(self.target.device)
        with torch.inference_mode():
            began = _clock(self.target)
            self.drafter.propose(k, uniform_BN)
            self.drafter.observe(news)
            taken = _clock(self.target) - began
        self.at = [at + n for at, n in zip(self.at, counts, strict=True)]
        self.steps_left -= 1
        return taken


# ------------------------------------------------------------------------------------------------- the model


def at(points: Mapping[float, float], x: float) -> float:
    """The piecewise linear function through `points` at x; beyond its ends it goes on as its last piece does.

    It never falls beyond the last point, where a fall could only be noise. One point: a constant.
    """
    known = sorted(points.items())
    if len(known) == 1:
        return known[0][1]
    (x0, y0), (x1, y1) = next((pair for pair in pairwise(known) if x <= pair[1][0]), (known[-2], known[-1]))
    slope = (y1 - y0) / (x1 - x0)
    return y1 + max(0.0, slope) * (x - x1) if x > x1 else y0 + slope * (x - x0)


class Costs:
    """Times by batch, from rows of `measure_costs`; several rows for the same thing count with their mean."""

    def __init__(self, rows: Iterable[dict[str, Any]]):
        found: dict[tuple, list[float]] = {}
        for row in rows:
            verify = row["what"] == "verify"
            labels = None if verify else (row["drafter"], row.get("head"), row.get("tree") or "chain")
            found.setdefault((labels, row["batch"], row["tokens"] if verify else row["k"]), []).append(row["seconds"])
        self._seconds: dict[Labels | None, dict[int, dict[float, float]]] = {}
        for (labels, batch, size), seconds in found.items():
            self._seconds.setdefault(labels, {}).setdefault(batch, {})[size] = statistics.fmean(seconds)
        if None not in self._seconds:
            raise ValueError("the cost rows hold no time of the target's forward (what: verify)")
        self.batches = sorted(self._seconds[None])

    def __contains__(self, labels: Labels) -> bool:
        return labels in self._seconds

    def verify(self, tokens: float, batch: int) -> float:
        """Seconds of one forward of `tokens` positions for each of `batch` requests."""
        return at({b: at(points, tokens) for b, points in self._seconds[None].items()}, batch)

    def draft(self, labels: Labels, k: float, batch: int) -> float:
        """Seconds to draft k deep for `batch` requests. KeyError for a drafter that was not timed."""
        return at({b: at(points, k) for b, points in self._seconds[labels].items()}, batch)


Steps = Mapping[tuple[int, int], int]  # (drafted tokens, or a tree's nodes; accepted) -> number of steps


def longest(drafted: Mapping[int, float], k: int, batch: int) -> dict[int, float]:
    """Share of batched steps whose longest draft has each length, when each request's is as `drafted`, cut at k.

    A batch verifies as many positions as its longest draft needs: P(longest ≤ n) = P(drafted ≤ n) ** batch.
    drafted: length -> number of steps.
    """
    total, below, seen, out = sum(drafted.values()), 0.0, 0.0, {}
    for length in sorted({min(d, k) for d in drafted}):
        seen += sum(n for d, n in drafted.items() if min(d, k) == length)
        out[length] = (seen / total) ** batch - below
        below += out[length]
    return out


def cut(drafted: int, accepted: int, k: int) -> float:
    """How many steps of at most k drafts emit the tokens of one step that drafted and accepted so many.

    A step that ended by a rejection ends there with any k. One whose drafts all held would have gone on, so what is
    left of it counts as a part of a step.
    """
    tokens = (accepted + 1) / (k + 1)
    return tokens if accepted == drafted > k else float(math.ceil(tokens))


def _truncated(steps: Steps, k: int) -> tuple[float, dict[int, float]]:
    """(tau, number of steps by drafted tokens) when every step accepts at most k."""
    tokens = sum(n * (1 + min(accepted, k)) for (_, accepted), n in steps.items())
    return tokens / sum(steps.values()), _by_drafted((drafted, n) for (drafted, _), n in steps.items())


def _cut(steps: Steps, k: int) -> tuple[float, dict[int, float]]:
    """The same when every step is cut."""
    drafted = _by_drafted((d, n * cut(d, accepted, k)) for (d, accepted), n in steps.items())
    return sum(n * (1 + accepted) for (_, accepted), n in steps.items()) / sum(drafted.values()), drafted


def _by_drafted(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    out: dict[int, float] = {}
    for drafted, n in pairs:
        out[drafted] = out.get(drafted, 0.0) + n
    return out


def predict(costs: Costs, labels: Labels, steps: Steps, k: int, batch: int, overhead: float = 0.0) -> dict[str, Any]:
    """tau, step (its cost in plain steps), verify_share and speedup at K = k and this batch; the formula stands above.

    steps: at K ≥ k; a tree's nodes are not cut. overhead: seconds of a step beside drafting and forward, the same for
    any batch.
    """
    tree = labels[2] != "chain"
    tau, drafted = _truncated(steps, k) if tree else max(_truncated(steps, k), _cut(steps, k), key=lambda way: way[0])
    widths = longest(drafted, max(drafted) if tree else k, batch)
    verify = sum(share * costs.verify(1 + width, batch) for width, share in widths.items())
    total = verify + costs.draft(labels, k, batch) + overhead
    step = total / (costs.verify(1, batch) + overhead)
    return {
        "k": k, "batch": batch, "tau": tau, "step": step, "verify_share": verify / total, "speedup": tau / step,
        "extrapolated": not costs.batches[0] <= batch <= costs.batches[-1],
    }  # fmt: skip


def best(predictions: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The fastest prediction, the shallowest among equals."""
    return max(predictions, key=lambda p: (p["speedup"], -p["k"]))


def stops_paying(speedup: Callable[[int], float], up_to: int = BATCHES[-1]) -> int | None:
    """The smallest batch at which even the best K is slower than plain decoding; None when there is none `up_to`."""
    return next((batch for batch in range(1, up_to + 1) if speedup(batch) < 1), None)


def overhead_seconds(costs: Costs, plain: Mapping[str, float], batch: int = 1) -> float:
    """Seconds of a plain step beside its forward, from `verify_share` and `prefill_share` of a plain run's wall time.

    Only the ratio is taken from that run, so another speed of the machine at that time does not matter.
    """
    forward = plain["verify_share"] / (1 - plain["prefill_share"])
    return max(0.0, 1 / forward - 1) * costs.verify(1, batch)


def without_prefill(row: Mapping[str, float], plain: Mapping[str, float]) -> float:
    """The measured speed-up with prefill taken out of both runs' wall time."""
    return row["speedup"] * (1 - plain["prefill_share"]) / (1 - row["prefill_share"])


# ------------------------------------------------------------------------------------------------- bounds

Run = tuple[Sequence[int], Callable[[int], float]]  # accepted of every step, in order; cost of a step by its drafts


def oracle(tokens: int, runs: Iterable[Run], plain: float) -> float:
    """Seconds of an answer if one knew, at every token, which run's drafts hold and how many of them.

    tokens: the answer's length; its first comes from the prefill. plain: seconds of a plain step, which can be taken
    anywhere. A run whose step began at some token and accepted a drafts offers there every length 0 … a, at the cost of
    drafting just that many. The cheapest way through the answer is found exactly. With one run it bounds the best K per
    step, with several the best drafter per step; where no run began a step only a plain one is known, so a better way
    may exist. Only for runs that wrote the same text.
    """
    offers: dict[int, list[tuple[int, float]]] = {}
    for accepted, cost in runs:
        start = 1
        for a in accepted:
            offers.setdefault(start, []).extend((n + 1, cost(n)) for n in range(1, a + 1))
            start += a + 1
    cheapest = [0.0, 0.0] + [math.inf] * (tokens - 1)
    for start in range(1, tokens):
        for length, cost in [(1, plain), *offers.get(start, [])]:
            end = min(tokens, start + length)
            cheapest[end] = min(cheapest[end], cheapest[start] + cost)
    return cheapest[tokens]
