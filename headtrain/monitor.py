"""`headtrain monitor`: follows the speculation of running engines, one line per model and interval.

Each interval is the difference of two readings of an engine's counters (SGLang's gauges are the engine's own last
interval). With a report of the head, the line says how far acceptance drifts from what was measured.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from headtrain.engine_metrics import EngineError, Reading, Totals, base_url, read_engine
from headtrain.expected import Expected, read_expected

LOW = 0.4  # share of draft tokens accepted below which speculation is warned about
DRIFT = 0.8  # of the expected draft tokens per step
FEWEST = 32  # steps of an interval that are judged


@dataclass
class Interval:
    """What one model did in an interval. Shares and rates are None where the engine does not say."""

    engine: str
    model: str
    seconds: float | None  # None: since the engine started
    drafts: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    k: int | None = None  # draft tokens a step
    tau: float | None = None  # 1 + accepted / drafts
    alpha: list[float] = field(default_factory=list)  # share of steps that accepted position 1, 2, …
    rate: float | None = None  # accepted / drafted
    tokens_per_s: float | None = None
    running: float | None = None  # requests
    restarted: bool = False
    expected_tau: float | None = None
    warnings: list[str] = field(default_factory=list)


def interval(now: Reading, before: Reading | None, expected: Expected | None = None) -> Interval:
    """What happened between two readings of one model; before=None: since the engine started."""
    totals, anew = now.totals(before)
    seconds = now.seconds - before.seconds if before else None
    found = Interval(now.engine, now.model, seconds, restarted=anew, running=now.gauges.get("running"))
    if seconds and totals.generated is not None:
        found.tokens_per_s = totals.generated / seconds
    if before and "tokens_per_s" in now.gauges:
        found.tokens_per_s = now.gauges["tokens_per_s"]
    (_of_counters if now.engine == "vllm" else _of_gauges)(found, now, totals)
    _judge(found, now, expected)
    return found


def _of_counters(found: Interval, now: Reading, totals: Totals) -> None:
    found.drafts, found.drafted, found.accepted = totals.drafts, totals.drafted, totals.accepted
    if not totals.drafts:
        return
    found.alpha = [n / totals.drafts for n in totals.positions]
    if totals.accepted is not None:
        found.tau = 1 + totals.accepted / totals.drafts
        found.rate = totals.accepted / totals.drafted if totals.drafted else None
    found.k = len(found.alpha) or (round(totals.drafted / totals.drafts) if totals.drafted else None)


def _of_gauges(found: Interval, now: Reading, totals: Totals) -> None:
    """SGLang's gauges stay at their last value while it is idle: then nothing is said of acceptance."""
    found.drafts = totals.drafts
    if found.seconds is not None and totals.generated == 0 and not found.running:
        return
    found.tau, found.rate = now.gauges.get("tau"), now.gauges.get("rate")
    if "steps" in now.gauges:
        found.k = round(now.gauges["steps"])
    elif found.tau and found.rate:
        found.k = max(1, round((found.tau - 1) / found.rate))


def _judge(found: Interval, now: Reading, expected: Expected | None) -> None:
    """Fills in what was expected, and warns of what costs speed. A few steps are not judged."""
    if not now.speculates:
        found.warnings.append("the engine does not speculate (it has no metrics of drafts)")
    if found.tau is None or (found.drafts is not None and found.drafts < FEWEST):
        return
    if found.rate is not None and found.rate < LOW:
        found.warnings.append(f"{found.rate:.0%} of the draft tokens are accepted, below {LOW:.0%}")
    if expected is None or found.k is None:
        return
    found.expected_tau = expected.tau(found.k)
    if found.expected_tau and found.tau - 1 < DRIFT * (found.expected_tau - 1):
        found.warnings.append(
            f"τ {found.tau:.2f} instead of {found.expected_tau:.2f} on {expected.suite}: `headtrain doctor` finds a "
            "mismatch; otherwise these requests are unlike the prompts the head was trained on"
        )
    cost = expected.step_cost(found.k, found.running or 1)
    if cost and found.tau < cost["step"]:
        found.warnings.append(
            f"speculation costs more than it brings: a step of K = {found.k} at batch {cost['batch']} takes "
            f"{cost['step']:.2f} plain steps on the report's machine and settles {found.tau:.2f} tokens"
        )


