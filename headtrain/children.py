"""Child processes of a run: started together, watched, ended together, and never left behind.

A child gets its own process group and is killed by the kernel when its parent dies. What children print goes to log
files; the parent shows one line of progress, and a failing child's last words.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtrain.config import ConfigError, RecipeConfig
from headtrain.files import DiskFull, room_for
from headtrain.hardware import gpu_ids

POLL = 0.2  # seconds between looks at the children
PATIENCE = 20  # times as long as a look at the progress takes there is none
PLAIN_EVERY = 15.0  # seconds between progress lines when there is no terminal
GRACE = 10.0  # seconds a child has between SIGTERM and SIGKILL
PR_SET_PDEATHSIG = 1
LAST_WORDS = 1 << 20  # bytes free, below which a child that failed may have found no room to say why
NOTE = "note: "  # what a child prints behind this is shown to the user at once


class StageFailed(ValueError):
    """A child process ended with an error; the message has its last words and its log file."""


@dataclass
class Child:
    """One process to start: arguments, additions to the environment, log file."""

    argv: list[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Progress:
    """How far a stage is. `done` of `total` (None: unknown), and a few words more."""

    done: float = 0
    total: float | None = None
    words: str = ""
    left: float | None = None  # seconds, where more is known than the time gone


# ------------------------------------------------------------------------------------------------- how many

def workers(config: RecipeConfig, teams: bool = True) -> list[dict[str, str]]:
    """The environment of each worker process of the data stages and of evaluation.

    On GPUs target.gpus devices each; on a CPU an equal share of the cores as threads each. With target.split=tensor a
    team of target.gpus processes takes a worker's place (teams=False: evaluation's do not). ConfigError where there are
    fewer devices than one worker needs.
    """
    gpus = [] if config.target.device == "cpu" else gpu_ids()
    cores, asked, each = len(os.sched_getaffinity(0)), config.launch.workers, config.target.gpus
    team = each if teams and config.target.split == "tensor" else 1
    parts = shares(gpus, each)
    if asked != "auto":
        count = int(asked)
    elif config.smoke or (not gpus and (config.target.cpu_memory or team > 1)):
        count = 1
    else:
        count = len(parts) or cores
    if gpus:
        found = [{"CUDA_VISIBLE_DEVICES": parts[n % len(parts)]} for n in range(count)]
    else:
        threads = str(max(1, cores // (count * team)))
        found = [{"OMP_NUM_THREADS": threads, "DS_ACCELERATOR": "cpu"} for _ in range(count)]
    return found if team == 1 else [env for one in found for env in _team(one, team)]


def shares(gpus: list[str], each: int) -> list[str]:
    """The devices in groups of `each`, as CUDA_VISIBLE_DEVICES takes them. ConfigError where there is not one."""
    if gpus and len(gpus) < each:
        raise ConfigError(f"target.gpus={each}: this machine has {len(gpus)} CUDA devices")
    return [",".join(gpus[n : n + each]) for n in range(0, len(gpus) - each + 1, each)]


def _team(one: dict[str, str], size: int) -> list[dict[str, str]]:
    """The environments of processes that share a worker's devices and find each other at a port of their own."""
    devices = one.get("CUDA_VISIBLE_DEVICES", "").split(",")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(size)}
    own = [{"CUDA_VISIBLE_DEVICES": devices[n]} if devices[0] else {} for n in range(size)]
    return [one | own[n] | meet | {"RANK": str(n), "LOCAL_RANK": "0"} for n in range(size)]


def engines(config: RecipeConfig) -> list[dict[str, str]]:
    """The environment of each process that holds a vLLM for the captures: as many devices as data.captures.engine says.

    On a CPU one process with all cores. ConfigError for more devices than there are.
    """
    gpus = [] if config.target.device == "cpu" else gpu_ids()
    sizes = {key: config.data.captures.engine.get(key, 1) for key in ("tensor_parallel_size", "pipeline_parallel_size")}
    each, asked = math.prod(sizes.values()), config.launch.workers
    if not gpus:
        return [{"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "DS_ACCELERATOR": "cpu"}]
    if each > len(gpus):
        keys = ", ".join(f"data.captures.engine.{key}={size}" for key, size in sizes.items() if size > 1)
        raise ConfigError(f"{keys}: an engine would need {each} GPUs, and {len(gpus)} are here")
    count = len(gpus) // each if asked == "auto" else min(int(asked), len(gpus) // each)
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[n * each : (n + 1) * each])} for n in range(count)]


# ------------------------------------------------------------------------------------------------- running them

def run(children: list[Child], label: str, poll: Callable[[], Progress]) -> None:
    """Runs the children to their end; StageFailed when one fails (the others are ended then).

    KeyboardInterrupt on SIGINT or SIGTERM, after the children are gone.
    """
    started: list[subprocess.Popen] = []
    heard = [Notes(child.log) for child in children]
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for child in children:
            started.append(_start(child))
        with _display(label) as show:
            running, due = True, 0.0
            while running:
                states = [_state(process) for process in started]
                running = None in states
                for notes in heard:
                    for text in notes.new():
                        show(text)
                for child, state in zip(children, states, strict=True):
                    if state:
                        raise StageFailed(last_words(label, child.log, state))
                began = time.monotonic()
                if began >= due or not running:
                    show(poll())
                    due = began + PATIENCE * (time.monotonic() - began)
                time.sleep(POLL if running else 0)
    finally:
        _end(started)
        signal.signal(signal.SIGTERM, before)


