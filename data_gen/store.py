"""The two stores: responses (token ids) and captures (ids plus the target's states), one safetensors file per batch.

A file holds its rows one after another in flat tensors, `offsets` int64 [R+1] says where each starts; what else is
known of a row stands as JSON in the file's header. `index.json` lists the files with their checksums. The fields are
those of docs/architecture.md, "A row of the stores". Shapes: N tokens of a file, T of a row, A taps, H hidden.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtrain.data_gen import float8, sums
from headtrain.data_gen.claims import file_name, numbers
from headtrain.facts import tokens_of_start
from headtrain.files import read_json, sha256_file, write_json, writing

VERSION = 1
REMEDY = "`headtrain generate` with the run's arguments makes it again and leaves the rest as it is"
NORMS = ("post_norm", "pre_norm")


class StoreError(ValueError):
    """A store that is missing, damaged, or says too little about itself; the message names the file and what to do."""


@dataclass
class RowInfo:
    """What is known of a row without reading it. `first`: position of the first supervised token."""

    id: str
    split: str
    source: str
    tokens: int
    finish: str  # stop | length
    first: int
    supervised: int
    file: str = ""
    index: int = 0


@dataclass
class ResponseRow:
    ids: Tensor  # int32 [T]
    supervised: Tensor  # bool [T]


@dataclass
class CaptureRow:
    """Views into the mapped file (states kept in float8: bfloat16 copies); do not write to them.

    Position T-1 of a whole row is zeros.
    """

    ids: Tensor  # int32 [T]
    supervised: Tensor  # bool [T]
    taps: Tensor  # [T, A, H] un-normed residual stream
    last: Tensor  # [T, H] after the final norm
    argmax: Tensor  # int32 [T], the target's choice for the next token
    logsumexp: Tensor  # float32 [T]


# ------------------------------------------------------------------------------------------------- writing

def write_unit(
    folder: str | Path, kind: str, batch: int, rows: list[RowInfo], tensors: dict[str, Tensor], **facts: Any
) -> Path:
    """Writes the file of one batch, whole or not at all. `tensors` are flat [N, ...] in the order of `rows`.

    facts: what the file says of itself; with `dtype` float8 the states are encoded here.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    offsets = torch.tensor([0, *(row.tokens for row in rows)], dtype=torch.int64).cumsum(0)
    for name, tensor in tensors.items():
        if len(tensor) != (total := int(offsets[-1])):
            raise StoreError(f"{file_name(kind, batch)}: {name} has {len(tensor)} positions, the rows have {total}")
    if facts.get("dtype") == float8.NAME:
        tensors = float8.pack(tensors)
    plain = [{k: v for k, v in asdict(row).items() if k not in ("file", "index")} for row in rows]
    header = {"kind": kind, "version": str(VERSION), "rows": json.dumps(plain), "facts": json.dumps(facts)}
    path = folder / file_name(kind, batch)
    with writing(path) as part:
        save_file({**tensors, "offsets": offsets}, part, metadata=header)
        sums.note(path, sha256_file(part), part)
    return path


def read_header(path: Path) -> tuple[list[RowInfo], dict[str, Any]]:
    """(rows, facts) of one file; StoreError naming it when it is none of ours."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as handle:
            header = handle.metadata() or {}
        if header.get("version") != str(VERSION):
            raise StoreError(
                f"{path} is no file of this store (version {header.get('version')}, {VERSION} is known); {REMEDY}"
            )
        rows = [RowInfo(**row, file=path.name, index=n) for n, row in enumerate(json.loads(header["rows"]))]
        return rows, json.loads(header["facts"])
    except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise StoreError(f"{path} cannot be read ({error}); {REMEDY}") from error


def write_index(folder: str | Path, kind: str, batches: int | Sequence[int]) -> dict[str, Any]:
    """Lists the files 0 … batches-1, or of the numbers given, with checksums in index.json.

    All must agree on their facts (norm, taps, dtype).
    """
    folder, files, facts = Path(folder), [], None
    for batch in numbers(batches):
        path = folder / file_name(kind, batch)
        if not path.is_file():
            raise StoreError(f"{path} is missing: the stage is not finished")
        if why := sums.damage(path, None):
            raise StoreError(f"{path} {why}; {REMEDY}")
        if not (sha256 := sums.known(path)):
            sums.note(path, sha256 := sha256_file(path))
        rows, own = read_header(path)
        own = {k: v for k, v in own.items() if k not in ("seconds", "left_out", "agreed")}
        if facts is not None and own != facts:
            raise StoreError(f"{path} was made with other settings than the first file ({own} and {facts})")
        facts = own
        files.append({
            "file": path.name, "sha256": sha256, "rows": len(rows), "tokens": sum(r.tokens for r in rows),
            "supervised": sum(r.supervised for r in rows),
        })  # fmt: skip
    index = {"kind": kind, "version": VERSION, **(facts or {}), "files": files}
    write_json(folder / "index.json", index)
    return index


def left_out(folder: str | Path, kind: str, batches: int | Sequence[int]) -> Counter:
    """What was left out while the files 0 … batches-1, or of the numbers given, were made: reason -> number."""
    facts = (read_header(Path(folder) / file_name(kind, batch))[1] for batch in numbers(batches))
    return sum((Counter(own.get("left_out")) for own in facts), Counter())


# ------------------------------------------------------------------------------------------------- reading

def finite(values: Tensor) -> bool:
    """Whether all values are: by their sum, a hundred times as fast as one by one, which a sum too large needs."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


