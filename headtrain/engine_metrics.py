"""What a running engine says of itself: its Prometheus metrics and its list of models, read over HTTP.

Names as vLLM (0.33) and SGLang (0.5.23, started with --enable-metrics) publish them. vLLM counts drafts, draft tokens
and accepted tokens, also per position; SGLang gives the last interval's acceptance length and rate as gauges.
Only the standard library is used.
"""

from __future__ import annotations

import json
import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, NamedTuple

MOST_BYTES = 32 * 2**20
COUNTERS = {  # per engine: name after its prefix, without `_total` -> what it counts
    "vllm": {
        "spec_decode_num_drafts": "drafts", "spec_decode_num_draft_tokens": "drafted",
        "spec_decode_num_accepted_tokens": "accepted", "spec_decode_num_accepted_tokens_per_pos": "position",
        "generation_tokens": "generated",
    },
    "sglang": {"generation_tokens": "generated", "spec_verify_calls": "drafts"},
}  # fmt: skip
GAUGES = {
    "vllm": {"num_requests_running": "running"},
    "sglang": {
        "spec_accept_length": "tau", "spec_accept_rate": "rate", "gen_throughput": "tokens_per_s",
        "num_running_reqs": "running", "spec_num_steps": "steps",
    },
}  # fmt: skip
SUMMED = ("running", "tokens_per_s")  # gauges of several replicas are added, the others averaged


class EngineError(ValueError):
    """An engine that cannot be asked, or whose answer cannot be understood; the message names the URL."""


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


