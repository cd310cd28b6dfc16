"""How far a run is, from the files its processes leave: for `headtrain status`, and for the line that a run shows.

Reads only; of a run that is at work, that was killed, or that is finished. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headtrain import children, identity
from headtrain.children import Progress, clock
from headtrain.config import ConfigError, RecipeConfig
from headtrain.files import Manifest, free_bytes, held, read_json
from headtrain.plan import reachable_config, tap_count

RECENT = 6  # units of a report by which its pace is taken
Look = Callable[[], "State"]


@dataclass
class State:
    """How far a stage is. What is not known is None, or empty."""

    state: str = "not started"  # | under way | complete
    done: float = 0  # of `total`, what the share is taken of
    total: float | None = None
    what: str = ""  # in words: 12 of 40 prompts
    tokens: int | None = None  # so far
    tokens_per_s: float | None = None  # now
    seconds_left: float | None = None
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> number
    counts: dict[str, Any] = field(default_factory=dict)  # of a complete stage
    servers: list[dict[str, Any]] = field(default_factory=list)
    bytes: int = 0  # on disk
    needs: int | None = None  # bytes still to come

    def words(self) -> str:
        parts = [self.what] if self.what else []
        parts += [f"{self.tokens:,} tokens"] if self.tokens else []
        parts += [f"{self.tokens_per_s:,.0f} tokens/s"] if self.tokens_per_s else []
        return ", ".join(parts)

    def progress(self) -> Progress:
        return Progress(self.done, self.total, self.words(), self.seconds_left)


def told(manifest: dict[str, Any]) -> str:
    """Counts, and what was left out, of a stage's manifest."""
    counts, left_out = listed(manifest.get("counts", {})), listed(manifest.get("left_out", {}))
    return counts + (f"; left out: {left_out}" if left_out else "")


def listed(numbers: dict[str, Any]) -> str:
    return ", ".join(f"{name} {n:,}" if isinstance(n, int) else f"{name} {n}" for name, n in numbers.items())


# ------------------------------------------------------------------------------------------------- one stage

def progress_of(run: Path, stage: str) -> Callable[[], Progress]:
    """A function that tells how far a stage is that processes are at work on."""
    look = look_at(run, stage)
    return lambda: look().progress()


def look_at(run: Path, stage: str) -> Look:
    """A function that looks at a stage under way; it remembers what need not be read again."""
    looks = {
        "prompts": _prompts, "responses": _responses, "captures": _captures, "training": _training, "report": _report,
    }  # fmt: skip
    return looks[stage](run) if stage in looks else lambda: State("under way")


def _prompts(run: Path) -> Look:
    from headtrain.data_gen import prompts

    def now() -> State:
        found = prompts.status(run / "prompts")
        words = f"{found['read']:,} rows read" if found["read"] else ""
        return State("under way", what=words, left_out=found["left_out"])

    return now


def _responses(run: Path) -> Look:
    from headtrain.data_gen import respond

    memory: dict[str, Any] = {}

    def now() -> State:
        found = respond.status(run / "responses", memory)
        return _of_batches(found, found["expected"], f"{found['prompts']:,} of {found['of']:,} prompts", run)

    return now


def _captures(run: Path) -> Look:
    from headtrain.data_gen import capture

    memory: dict[str, Any] = {}

    def now() -> State:
        responses = Manifest(run / "responses").data
        if not responses.get("complete"):
            local = responses.get("made_from", {}).get("responses", {}).get("backend") == "local"
            online = Manifest(run / "captures").data.get("made_from", {}).get("mode") == "online"
            along = local and not online
            return State("under way", what="written along with the responses" if along else "after the responses")
        found = capture.status(run / "responses", run / "captures", memory)
        return _of_batches(found, found["estimate"], f"{found['rows']:,} of {found['of']:,} rows", run)

    return now


def _of_batches(found: dict[str, Any], total: int, what: str, run: Path) -> State:
    rate, servers = found["rate"], (found["servers"] or {}).get("servers", [])
    return State(
        "under way", found["tokens"], total or None, what if found["batches"] else "", found["tokens"],
        rate or None, (total - found["tokens"]) / rate if rate else None, dict(found["left_out"]), servers=servers,
    )  # fmt: skip


def _training(run: Path) -> Look:
    from headtrain.training import launch

    def now() -> State:
        row = launch.status(run)
        if row is None:
            return State("under way")
        words = [f"step {row['step']}"] if "step" in row else []
        for key in ("loss", "tau"):
            words += [f"{key} {row[key]:.3f}"] if isinstance(row.get(key), float) else []
        lost = {key: row[key] for key in ("skipped", "spikes") if row.get(key)}
        return State(
            "under way", row.get("share") or 0, 1.0, ", ".join(words), None, row.get("tokens_per_s"), row.get("left_s"),
            lost,
        )  # fmt: skip

    return now


def _report(run: Path) -> Look:
    folder = run / "report"

    def now() -> State:
        total = read_json(folder / "plan.json")["units"] if (folder / "plan.json").is_file() else 0
        times = sorted(path.stat().st_mtime for path in (folder / "units").glob("*.json"))
        recent = times[-RECENT:]
        each = (recent[-1] - recent[0]) / (len(recent) - 1) if len(recent) > 2 else None
        left = (total - len(times)) * each if each else None
        words = f"unit {len(times)}/{total}" if total else ""
        return State("under way", len(times), total or None, words, seconds_left=left)

    return now


# ------------------------------------------------------------------------------------------------- a run