class Notes:
    """The lines of a log, written from now on, that begin with NOTE."""

    def __init__(self, log: Path):
        self.log, self.at = log, log.stat().st_size if log.is_file() else 0

    def new(self) -> list[str]:
        with open(self.log, "rb") as handle:
            handle.seek(self.at)
            *whole, _ = handle.read().split(b"\n")
        self.at += sum(len(text) + 1 for text in whole)
        return [text.decode(errors="replace") for text in whole if text.startswith(NOTE.encode())]


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _start(child: Child) -> subprocess.Popen:
    libc, parent = ctypes.CDLL(None), os.getpid()

    def die_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl
            os._exit(1)

    child.log.parent.mkdir(parents=True, exist_ok=True)
    with room_for(child.log), open(child.log, "ab") as log:
        log.write(f"\n[{time.strftime('%Y-%m-%d %H:%M:%S')}] {' '.join(child.argv)}\n".encode())
        log.flush()
        return subprocess.Popen(
            child.argv, env=os.environ | child.env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip


def _state(process: subprocess.Popen) -> int | None:
    """Exit status, or None while it runs. What an ended child left behind in its process group is killed, once."""
    if process.returncode is None and process.poll() is not None:
        _signal_group(process, signal.SIGKILL)
    return process.returncode


def _end(started: list[subprocess.Popen]) -> None:
    """Ends whole process groups: SIGTERM, a grace period, SIGKILL. Ended ones are left alone: ids are used again."""
    going = [process for process in started if _state(process) is None]
    for process in going:
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and any([_state(process) is None for process in going]):
        time.sleep(0.05)
    for process in going:
        if _state(process) is None:
            _signal_group(process, signal.SIGKILL)
            process.wait()


def _signal_group(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


STARTED = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ")  # heads a section; DeepSpeed adds milliseconds


def last_words(label: str, log: Path, status: int) -> str:
    """What a failed child said last: its `error:` line when it made one, else the end of its log."""
    if errors := said(log):  # by status 2, or whatever a launcher makes of it
        return f"{label}: {errors[-1]}"
    if shutil.disk_usage(log.parent).free < LAST_WORDS:  # what it said found no room
        return f"{label}: {DiskFull(errno.ENOSPC, '', str(log.parent.parent))}"
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    tail = "\n".join(f"  | {line}" for line in _section(log)[-25:])
    return f"{label} {how}; its log is {log}\n{tail}"


def said(log: Path) -> list[str]:
    """The errors for the user in a log, since a process was last started."""
    return [line.removeprefix("error: ") for line in _section(log) if line.startswith("error: ")]


def _section(log: Path) -> list[str]:
    """The lines of a log since a process was last started."""
    lines = [line.rstrip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    starts = [n for n, line in enumerate(lines) if STARTED.match(line)]
    return [line for line in lines[starts[-1] + 1 if starts else 0 :] if line]


# ------------------------------------------------------------------------------------------------- display

@contextlib.contextmanager
def _display(label: str):
    """Yields show(progress or a line of text): one live line on a terminal, a plain line now and then elsewhere."""
    from rich.console import Console

    console, began = Console(stderr=False), time.monotonic()
    if console.is_terminal:
        from rich.live import Live
        from rich.text import Text

        with Live(Text(label), console=console, refresh_per_second=4, transient=True) as live:

            def show(what: Progress | str) -> None:
                if isinstance(what, str):
                    live.console.print(Text(what))
                else:
                    live.update(Text(line(label, what, time.monotonic() - began)))

            yield show
    else:
        shown = [began]

        def show(what: Progress | str) -> None:
            if isinstance(what, str):
                print(what, flush=True)
            elif time.monotonic() - shown[0] >= PLAIN_EVERY:
                shown[0] = time.monotonic()
                print(line(label, what, time.monotonic() - began), flush=True)

        yield show
    print(f"{label}: done in {clock(time.monotonic() - began)}", flush=True)


def line(label: str, progress: Progress, seconds: float) -> str:
    """`label  [#####.....] 50 %  words  1:00 gone, 1:00 left`."""
    parts = [label]
    left = ""
    if progress.total:
        share = min(1.0, progress.done / progress.total)
        filled = round(20 * share)
        parts.append(f"[{'#' * filled}{'.' * (20 - filled)}] {100 * share:3.0f} %")
        rest = progress.left if progress.left is not None else seconds * (1 - share) / share if share > 0.02 else None
        if rest is not None and share < 1:
            left = f", about {clock(rest)} left"
    parts += [progress.words] if progress.words else []
    return "  ".join([*parts, f"{clock(seconds)} gone{left}"])


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def python(*arguments: str) -> list[str]:
    """The argv of a child that runs `headtrain` in this interpreter."""
    return [sys.executable, "-m", "headtrain", *arguments]
