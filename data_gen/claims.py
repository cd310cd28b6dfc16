"""Batches shared by several worker processes: each is claimed by a lock that dies with its holder, and done once."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headtrain.files import claimed, read_json, write_json

log = logging.getLogger(__name__)


def file_name(kind: str, batch: int) -> str:
    """Of the file with one batch of a store; `kind`: responses or captures."""
    return f"{kind}-{batch:05d}.safetensors"


def unfinished(folder: Path, kind: str, batches: int, also: Path | None = None) -> Iterator[int]:
    """Yields the batches without a file of `kind` in `folder`, each held by this process while the caller works on it.

    Batches that another live process holds are passed over. What a killed process left half-written, in `folder` and
    `also`, is removed and reported.
    """
    found = True
    while found:
        found = False
        for batch in range(batches):
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


def remove_parts(folder: Path, name: str) -> None:
    """Removes half-written versions of the files that `name` (a pattern) matches; only for who alone writes them."""
    for part in (*folder.glob(f".{name}.*.part"), *(folder / "sums").glob(f".{name}.json.*.part")):
        log.warning("%s was left half-written by a process that died; it is made again", part.name)
        part.unlink(missing_ok=True)


class Meter:
    """Counts a worker's tokens and tells the watching parent, in `claims/<batch>.json`, at most every two seconds.

    The last `tell` comes before the batch's file is written: afterwards nobody would tidy up a note cut short.
    """

    def __init__(self, folder: Path, batch: int, progress: Any, estimate: int):
        self.path = folder / "claims" / f"{batch}.json"
        self.progress, self.estimate = progress, estimate
        self.tokens, self.started, self.told = 0, time.monotonic(), 0.0

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        if time.monotonic() - self.told >= 2:
            self.tell()

    def tell(self) -> None:
        self.told = time.monotonic()
        write_json(self.path, {"pid": os.getpid(), "tokens": self.tokens, "seconds": self.told - self.started})
        if self.progress:
            self.progress(self.tokens, self.estimate)


def progress_of(folder: Path, kind: str, batches: int) -> dict[str, Any]:
    """{batches, done_batches, tokens, seconds}: tokens and working seconds summed over all batches that were begun."""
    notes = [read_json(path) for path in (folder / "claims").glob("*.json")]
    return {
        "batches": batches,
        "done_batches": sum((folder / file_name(kind, batch)).is_file() for batch in range(batches)),
        "tokens": sum(note["tokens"] for note in notes),
        "seconds": sum(note["seconds"] for note in notes),
    }