class _Store:
    """What both stores share: the index, row lists, mapped files. A file's checksum is compared before it is used."""

    kind = ""

    def __init__(self, folder: str | Path, max_length: int | None = None, so_far: bool = False):
        self.folder, self.max_length, self.so_far = Path(folder), max_length, so_far
        self.left_out: dict[str, int] = {}
        self.index: dict[str, Any] = {"kind": self.kind, "files": []}
        self._sums: dict[str, str | None] = {}
        self._open: dict[str, dict[str, Tensor]] = {}
        if so_far:
            self.rows = []
            self.refresh()
            return
        if not (self.folder / "index.json").is_file():
            raise StoreError(f"{self.folder} has no index.json: the {self.kind} stage is not finished")
        self.index = read_json(self.folder / "index.json")
        if self.index.get("kind") != self.kind:
            raise StoreError(f"{self.folder} holds {self.index.get('kind')}, not {self.kind}")
        self._sums = {entry["file"]: entry["sha256"] for entry in self.index["files"]}

    @functools.cached_property
    def rows(self) -> list[RowInfo]:
        return [row for name in self._sums for row in read_header(self.folder / name)[0] if self._fits(row)]

    def refresh(self) -> int:
        """Takes in the files finished since the store was opened `so_far`; returns how many rows came.

        A file appears whole, under its name, or not at all; there may be writers in other processes meanwhile.
        """
        before = len(self.rows)
        for path in sorted(self.folder.glob(f"{self.kind}-*.safetensors")):
            if path.name not in self._sums:
                rows, facts = read_header(path)
                self.index = facts | self.index
                self._sums[path.name] = sums.known(path)
                self.rows += filter(self._fits, rows)
        return len(self.rows) - before

    def _fits(self, row: RowInfo) -> bool:
        """Cuts the row's length to max_length; False (counted) when nothing supervised would be left."""
        if self.max_length is None or row.tokens <= self.max_length:
            return True
        row.tokens, row.finish = self.max_length, "length"
        row.supervised = min(row.supervised, self.max_length - row.first)
        reason = "cut_to_max_length" if row.supervised > 0 else "no_supervised_tokens_after_truncation"
        self.left_out[reason] = self.left_out.get(reason, 0) + 1
        return row.supervised > 0

    def _tensors(self, name: str) -> dict[str, Tensor]:
        """The flat tensors of a file, mapped."""
        if name not in self._open:
            from safetensors import safe_open

            if why := sums.damage(self.folder / name, self._sums[name]):
                raise StoreError(f"{self.folder / name} {why}; {REMEDY}")
            if len(self._open) >= 256:
                self._open.pop(next(iter(self._open)))
            with safe_open(self.folder / name, framework="pt") as handle:
                self._open[name] = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
        return self._open[name]

    def _slice(self, row: RowInfo, names: tuple[str, ...]) -> list[Tensor]:
        tensors = self._tensors(row.file)
        start = int(tensors["offsets"][row.index])
        return [tensors[name][start : start + row.tokens] for name in names]


