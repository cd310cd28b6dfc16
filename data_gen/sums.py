"""Checksums of a store's files, and which of them are damaged. Imports no torch: the parent of a run asks too.

`sums/FILE.json` keeps a file's sha256 with the size and time it had when that was seen to be right: while both stand
the file is not hashed again. Who finds values in it that are not finite notes that there (`bad`). The files' sums stand
in index.json as well, and the sum of index.json in the manifest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headtrain.files import read_header, read_json, sha256_file, write_json

MUCH = 20e9  # bytes to hash that are worth a word before


def note(path: Path, sha256: str, part: Path | None = None, **more: str) -> None:
    """Keeps that the file, as it is now, has this sum. part: where it lies until it gets its name."""
    stat = (part or path).stat()
    place = _place(path)
    place.parent.mkdir(exist_ok=True)
    write_json(place, {"sha256": sha256, "size": stat.st_size, "time": stat.st_mtime_ns, **more})


def condemn(path: Path, why: str) -> None:
    """Keeps that the file is of no use although it is whole, so that it is made again."""
    with contextlib.suppress(OSError):  # a folder that is only read, or a full disk: who reads it next finds the same
        note(path, sha256_file(path), bad=why)


def known(path: Path) -> str | None:
    """The sum of the file as it is now, when it has been seen."""
    found = _found(path)
    return found.get("sha256") if _stands(path, found) else None


def damage(path: Path, expected: str | None) -> str:
    """Why the file is of no use, in words behind its name; empty when it is whole. expected: its sum, where known."""
    if not path.is_file():
        return "is gone"
    found = _found(path)
    stands = _stands(path, found)
    if stands and "bad" in found:
        return found["bad"]
    expected = expected or found.get("sha256")
    if stands and found["sha256"] == expected:
        return ""
    if expected is None:
        return "" if _whole(path) else "is no whole file"
    if sha256_file(path) != expected:
        return "is damaged: its checksum is another"
    with contextlib.suppress(OSError):  # a folder that is only read: hashed again by the next reader
        note(path, expected)
    return ""


def damaged(folder: Path, kind: str, manifest: dict[str, Any], say: Callable[[str], None]) -> dict[str, str]:
    """What of a store is of no use: file name -> why. Where there is no index, only what is there can be judged."""
    found, listed = {}, {}
    if why := index_damage(folder, manifest):
        found["index.json"] = why
    elif (folder / "index.json").is_file():
        listed = {entry["file"]: entry["sha256"] for entry in read_json(folder / "index.json")["files"]}
    if _unreadable(folder / "plan.json"):
        found["plan.json"] = "cannot be read"
    paths = [folder / name for name in sorted({*listed, *(path.name for path in folder.glob(f"{kind}-*.safetensors"))})]
    size = sum(path.stat().st_size for path in paths if path.is_file() and not known(path))
    if size > MUCH:
        say(f"{kind}: comparing {size / 1e9:,.0f} GB with their checksums")
    return found | {path.name: why for path in paths if (why := damage(path, listed.get(path.name)))}


def index_damage(folder: Path, manifest: dict[str, Any]) -> str:
    """Why the index of a store cannot be used, in words behind its name; empty when it can, or is not made yet."""
    path = folder / "index.json"
    if not path.is_file():
        return "is gone" if manifest.get("complete") else ""
    expected = manifest.get("index") if manifest.get("complete") else None
    if expected and sha256_file(path) != expected:
        return "is damaged: its checksum is another"
    try:
        names = [(entry["file"], entry["sha256"]) for entry in read_json(path)["files"]]
    except (ValueError, KeyError, TypeError):
        return "cannot be read"
    return "" if names else "lists no file"


def _unreadable(path: Path) -> bool:
    try:
        return path.is_file() and not isinstance(read_json(path), dict)
    except ValueError:
        return True


def _place(path: Path) -> Path:
    return path.parent / "sums" / f"{path.name}.json"


def _found(path: Path) -> dict[str, Any]:
    try:
        found = read_json(_place(path))
    except (ValueError, OSError):  # none yet, or one that is damaged: the file is hashed again
        return {}
    return found if isinstance(found, dict) else {}


def _stands(path: Path, found: dict[str, Any]) -> bool:
    stat = path.stat()
    return (found.get("size"), found.get("time")) == (stat.st_size, stat.st_mtime_ns) and "sha256" in found


def _whole(path: Path) -> bool:
    """Whether a safetensors file has a header that can be read and all the bytes it speaks of."""
    try:
        header, begin = read_header(path)
        return path.stat().st_size == begin + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except Exception:  # whatever a header of arbitrary bytes leads to
        return False
