"""Streaming readers: the rows of a prompt source one after another, in constant memory.

A source is a file, a folder of files of one form, a file inside an installed package, or a data set of the `datasets`
library (a folder that it saved, or a Hub id). A file holds one JSON array (ShareGPT's form), one JSON object per line,
a Parquet table, or (.txt) one prompt per line; all but Parquet may be compressed with gzip or zstd. What a file is, its
first bytes say, not its name; only .txt is told by the name. A row that cannot be read comes out as a `Broken` with the
reason, and reading goes on behind it; where its end cannot be told, the file is a ReadError. JSON is decoded element by
element by Python's own decoder: ijson, which is as fast, turns a lone surrogate into a question mark and gives up at
the first byte that is not UTF-8, where only one row is lost here.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headtrain.config import PromptSource
from headtrain.data_gen.forms import ROLE_KEYS, Broken
from headtrain.files import locate

CHUNK = 1 << 22  # bytes read at a time; a row may be larger
HEAD = 1 << 17  # bytes that tell what a file is
LARGEST = 1 << 26  # characters of a row; a longer one has lost its end, and would only fill the memory
BLANK = " \t\r\n"
NAMES = (".json", ".jsonl", ".ndjson", ".txt", ".parquet")  # of data files in a folder, behind them .gz or .zst
SAVED = ("state.json", "dataset_dict.json")  # what `datasets` leaves in a folder that it saved
GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
OTHERS = {
    b"BZh9": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"ARROW1": "Arrow", b"SQLite": "SQLite",
    b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip
# A text (whole, or up to the end), or a bracket.
STRUCTURE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


class ReadError(ValueError):
    """A prompt source that is missing or of no known form; the message names it and says what to do."""


def rows(source: str | PromptSource) -> Iterator[tuple[int, Any]]:
    """(row number from 0 in its file, parsed row or Broken) of all files of a source."""
    for _, found in files(PromptSource(source) if isinstance(source, str) else source):
        yield from found


def files(place: PromptSource) -> Iterator[tuple[str, Iterator[tuple[int, Any]]]]:
    """(name, rows) of each file of a source. ReadError: no such source, or a fault in the middle of a JSON array."""
    path = Path(locate(place.source)).expanduser()
    if is_hub_id(place.source):
        yield place.source, _table_rows(_from_hub(place))
        return
    saved = path.is_dir() and any((path / name).is_file() for name in SAVED)
    for key in ("subset", "revision") if saved else ("subset", "split", "revision"):
        if getattr(place, key):
            raise ReadError(f"data.prompts source {place.source}: only Hub data sets have a {key}; leave it out")
    if saved:
        yield place.source, _table_rows(_saved(path, place))
        return
    for file in _files_of(path, place.source):
        yield str(file.relative_to(path)) if path.is_dir() else place.source, read(file)


def is_hub_id(source: str) -> bool:
    """Whether a source is the id of a Hub data set (user/name): no file or folder, and not named like a file."""
    looks = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source) and not source.endswith((*NAMES, ".gz", ".zst"))
    return bool(looks) and not Path(source).exists()


def read(path: Path) -> Iterator[tuple[int, Any]]:
    """(row number from 0, parsed row or Broken) of one file."""
    with open(path, "rb", buffering=HEAD) as probe:
        magic = probe.read(4)
        if magic == PARQUET:
            yield from _parquet(path)
            return
        probe.seek(0)
        packed = {GZIP: "gzip", ZSTD[:2]: "zstd"}.get(magic[:2])
        fault: list[str] = []
        handle = io.BufferedReader(_Unpacked(probe, packed, fault), HEAD) if packed else probe
        start = handle.peek(HEAD)
        if other := next((kind for mark, kind in OTHERS.items() if start.startswith(mark)), None):
            raise ReadError(f"{path}: {other} is not read; make it UTF-8 text, as JSON or JSON lines (or .gz, .zst)")
        start = start.removeprefix(codecs.BOM_UTF8).lstrip()
        if path.name.removesuffix(".gz").removesuffix(".zst").endswith(".txt"):
            found = _prompts(handle, path, fault)
        else:
            found = (_array if start.startswith(b"[") and not _is_a_line(start) else _lines)(handle, path)
        number, row = -1, None
        for number, row in found:
            yield number, row
        if fault and not (isinstance(row, Broken) and row.reason == "cut_off"):
            yield number + 1, Broken("cut_off", f"the compressed file is damaged after row {number}: {fault[0]}")


class _Unpacked(io.RawIOBase):
    """A decompressed stream that ends where the compressed file is cut off or damaged; `fault` then has the reason."""

    def __init__(self, handle: io.BufferedReader, kind: str, fault: list[str]):
        self.fault = fault
        if kind == "gzip":
            self.stream: Any = gzip.GzipFile(fileobj=handle)
        else:
            import pyarrow

            self.stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(handle), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        done = 0
        try:  # little at a time: what stands before the fault in the same read would be lost with it
            while not self.fault and (data := self.stream.read1(min(len(buffer) - done, 1 << 13))):
                buffer[done : done + len(data)] = data
                done += len(data)
        except (EOFError, OSError, ValueError, zlib.error) as error:
            self.fault.append(str(error))
        return done


def _files_of(path: Path, source: str) -> list[Path]:
    """The file, or all data files of a folder in the order of their names, when they are of one form."""
    if path.is_dir():
        plain = {p: p.name.removesuffix(".gz").removesuffix(".zst") for p in sorted(path.rglob("*")) if p.is_file()}
        found = {p: Path(name).suffix for p, name in plain.items() if name.endswith(NAMES)}
        if set(found.values()) != {".txt"}:  # beside data a text is a licence or the like
            found = {p: form for p, form in found.items() if form != ".txt"}
        if len(set(found.values())) != 1:
            names = ", ".join(str(p.relative_to(path)) for p in list(found)[:8]) or "none"
            raise ReadError(
                f"data.prompts source {source}: a folder needs data files of one form ({', '.join(NAMES)}), it has: "
                f"{names}; name the file"
            )
        return list(found)
    if not path.is_file():
        raise ReadError(
            f"data.prompts source {source}: no such file; give a {', '.join(NAMES)} file (or .gz, .zst), a folder, "
            "package:NAME/FILE, or the id of a Hub data set (user/name)"
        )
    return [path]


# ------------------------------------------------------------------------------------------------- text files

def _prompts(handle: io.BufferedReader, path: Path, fault: list[str]) -> Iterator[tuple[int, Any]]:
    """One prompt per line."""
    for number, line, text, ended in _raw_lines(handle, path):
        try:
            if fault and not ended:
                yield number, Broken("cut_off", f"line {line}: {fault[0]}")
            else:
                yield number, {"prompt": text.decode("utf-8")}
        except UnicodeDecodeError as error:
            yield number, Broken("invalid_utf8", f"line {line}: {error}")


def _lines(handle: io.BufferedReader, path: Path) -> Iterator[tuple[int, Any]]:
    """One JSON object per line."""
    for number, line, text, ended in _raw_lines(handle, path):
        try:
            row = json.loads(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            row = Broken("invalid_utf8", f"line {line}: {error}")
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            row = Broken("broken_json" if ended else "cut_off", f"line {line}: {error}")
        yield number, row


def _is_a_line(start: bytes) -> bool:
    """Whether a file's first array is one of its rows, a list of messages: its line ends there, and more follows."""
    first, _, rest = start.partition(b"\n")
    try:
        row = json.loads(first) if rest.strip() else None
    except (ValueError, RecursionError):
        return False
    return isinstance(row, list) and bool(row) and isinstance(row[0], dict) and not row[0].keys().isdisjoint(ROLE_KEYS)