class ResponseStore(_Store):
    """Reads a responses folder. `.rows`: list of RowInfo; `.read(row)`; `.on_policy`.

    so_far: of a folder that is being written, the rows of the files that are finished; `.refresh()` adds new ones.
    """

    kind = "responses"

    @property
    def on_policy(self) -> bool:
        return bool(self.index["on_policy"])

    def read(self, row: RowInfo) -> ResponseRow:
        return ResponseRow(*self._slice(row, ("ids", "supervised")))

    def files(self) -> Iterator[tuple[list[RowInfo], ResponseRow]]:
        """File by file: its rows, and what they hold, one after another. Nothing is kept in memory."""
        for name in self._sums:
            tensors = self._tensors(name)
            yield read_header(self.folder / name)[0], ResponseRow(tensors["ids"], tensors["supervised"])
            self._open.pop(name, None)

    def token_counts(
        self, split: str, vocab: int, sources: Container[str] | None = None
    ) -> tuple[Tensor, Tensor]:
        """How often each token id occurs in a split: (among supervised tokens, among all), int64 [V] each.

        sources: only in rows of these.
        """
        supervised, everything = torch.zeros(vocab, dtype=torch.int64), torch.zeros(vocab, dtype=torch.int64)
        for rows, read in self.files():
            counts = [row.split == split and (sources is None or row.source in sources) for row in rows]
            mine = torch.tensor(counts, dtype=torch.bool).repeat_interleave(torch.tensor([row.tokens for row in rows]))
            ids = read.ids[mine].long()
            if len(ids) and int(ids.max()) >= vocab:
                raise StoreError(f"{rows[0].file} has token id {int(ids.max())}, the vocabulary has {vocab}")
            everything += torch.bincount(ids, minlength=vocab)
            supervised += torch.bincount(ids[read.supervised[mine]], minlength=vocab)
        return supervised, everything


def rows_of_start(rows: list[RowInfo], taps: int, hidden: int) -> list[RowInfo]:
    """The rows that a fresh head is fitted to: the first training rows, by id, with `tokens_of_start` in all."""
    chosen, left = [], tokens_of_start(taps, hidden)
    for row in sorted((row for row in rows if row.split == "train"), key=lambda row: row.id):
        if left <= 0:
            break
        chosen.append(row)
        left -= row.tokens
    return chosen


class CaptureStore(_Store):
    """Reads a captures folder. `.rows`, `.read(row)`, `.taps` (layer numbers), `.norm`, `.hidden`, `.dtype`.

    max_length: rows are cut to it, whatever length they were captured at. final_norm: the target's, needed only where
    the last hidden state was stored before it (`norm: pre_norm`); `.read` always gives the state after the norm.
    so_far: of a folder that is being written, the rows of the files that are finished; `.refresh()` adds new ones.
    """

    kind = "captures"

    def __init__(
        self, folder: str | Path, max_length: int | None = None, final_norm: Callable[[Tensor], Tensor] | None = None,
        so_far: bool = False,
    ):  # fmt: skip
        self._final_norm = final_norm
        super().__init__(folder, max_length, so_far)
        self._check()

    def refresh(self) -> int:
        came = super().refresh()
        self._check()
        return came

    def _check(self) -> None:
        """Takes from the index what the states are; StoreError when it cannot be used. Before the first file: None."""
        self.norm, self.taps, self.hidden = self.index.get("norm"), self.index.get("taps"), self.index.get("hidden")
        self.dtype = self.index.get("dtype")
        if self.so_far and not self._sums:
            return
        if self.norm not in NORMS:
            raise StoreError(
                f"{self.folder}/index.json does not say whether `last` is {' or '.join(NORMS)} (norm: {self.norm}); "
                "applied twice or not at all it ruins the head, so untagged captures are refused: capture again"
            )
        if self.norm == "pre_norm" and self._final_norm is None:
            raise StoreError(f"{self.folder}: `last` was stored before the final norm; pass the target's final_norm=")

    def read(self, row: RowInfo) -> CaptureRow:
        fields = self._slice(row, ("ids", "supervised", "taps", "last", "argmax", "logsumexp"))
        if self.dtype == float8.NAME:
            scales = self._slice(row, tuple(float8.SCALES.values()))
            fields[2:4] = map(float8.decode, fields[2:4], scales)
        if self.norm == "pre_norm":
            fields[3] = self._final_norm(fields[3])
        for name, tensor in zip(("taps", "last", "logsumexp"), (fields[2], fields[3], fields[5]), strict=True):
            if not finite(tensor):
                path, why = self.folder / row.file, f"has values in `{name}` of row {row.id} that are not finite"
                sums.condemn(path, why)
                raise StoreError(f"{path} {why}; {REMEDY}, or leaves the row out")
        return CaptureRow(*fields)