# ----------------------------------------------------------------------------------------------------- words

def line(found: Interval, expected: Expected | None = None) -> str:
    """The interval in one line; what is unknown is left out."""
    words = [f"{found.model or 'unnamed model'} ({found.engine})"]
    if found.tau is None:
        words.append("no drafts")
    else:
        tau = f"τ {found.tau:.2f}"
        if found.expected_tau:
            share = (found.tau - 1) / (found.expected_tau - 1) - 1 if found.expected_tau > 1 else 0.0
            tau += f" (report {found.expected_tau:.2f}, drafts {share:+.0%})"
        words.append(tau)
    if found.alpha:
        words.append("α " + " ".join(f"{share:.2f}" for share in found.alpha))
        if expected:
            words.append("report " + " ".join(f"{share:.2f}" for share in expected.alpha[: len(found.alpha)]))
    if found.rate is not None:
        words.append(f"accepted {found.rate:.0%}")
    if found.tokens_per_s is not None:
        words.append(f"{found.tokens_per_s:,.1f} tokens/s")
    if found.running is not None:
        words.append(f"{found.running:.0f} running")
    return "  ".join(words)


# ----------------------------------------------------------------------------------------------------- the loop

class Monitor:
    """Polls engines and writes what it finds. `say` prints a line, `log` (JSON lines) gets every interval whole."""

    def __init__(
        self, urls: list[str], expected: Expected | None = None, *, timeout: float = 10.0,
        say: Callable[[str], None] = print, log: TextIO | None = None,
    ):  # fmt: skip
        self.urls, self.expected, self.timeout = [base_url(url) for url in urls], expected, timeout
        self.say, self.log = say, log
        self.last: dict[tuple[str, str, str], Reading] = {}

    def poll(self) -> bool:
        """Asks every engine once; whether all of them answered."""
        return all([self._one(url) for url in self.urls])

    def _one(self, url: str) -> bool:
        clock = time.strftime("%H:%M:%S")
        where = f"{url}  " if len(self.urls) > 1 else ""
        try:
            found = read_engine(url, self.timeout)
        except EngineError as error:
            self.say(f"{clock}  error: {error}; trying again")
            self._write({"engine_url": url, "error": str(error)})
            return False
        for reading in found:
            key = url, reading.engine, reading.model
            one = interval(reading, self.last.get(key), self.expected)
            self.last[key] = reading
            if one.restarted:
                self.say(f"{clock}  {where}the engine was restarted: its counters began anew")
            begin = "since it started:  " if one.seconds is None else ""
            self.say(f"{clock}  {where}{begin}{line(one, self.expected)}")
            for text in one.warnings:
                self.say(f"{clock}  {where}warning: {text}")
            self._write({"engine_url": url, **vars(one)})
        return True

    def _write(self, row: dict[str, Any]) -> None:
        if self.log is not None:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self.log.write(json.dumps({"time": now, **row}, ensure_ascii=False) + "\n")
            self.log.flush()

    def run(self, every: float, count: int | None = None) -> bool:
        """One poll, then one every so many seconds: `count` of them, or without end. Whether the last one worked."""
        began, worked = time.monotonic(), self.poll()
        done = 0
        while count is None or done < count:
            done += 1
            time.sleep(max(0.0, began + done * every - time.monotonic()))
            worked = self.poll()
        return worked


def monitor(
    urls: list[str], *, interval: float = 10.0, count: int | None = None, report: Path | None = None,
    log: Path | None = None,
) -> int:  # fmt: skip
    """The `monitor` command; returns its exit status: 1 when an engine did not answer at the end."""
    if not (interval > 0 and math.isfinite(interval)):
        raise ValueError(f"interval={interval:g}: seconds above 0 are needed")
    if log and not log.absolute().parent.is_dir():
        raise ValueError(f"log={log}: there is no folder {log.parent}")
    expected = read_expected(report) if report else None
    try:
        opened = open(log, "a", encoding="utf-8") if log else contextlib.nullcontext()  # noqa: SIM115 - closed below
    except OSError as error:
        raise ValueError(f"log={log}: cannot be written ({error.strerror})") from error
    with opened as handle:
        say = lambda text: print(text, flush=True)  # noqa: E731
        return 0 if Monitor(urls, expected, say=say, log=handle).run(interval, count) else 1