def _raw_lines(handle: io.BufferedReader, path: Path) -> Iterator[tuple[int, int, bytes, bool]]:
    """(row from 0, line from 1, text, whether LF ends it) of lines that are not blank. U+2028 is text, no line end."""
    number = 0
    for at, raw in enumerate(iter(lambda: handle.readline(LARGEST), b""), 1):
        if len(raw) == LARGEST and not raw.endswith(b"\n"):
            raise ReadError(f"{path}: line {at} is longer than {LARGEST >> 20} MiB; write a row to a line")
        if text := raw.removeprefix(codecs.BOM_UTF8).strip():  # files that were put together have several BOMs
            yield number, at, text, raw.endswith(b"\n")
            number += 1


def _array(handle: io.BufferedReader, path: Path) -> Iterator[tuple[int, Any]]:
    """The elements of one JSON array. Bytes that are not UTF-8 become lone surrogates, which the caller rejects."""
    decode = json.JSONDecoder().raw_decode
    text, at, number, ended = "", 0, 0, False
    bytes_in = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")

    def more() -> bool:
        nonlocal text, at, ended
        if len(text) - at > LARGEST:
            raise ReadError(
                f"{path}: row {number} is longer than {LARGEST >> 20} MiB, or its end is missing; repair the file"
            )
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
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            unfinished = isinstance(error, json.JSONDecodeError) and _may_go_on(error, len(text))
            if unfinished and more():
                continue
            place = getattr(error, "pos", at)
            why = f"{getattr(error, 'msg', error)} near {text[max(place - 20, 0) : place + 20]!r}"
            while (at_next := _end_of(text, at)) is None and more():
                pass
            if unfinished and at_next is None:
                yield number, Broken("cut_off", f"the file ends inside row {number} (rows count from 0)")
                return
            at, row = at_next or at, Broken("broken_json", why)
            if not at_next or (skip(BLANK) and text[at] not in ",]"):
                raise ReadError(
                    f"{path}: row {number} (from 0) is not valid JSON, and where it ends cannot be told ({why}); "
                    "repair the file"
                ) from error
            at_next = at  # behind spaces, or in the text read last
        if at_next >= len(text) - 1 and not ended and more_after_number(row):
            more()  # a bare number at the edge of the buffer may have more digits
            continue
        yield number, row
        number, at = number + 1, at_next
    yield number, Broken("cut_off", f"the file ends after row {number - 1} without the closing bracket")


