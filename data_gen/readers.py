"""Streaming readers: the rows of a prompt source one after another, in constant memory.

A source is a file, a folder of files of one form, a file inside an installed package, or a data set of the `datasets`
library (a folder that it saved, or a Hub id). A file holds one JSON array (ShareGPT's form), one JSON object per line,
a Parquet table, or (.txt) one prompt per line; all but Parquet may be compressed with gzip or zstd. What a file is, its
first bytes say, not its name; only .txt is told by the name. A row that cannot be read comes out as a `Broken` with the
reason. JSON is decoded element by element by Python's own decoder: ijson, which is as fast, turns a lone surrogate into
a question mark and gives up at the first byte that is not UTF-8, where only one row is lost here.
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
from headtrain.data_gen.forms import Broken
from headtrain.files import locate

CHUNK = 1 << 22  # bytes read at a time; an object may be larger
BLANK = " \t\r\n"
NAMES = (".json", ".jsonl", ".ndjson", ".txt", ".parquet")  # of data files in a folder, behind them .gz or .zst
SAVED = ("state.json", "dataset_dict.json")  # what `datasets` leaves in a folder that it saved
GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"


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
    with open(path, "rb") as probe:
        magic = probe.read(4)
        if magic == PARQUET:
            yield from _parquet(path)
            return
        probe.seek(0)
        packed = {GZIP: "gzip", ZSTD[:2]: "zstd"}.get(magic[:2])
        fault: list[str] = []
        handle = io.BufferedReader(_Unpacked(probe, packed, fault), 1 << 16) if packed else probe
        start = handle.peek(1 << 12).removeprefix(codecs.BOM_UTF8).lstrip()
        if path.name.removesuffix(".gz").removesuffix(".zst").endswith(".txt"):
            found = _prompts(handle, fault)
        else:
            found = _array(handle, path) if start.startswith(b"[") else _lines(handle)
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
        if self.fault:
            return 0
        try:
            data = self.stream.read(len(buffer))
        except (EOFError, OSError, ValueError, zlib.error) as error:
            self.fault.append(str(error))
            return 0
        buffer[: len(data)] = data
        return len(data)


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

def _prompts(handle: io.BufferedReader, fault: list[str]) -> Iterator[tuple[int, Any]]:
    """One prompt per line."""
    for number, line, text, ended in _raw_lines(handle):
        try:
            if fault and not ended:
                yield number, Broken("cut_off", f"line {line}: {fault[0]}")
            else:
                yield number, {"prompt": text.decode("utf-8")}
        except UnicodeDecodeError as error:
            yield number, Broken("invalid_utf8", f"line {line}: {error}")


def _lines(handle: io.BufferedReader) -> Iterator[tuple[int, Any]]:
    """One JSON object per line."""
    for number, line, text, ended in _raw_lines(handle):
        try:
            row = json.loads(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            row = Broken("invalid_utf8", f"line {line}: {error}")
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            row = Broken("broken_json" if ended else "cut_off", f"line {line}: {error}")
        yield number, row


def _raw_lines(handle: io.BufferedReader) -> Iterator[tuple[int, int, bytes, bool]]:
    """(row from 0, line from 1, text, whether LF ends it) of lines that are not blank. U+2028 is text, no line end."""
    number = 0
    for at, raw in enumerate(handle, 1):
        text = (raw.removeprefix(codecs.BOM_UTF8) if at == 1 else raw).strip()
        if text:
            yield number, at, text, raw.endswith(b"\n")
            number += 1


def _array(handle: io.BufferedReader, path: Path) -> Iterator[tuple[int, Any]]:
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
