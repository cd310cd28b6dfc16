"""Batches shared by several worker processes: each is claimed by a lock that dies with its holder, and done once."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headtrain.files import claimed, read_json, write_json

log = logging.getLogger(__name__)

WINDOW = 60.0  # seconds over which a process's pace is taken
FRESH = 30.0  # seconds after which what a process told of its pace is no longer so


def file_name(kind: str, batch: int) -> str:
    """Of the file with one batch of a store; `kind`: responses or captures."""
    return f"{kind}-{batch:05d}.safetensors"


def unfinished(folder: Path, kind: str, batches: int | Sequence[int], also: Path | None = None) -> Iterator[int]:
    """Yields the batches without a file of `kind` in `folder`, each held by this process while the caller works on it.

    batches: their numbers, or how many there are.
    Batches that another live process holds are passed over. What a killed process left half-written, in `folder` and
    `also`, is removed and reported.
    """
    found = True
    while found:
        found = False
        for batch in numbers(batches):
            path = folder / file_name(kind, batch)
            if path.is_file():
                continue
            with claimed(folder / "claims" / f"{batch}.lock") as mine:
                if not mine or path.is_file():
                    continue
                for place in (folder, also or folder):
                    remove_parts(place, f"*-{batch:05d}.safetensors")
                remove_parts(folder / "claims", f"{batch}.json")
                yield batch
                found = True


def numbers(batches: int | Sequence[int]) -> Sequence[int]:
    return range(batches) if isinstance(batches, int) else batches


def remove_parts(folder: Path, name: str) -> None:
    """Removes half-written versions of the files that `name` (a pattern) matches; only for who alone writes them."""
    for part in (*folder.glob(f".{name}.*.part"), *(folder / "sums").glob(f".{name}.json.*.part")):
        log.warning("%s was left half-written by a process that died; it is made again", part.name)
        part.unlink(missing_ok=True)


def leads(team: Any) -> bool:
    """Whether this process writes what its team (headtrain/team.py; None: itself alone) makes."""
    return team is None or team.first


class Meter:
    """Counts a worker's tokens and tells whoever watches, in `claims/<name>.json`, at most every two seconds.

    name: of a batch, its number. The last `tell` comes before the batch's file is written: afterwards nobody would tidy
    up a note cut short. `facts`: what is told besides.
    """

    def __init__(
        self, folder: Path, name: int | str, progress: Any, estimate: int, tokens: int = 0, tells: bool = True
    ):
        """tokens: of earlier runs. tells: False for all but one process of a team."""
        self.path = folder / "claims" / f"{name}.json"
        self.progress, self.estimate, self.pace = progress, estimate, PACES.setdefault(folder, Pace())
        self.tokens, self.started, self.told = tokens, time.monotonic(), 0.0
        self.facts: dict[str, Any] = {}
        self.tells = tells

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self.pace.add(tokens)
        if time.monotonic() - self.told >= 2:
            self.tell()

    def tell(self, **facts: Any) -> None:
        self.told = time.monotonic()
        if not self.tells:
            return
        self.facts |= facts
        note = {"pid": os.getpid(), "tokens": self.tokens, "seconds": self.told - self.started, "at": time.time()}
        write_json(self.path, note | {"rate": self.pace.rate(), **self.facts})
        if self.progress:
            self.progress(self.tokens, self.estimate)


class Pace:
    """Tokens per second of this process over the last WINDOW seconds, whatever batches they belong to."""

    def __init__(self):
        self.counts: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])  # when, tokens until then

    def add(self, tokens: int) -> None:
        now, (last, before) = time.monotonic(), self.counts[-1]
        if now - last < 1 and len(self.counts) > 1:
            self.counts.pop()
        self.counts.append((now, before + tokens))

    def rate(self) -> float:
        now = time.monotonic()
        while len(self.counts) > 2 and self.counts[1][0] < now - WINDOW:
            self.counts.popleft()
        (first, before), (_, after) = self.counts[0], self.counts[-1]
        return (after - before) / max(now - first, 1)


PACES: dict[Path, Pace] = {}  # of this process, by folder


def progress_of(
    folder: Path, kind: str, batches: int | Sequence[int], seen: dict[int, dict] | None = None
) -> dict[str, Any]:
    """How far the batches are, by the notes of the processes that do them.

    {batches; done_batches; done: finished batch -> its note, {} without one; tokens and seconds (of work), summed over
    all that were begun; rate: tokens per second now, 0 when nobody told of any for a while; left_out: reason -> number;
    servers: the note of who asks servers, or None}. seen: `done` of the last call, which saves reading it again.
    """
    done = {} if seen is None else seen
    files, notes = _names(folder), _names(folder / "claims")
    begun: list[dict] = []
    for batch in numbers(batches):
        if batch not in done:
            note = _note(folder, batch, notes)
            if file_name(kind, batch) in files:
                done[batch] = note  # the last one: it came before the file
            elif note:
                begun.append(note)
    servers = _note(folder, "servers", notes) or None
    told = [servers] if servers else [*begun, *done.values()]
    latest = {note["pid"]: note for note in sorted(filter(None, told), key=lambda note: note.get("at", 0))}
    fresh = time.time() - FRESH
    return {
        "batches": len(numbers(batches)), "done_batches": len(done), "done": done, "servers": servers,
        "tokens": sum(note.get("tokens", 0) for note in told), "seconds": sum(note.get("seconds", 0) for note in told),
        "rate": sum(note.get("rate", 0) for note in latest.values() if note.get("at", 0) > fresh),
        "left_out": sum((Counter(note.get("left_out")) for note in told), Counter()),
    }  # fmt: skip


def _names(folder: Path) -> set[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return {entry.name for entry in entries}
    return set()


def _note(folder: Path, name: int | str, names: set[str]) -> dict[str, Any]:
    """The note of that name; empty without one."""
    if f"{name}.json" in names:
        with contextlib.suppress(FileNotFoundError):  # a batch that is done again
            return read_json(folder / "claims" / f"{name}.json")
    return {}