class Watch:
    """Looks at a run again and again. ConfigError when the folder is none."""

    def __init__(self, run: Path):
        if not (run / "config.yaml").is_file():
            raise ConfigError(f"run_dir={run}: no run folder (no config.yaml)")
        self.run, self.looks = run, {stage: look_at(run, stage) for stage in identity.STAGES}

    def look(self) -> dict[str, Any]:
        """{run_dir, working, error, free_bytes, urls: of the servers, stages: stage -> State}."""
        from headtrain.configload import load_resolved

        config, working = load_resolved(self.run / "config.yaml"), held(self.run / ".lock")
        stages = {stage: self._state(stage, working) for stage in identity.STAGES}
        _needs(config, self.run, stages)
        open_ones = [stage for stage in stages if stages[stage].state == "under way"]
        error = None if working or not open_ones else last_error(self.run)
        return {
            "run_dir": str(self.run), "working": working, "error": error, "free_bytes": free_bytes(self.run),
            "urls": config.data.responses.urls, "stages": stages,
        }  # fmt: skip

    def _state(self, stage: str, working: bool) -> State:
        manifest = Manifest(self.run / stage).data
        if not manifest:
            return State()
        if manifest.get("complete"):
            state = State("complete", counts=manifest.get("counts", {}), left_out=manifest.get("left_out", {}))
        else:
            state = self.looks[stage]()
            if not working:  # what was told is of the past
                state.tokens_per_s = state.seconds_left = None
        state.bytes = _bytes(self.run / stage)
        return state


def _bytes(folder: Path) -> int:
    """Of all files in it. Files and folders may come and go meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def _needs(config: RecipeConfig, run: Path, stages: dict[str, State]) -> None:
    """Sets the bytes that captures still need: by those that there are, else by the shape of the target."""
    from headtrain.data_gen import capture, respond

    captures, responses = stages["captures"], stages["responses"]
    if captures.state == "complete" or not (run / "responses" / "plan.json").is_file():
        return
    if responses.state == "complete":
        found = capture.status(run / "responses", run / "captures")
        tokens, total = found["row_tokens"], found["estimate"]
    elif config.data.captures.mode == "online":
        return  # which rows are captured is decided when the responses are there
    else:
        found = respond.status(run / "responses")
        tokens, total = found["row_tokens"], found["rows_expected"]
    hidden = config.target.shape.hidden or reachable_config(config).get("hidden_size")
    if captures.bytes > 1 << 20 and tokens:
        captures.needs = round(captures.bytes / tokens * (total - tokens))
    elif hidden:
        captures.needs = total * capture.bytes_per_token(hidden, tap_count(config.head), config.data.captures.dtype)


def last_error(run: Path) -> str | None:
    """The last line that a process of the run's newest log ended with as its error."""
    logs = sorted((run / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime)
    return children.said(logs[-1])[-1] if logs and children.said(logs[-1]) else None


# ------------------------------------------------------------------------------------------------- what is shown

def text(found: dict[str, Any]) -> str:
    """What `Watch.look` found, a line per stage."""
    from headtrain.data_gen.capture import readable

    stages: dict[str, State] = found["stages"]
    opened = [stage for stage in stages if stages[stage].state == "under way"]
    if found["working"]:
        about = "a headtrain process is working in it"
    elif opened:
        about = f"no headtrain process is working in it; the same command goes on with its {opened[0]}"
    elif stages["report"].state == "complete":
        about = "finished"
    else:
        about = "no headtrain process is working in it"
    lines = [f"run: {found['run_dir']}  ({about})"]
    urls = found["urls"]
    for stage, state in stages.items():
        lines.append(f"  {stage:<10} {_line(state)}")
        for n, server in enumerate(state.servers):
            lines.append(f"  {'':<10} {_server(server, urls[n] if n < len(urls) else f'server {n + 1}')}")
    if found["error"]:
        lines.append(f"  stopped by: {found['error']}")
    used = ", ".join(f"{stage} {readable(state.bytes)}" for stage, state in stages.items() if state.bytes)
    needs = [f"{stage} need about {readable(state.needs)} more" for stage, state in stages.items() if state.needs]
    disk = [used or "nothing used", f"free: {readable(found['free_bytes'])}", *needs]
    lines.append(f"  disk       {'; '.join(disk)}")
    return "\n".join(lines)


def _line(state: State) -> str:
    if state.state == "complete":
        return f"complete: {told({'counts': state.counts, 'left_out': state.left_out})}"
    if state.state == "not started":
        return state.state
    share = f" {100 * min(1, state.done / state.total):.0f} %" if state.total else ""
    left = f", about {clock(state.seconds_left)} left" if state.seconds_left is not None else ""
    out = f"; left out: {listed(state.left_out)}" if state.left_out else ""
    return f"under way{share}  {state.words()}".rstrip() + left + out


def _server(server: dict[str, Any], name: str) -> str:
    state = f"ready, {server['busy']} requests under way" if server["ready"] else "away"
    failed = f", {server['failed']:,} failed" if server["failed"] else ""
    why = f" ({server['reason']})" if server["reason"] else ""
    return f"{name}: {state}, {server['answered']:,} answered{failed}{why}"


def as_json(found: dict[str, Any]) -> str:
    return json.dumps(found | {"stages": {stage: asdict(state) for stage, state in found["stages"].items()}}, indent=1)


def show(run: Path, every: float | None = None, in_json: bool = False) -> None:
    """Prints how far a run is; with `every` again after so many seconds, until no process works in it any more."""
    watch = Watch(run)
    while True:
        found = watch.look()
        redraw = every and sys.stdout.isatty() and not in_json
        print(("\033[H\033[J" if redraw else "") + (as_json(found) if in_json else text(found)), flush=True)
        if not every or not found["working"]:
            return
        time.sleep(every)
