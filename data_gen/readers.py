"""Streaming readers: the rows of a prompt file one after another, in constant memory.

A file holds one JSON array (ShareGPT's form) or one JSON object per line; either may be gzipped. What a file is, its
first characters say, not its name. A row that cannot be read comes out as a `Broken` with the reason.
"""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from headtrain.files import locate

CHUNK = 1 << 22  # bytes read at a time; an object may be larger
BLANK = " \t\r\n"


class ReadError(ValueError):
    """A prompt file that is missing or of no known form; the message names it and says what to do."""


@dataclass
class Broken:
    """A row that could not be read. `cut_off`: the file ends in the middle of it; `broken_json`: not JSON."""

    reason: str
    detail: str


def rows(source: str) -> Iterator[tuple[int, Any]]:
    """(row number from 0, parsed object or Broken) of a file or a `package:NAME[/FILE]`.

    ReadError when there is no such file, or when a JSON array has a fault before its end.
    """
    path = _file_of(source)
    with open(path, "rb") as probe:
        packed = probe.read(2) == b"\x1f\x8b"
    with gzip.open(path) if packed else open(path, "rb") as handle:
        start = handle.read(1 << 12).removeprefix(codecs.BOM_UTF8).lstrip()
        handle.seek(0)
        yield from _array(handle, path) if start.startswith(b"[") else _lines(handle)


def _file_of(source: str) -> Path:
    path = Path(locate(source)).expanduser()
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.name.endswith((".json", ".jsonl", ".jsonl.gz", ".json.gz")))
        if len(found) != 1:
            names = ", ".join(str(p.relative_to(path)) for p in found[:8]) or "none"
            raise ReadError(f"data.prompts source {source}: a folder needs exactly one JSON file, it has: {names}")
        return found[0]
    if not path.is_file():
        raise ReadError(
            f"data.prompts source {source}: no such file; give a .json or .jsonl file or package:NAME/FILE"
        )
    return path


def _lines(handle: BinaryIO) -> Iterator[tuple[int, Any]]:
    """One JSON object per line; lines end at LF only (U+2028 is text), blank lines are no rows."""
    number = 0
    for at, raw in enumerate(handle):
        line = (raw.removeprefix(codecs.BOM_UTF8) if at == 0 else raw).strip()
        if not line:
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            row = Broken("invalid_utf8", f"line {at + 1}: {error}")
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            row = Broken("broken_json" if raw.endswith(b"\n") else "cut_off", f"line {at + 1}: {error}")
        yield number, row
        number += 1


def _array(handle: BinaryIO, path: Path) -> Iterator[tuple[int, Any]]:
    """The elements of one JSON array. Bytes that are not UTF-8 become lone surrogates, which the caller rejects."""
    decode = json.JSONDecoder().raw_decode
    text, at, number, ended = "", 0, 0, False
    bytes_in = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")

    def more() -> bool:
        nonlocal text, at, ended
        data = handle.read(max(CHUNK, len(text) - at))  # doubles while one object does not fit
        ended = not data
        text, at = text[at:] + bytes_in.decode(data, final=ended), 0
        return not ended

    def skip(characters: str) -> bool:
        """Moves to the next character that is none of these; False at the end of the file."""
        nonlocal at
        while True:
            while at < len(text) and text[at] in characters:
                at += 1
            if at < len(text):
                return True
            if not more():
                return False

    skip(BLANK)
    at += 1  # the opening bracket
    while skip(BLANK + ","):
        if text[at] == "]":
            at += 1
            if skip(BLANK):
                raise ReadError(f"{path}: text follows the closing bracket of the JSON array; repair the file")
            return
        try:
            row, at_next = decode(text, at)
        except json.JSONDecodeError as error:
            if not _may_go_on(error, len(text)):
                raise ReadError(
                    f"{path}: the element after row {number} is not valid JSON ({error.msg} near "
                    f"{text[max(error.pos - 20, 0) : error.pos + 20]!r}); repair the file"
                ) from error
            if more():
                continue
            yield number, Broken("cut_off", f"the file ends inside row {number} (rows count from 0)")
            return
        except (ValueError, RecursionError) as error:
            raise ReadError(f"{path}: row {number} cannot be read ({type(error).__name__}: {error})") from error
        if at_next >= len(text) - 1 and not ended and more_after_number(row):
            more()  # a bare number at the edge of the buffer may have more digits
            continue
        yield number, row
        number, at = number + 1, at_next
    yield number, Broken("cut_off", f"the file ends after row {number - 1} without the closing bracket")


def more_after_number(row: Any) -> bool:
    return isinstance(row, int | float) and not isinstance(row, bool)


def _may_go_on(error: json.JSONDecodeError, length: int) -> bool:
    """Whether more text could still make the element whole: an open string, or a fault at the very end."""
    return error.msg.startswith("Unterminated string") or error.pos >= length - 6
