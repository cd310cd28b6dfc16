"""Files that are either whole or absent: locations, atomic writes, locks, checksums, stage manifests, free space."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import struct
import time
from pathlib import Path
from typing import Any


class LocationError(ValueError):
    """A `package:NAME/FILE` location that is not there; the message says what is."""


FULL = {
    errno.ENOSPC: "the disk is full; make room",
    errno.EDQUOT: "the disk quota is used up; make room",
    errno.EFBIG: "no larger file is allowed here (ulimit -f, the file system); allow it",
}


class DiskFull(OSError):
    """There was no room for a file; the message names it and says what to do."""

    def __str__(self) -> str:
        return f"{self.filename}: {FULL[self.errno]} and run the same command again, which goes on from here"


def cache_dir() -> Path:
    """`$HEADTRAIN_CACHE`, else the XDG cache."""
    if root := os.environ.get("HEADTRAIN_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headtrain"


def locate(location: str) -> str:
    """A Hub id or a path; `package:NAME/FILE` becomes the path of that file inside the installed package NAME."""
    if not location.startswith("package:"):
        return location
    import importlib.util

    name, _, file = location.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise LocationError(f"{location}: the Python package {name!r} is not installed; `pip install` it first")
    root = Path(next(iter(spec.submodule_search_locations)))
    if not file:
        return str(root)
    if (root / file).is_file():
        return str(root / file)
    found = sorted(root.rglob(Path(file).name))
    if not found:
        have = ", ".join(sorted(p.name for p in root.rglob("*") if p.is_file() and p.suffix not in {".py", ".pyc"}))
        raise LocationError(f"{location}: package {name!r} has no file {file!r}; it has: {have or 'no data files'}")
    return str(found[0])


@contextlib.contextmanager
def locked(path: Path):
    """Holds an exclusive lock on `path` (created when missing) for the block, across processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def claimed(path: Path):
    """Yields True while this process holds `path` alone, False when another one does. A dead process holds nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = True
        except BlockingIOError:
            mine = False
        yield mine


def held(path: Path) -> bool:
    """Whether a live process holds `path` (see `claimed`). Asking does not get in the way of one that is about to."""
    if not path.is_file():
        return False
    with open(path) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.contextmanager
def room_for(path: str | Path):
    """DiskFull for `path` where the block finds no room for what it writes, by whichever library."""
    try:
        yield
    except Exception as error:
        code = getattr(error, "errno", None) or next((n for n in FULL if f"(os error {n})" in str(error)), None)
        if code not in FULL or isinstance(error, DiskFull):
            raise
        raise DiskFull(code, os.strerror(code), str(path)) from error


@contextlib.contextmanager
def writing(path: str | Path):
    """Yields a temporary path beside `path`; on success it is flushed to disk and renamed to `path`, else removed.

    The temporary name is of this process and machine alone: others may write the same file. DiskFull without room.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}.part")
    try:
        with room_for(path):
            yield part
            with open(part, "rb") as handle:
                os.fsync(handle.fileno())
            os.replace(part, path)
            fsync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(folder: str | Path):
    """Yields an empty folder beside `folder`; what the block puts there is flushed and takes its place at once.

    A link stays one: where it leads is replaced. ValueError for the folder that the process works in, or one above.
    Whenever it fails or is killed, the old folder is there, or comes back with the next call.
    """
    given, folder = folder, Path(folder).resolve()
    if Path.cwd().is_relative_to(folder):
        raise ValueError(f"{given} is the folder that this command runs in, or one above it; name another one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clear_up(folder)
    part, aside = (folder.with_name(f".{folder.name}.{os.getpid()}.{end}") for end in ("part", "old"))
    part.mkdir()
    try:
        with room_for(folder):
            yield part
            for file in (path for path in part.rglob("*") if path.is_file()):
                with open(file, "rb") as handle:
                    os.fsync(handle.fileno())
            fsync_folder(part)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside)
        part.rename(folder)
        fsync_folder(folder.parent)
    finally:
        _clear_up(folder, os.getpid())


def _clear_up(folder: Path, own: int | None = None) -> None:
    """Takes away what `replacing` left beside a folder, in processes that are gone or in this one (`own`): a part; an
    old folder too, which comes back where no new one has taken its place."""
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        match = re.fullmatch(r"(\d+)\.(part|old)", path.name.removeprefix(f".{folder.name}."))
        if match and (int(match[1]) == own or not Path(f"/proc/{match[1]}").exists()):
            if match[2] == "old" and not folder.exists():
                path.rename(folder)
            else:
                shutil.rmtree(path, ignore_errors=True)


def fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: str | Path, text: str) -> None:
    with writing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, sort_keys=False) + "\n")


def read_json(path: str | Path, remedy: str = "delete it to have it made again") -> Any:
    """The parsed file; ValueError naming it, and the remedy, when it is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); {remedy}") from error


def sha256_file(path: str | Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def fingerprint(value: Any) -> str:
    """sha256 (32 hex digits) of a JSON-able value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode()).hexdigest()[:32]


class Manifest:
    """`manifest.json` of a stage folder: fingerprint, complete, counts, left_out."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.path = self.folder / "manifest.json"
        self.data: dict[str, Any] = read_json(self.path) if self.path.is_file() else {}

    def open(self, mark: str, what: dict[str, Any]) -> bool:
        """Prepares the folder for a stage with this fingerprint; True when it is complete already.

        A folder made with other settings is moved aside to `<folder>.old-<its fingerprint>`, and comes back when its
        settings do. One that has files but no manifest is moved aside for good.
        """
        if self.data.get("fingerprint") == mark:
            return bool(self.data.get("complete"))
        if self.folder.is_dir() and any(self.folder.iterdir()):
            self._move_aside()
        kept = self.folder.with_name(f"{self.folder.name}.old-{mark[:12]}")
        if kept.is_dir() and Manifest(kept).data.get("fingerprint") == mark:
            if self.folder.is_dir():
                self.folder.rmdir()
            kept.rename(self.folder)
            self.data = read_json(self.path)
            return bool(self.data.get("complete"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.data = {"fingerprint": mark, "complete": False, "made_from": what, "counts": {}, "left_out": {}}
        write_json(self.path, self.data)
        return False

    def reopen(self) -> None:
        """Takes completeness back: some of the stage's files are gone."""
        self.data["complete"] = False
        write_json(self.path, self.data)

    def _move_aside(self) -> None:
        old = self.data.get("fingerprint", "")[:12] or f"unmarked-{time.strftime('%Y%m%d-%H%M%S')}"
        aside = self.folder.with_name(f"{self.folder.name}.old-{old}")
        if aside.exists():
            shutil.rmtree(aside)
        self.folder.rename(aside)

    def finish(self, counts: dict[str, Any], left_out: dict[str, int] | None = None, **more: Any) -> None:
        self.data.update(complete=True, counts=counts, left_out=left_out or {}, **more)
        write_json(self.path, self.data)


def free_bytes(folder: str | Path) -> int:
    """Free bytes of the file system that holds `folder` or its nearest existing parent."""
    folder = Path(folder).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """(tensor name -> dtype, shape, data_offsets; where the data begins) of a safetensors file."""
    with open(file, "rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        header = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length