def more_after_number(row: Any) -> bool:
    return isinstance(row, int | float) and not isinstance(row, bool)


def _end_of(text: str, at: int) -> int | None:
    """Where the element at `at` ends, by its brackets alone: 0 when they do not match, None when not in the text."""
    if text[at] not in '"[{':
        return found.start() if (found := re.compile(r"[,\]]").search(text, at)) else None
    open_ones: list[str] = []
    for found in STRUCTURE.finditer(text, at):
        mark = found[0]
        if mark in "[{":
            open_ones.append({"[": "]", "{": "}"}[mark])
        elif mark in "]}" and open_ones.pop() != mark:
            return 0
        if not open_ones:
            return found.end() if mark in "]}" or found.end() < len(text) else None
    return None


def _may_go_on(error: json.JSONDecodeError, length: int) -> bool:
    """Whether more text could still make the element whole: an open string, or a fault at the very end."""
    return error.msg.startswith("Unterminated string") or error.pos >= length - 6


# ------------------------------------------------------------------------------------------------- tables

def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path, pre_buffer=False)
        yield from _table_rows(row for batch in table.iter_batches(batch_size=256) for row in batch.to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise ReadError(f"{path}: cannot be read as Parquet ({error}); download it again") from error


def _table_rows(found: Any) -> Iterator[tuple[int, Any]]:
    """Rows of a table: it has every key in every row, null where the row had none, so nulls are taken out."""
    for number, row in enumerate(found):
        yield number, without_nulls(row)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _saved(path: Path, place: PromptSource) -> Any:
    from datasets import load_from_disk

    try:
        found = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ReadError(f"data.prompts source {place.source}: cannot be read as a saved data set: {error}") from error
    return _split(found, place)


def _from_hub(place: PromptSource) -> Any:
    """Downloaded into the Hub cache, at the revision that the run has pinned."""
    from datasets import load_dataset

    try:
        found = load_dataset(place.source, place.subset, revision=place.revision)
    except Exception as error:  # what is raised without a network depends on the HTTP library
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ReadError(
            f"data.prompts source {place.source}: no such file, and not readable as a Hub data set ({reason}); check "
            "the name, the network, `subset` and `hf auth login`"
        ) from error
    return _split(found, place)


def _split(found: Any, place: PromptSource) -> Any:
    """One split; of several it must be `split`, or train."""
    if not isinstance(found, dict):
        if place.split:
            raise ReadError(f"data.prompts source {place.source}: it has no splits; leave split={place.split} out")
        return found
    name = place.split or (next(iter(found)) if len(found) == 1 else "train")
    if name not in found:
        raise ReadError(f"data.prompts source {place.source}: no split {name!r}; split may be {', '.join(found)}")
    return found[name]