# ----------------------------------------------------------------------------------------------------- text format

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\[\\"n])*)"\s*(,|$)')
_LINE = re.compile(rf'({_NAME})\s*(?:\{{((?:[^"}}]|"(?:[^"\\]|\\.)*")*)\}})?\s+(\S+)(?:\s+-?\d+)?\s*')
_ESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def parse(text: str) -> list[Sample]:
    """The samples of a text in Prometheus' exposition format; ValueError naming the first line that is none."""
    samples = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        try:
            samples.append(Sample(found[1], _labels(found[2] or ""), _value(found[3])))
        except (TypeError, ValueError) as error:
            raise ValueError(f"line {number} is no Prometheus sample: {line[:80]!r}") from error
    return samples


def _labels(text: str) -> dict[str, str]:
    labels, at = {}, 0
    while at < len(text.rstrip()):
        found = _LABEL.match(text, at)
        if not found:
            raise ValueError(text[at:])
        labels[found[1]] = re.sub(r"\\.", lambda escape: _ESCAPED[escape[0]], found[2])
        at = found.end()
    return labels


def _value(text: str) -> float:
    if "_" in text:  # Python's float would take it
        raise ValueError(text)
    return float(text)


# ----------------------------------------------------------------------------------------------------- HTTP

def base_url(url: str) -> str:
    """http://host:port of an engine, also when given with /v1 or /metrics behind it. ValueError for anything else."""
    base = re.sub(r"(/v1|/metrics)?/*$", "", url.strip().rstrip("/"))
    if not re.fullmatch(r"https?://[^/@\s?#]+(/[^@\s?#]*)?", base):
        raise ValueError(f"engine_url={url}: an address such as http://localhost:8000 is needed, without a password")
    return base


def fetch(url: str, timeout: float) -> str:
    """The body of a GET request; EngineError in one line when there is none."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            body = answer.read(MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        hint = " (start SGLang with --enable-metrics)" if error.code == 404 and url.endswith("/metrics") else ""
        hint = " (it asks for a key)" if error.code in (401, 403) else hint
        raise EngineError(f"{url} answers {error.code} {error.reason}{hint}") from error
    except TimeoutError as error:
        raise EngineError(f"{url} does not answer within {timeout:g} s") from error
    except (OSError, HTTPException) as error:  # URLError is an OSError
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):
            raise EngineError(f"{url} does not answer within {timeout:g} s") from error
        raise EngineError(f"{url} cannot be reached ({reason})") from error
    if len(body) > MOST_BYTES:
        raise EngineError(f"{url} answers with more than {MOST_BYTES >> 20} MiB")
    return body.decode("utf-8", errors="replace")


def models(url: str, timeout: float = 10.0) -> list[dict[str, Any]]:
    """The models that an OpenAI-compatible server lists: objects with `id` and often `max_model_len`."""
    place = f"{base_url(url)}/v1/models"
    try:
        found = json.loads(fetch(place, timeout))["data"]
        return [model for model in found if isinstance(model["id"], str)]
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"{place} does not answer with a list of models") from error


# ----------------------------------------------------------------------------------------------------- readings

@dataclass
class Totals:
    """Counts of one served model, of all its replicas together. None: this engine does not count it."""

    drafts: float | None = None  # verifications
    drafted: float | None = None
    accepted: float | None = None
    generated: float | None = None
    positions: list[float] = field(default_factory=list)  # verifications that accepted draft position 1, 2, …


@dataclass
class Reading:
    """One model's metrics at a time: counters by series, and gauges."""

    engine: str  # vllm | sglang
    model: str
    seconds: float  # time.monotonic() of the answer
    counters: dict[tuple, float] = field(default_factory=dict)  # (what, position, replica) -> count
    created: dict[tuple, float] = field(default_factory=dict)  # the same series -> when it began, where given
    gauges: dict[str, float] = field(default_factory=dict)

    def totals(self, before: Reading | None = None) -> tuple[Totals, bool]:
        """Counts since `before` (None: since the engine started), and whether a counter began anew in between.

        A counter that fell, or that was created at another time, belongs to a restarted engine: it counts from 0.
        """
        sums: dict[tuple, float] = {}
        anew = False
        for series, value in self.counters.items():
            old = before.counters.get(series, 0.0) if before else 0.0
            if value < old or (old and before.created.get(series) != self.created.get(series)):
                old, anew = 0.0, True
            what = series[:2]
            sums[what] = sums.get(what, 0.0) + value - old
        positions = sorted((place, value) for (what, place), value in sums.items() if what == "position")
        single = {what: value for (what, place), value in sums.items() if place is None}
        return Totals(**single, positions=[value for _, value in positions]), anew

    @property
    def speculates(self) -> bool:
        return "tau" in self.gauges or any(what == "drafts" for what, *_ in self.counters)


_OURS = re.compile(r"(?:ray_)?(vllm|sglang)[:_](\w+?)(_total_created|_created|_total)?")


def readings(samples: Iterable[Sample]) -> list[Reading]:
    """One reading per engine and model, in order of appearance."""
    found: dict[tuple[str, str], Reading] = {}
    gauges: dict[tuple[str, str, str], dict[str, float]] = {}
    now = time.monotonic()
    for name, labels, value in samples:
        ours = _OURS.fullmatch(name)
        if not ours or not math.isfinite(value):
            continue
        engine, short, ending = ours.groups()
        if any(labels.get(rank, "0") not in ("0", "") for rank in ("tp_rank", "pp_rank")):
            continue  # the ranks of one replica count the same tokens
        model = labels.get("model_name", "")
        replica = labels.get("engine") or labels.get("dp_rank") or ""
        if what := COUNTERS[engine].get(short):
            reading = found.setdefault((engine, model), Reading(engine, model, now))
            place = int(labels["position"]) if what == "position" and labels.get("position", "").isdecimal() else None
            if what == "position" and place is None:
                raise ValueError(f"{name} has no position label")
            into = reading.created if ending and ending.endswith("created") else reading.counters
            series = what, place, replica
            into[series] = into.get(series, 0.0) + value
        elif (what := GAUGES[engine].get(short)) and ending is None:
            found.setdefault((engine, model), Reading(engine, model, now))
            gauges.setdefault((engine, model, what), {})[replica] = value
    for (engine, model, what), values in gauges.items():
        total = sum(values.values())
        found[engine, model].gauges[what] = total if what in SUMMED else total / len(values)
    return list(found.values())


def read_engine(url: str, timeout: float = 10.0) -> list[Reading]:
    """The readings of an engine; EngineError when it cannot be asked, or is neither vLLM nor SGLang."""
    place = f"{base_url(url)}/metrics"
    try:
        found = readings(parse(fetch(place, timeout)))
    except ValueError as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"{place}: {error}") from error
    if not found:
        raise EngineError(f"{place} has metrics of neither vLLM nor SGLang")
    return found
