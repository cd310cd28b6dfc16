"""Captures: the target's states over stored responses, and how much disk they need.

The responses stage keeps the states of its own decode pass; the work here fills the gaps (other taps, given answers)
and makes the few that online training needs (data.captures.mode).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrain.config import RecipeConfig
from headtrain.data_gen import claims
from headtrain.facts import tokens_of_start
from headtrain.files import Manifest, free_bytes, read_json, sha256_file, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from headtrain.data_gen.store import ResponseStore, RowInfo
    from headtrain.target import Target

log = logging.getLogger(__name__)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
SCALE_BYTES = {"float8": 4}  # of each state
AGREEMENT = 0.9  # of a server's greedy tokens with the target's own choices; rounding alone costs a few per cent
MARGIN = 256 << 20  # bytes left free while working
ONLINE = "; online training: validation rows, and what a fresh head is fitted to"


class DiskError(ValueError):
    """Too little disk space, before the start or during the work."""


class CaptureError(ValueError):
    """Captures of no use for training."""


# ------------------------------------------------------------------------------------------------- disk

def bytes_per_token(hidden: int, taps: int, dtype: str) -> int:
    """Bytes of the states of one token: `taps` tapped layers and the last hidden state."""
    return (taps + 1) * (hidden * DTYPE_BYTES[dtype] + SCALE_BYTES.get(dtype, 0))


def readable(size: float) -> str:
    """Bytes in decimal units, as disks are sold: 45.3 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def what_helps(dtype: str, given: bool = False, total: float | None = None, online: bool = False) -> str:
    """What can be done when captures need more disk than there is (`total` bytes), by the keys to set.

    given: the answers come with the data (data.responses.backend=given). online: as data.captures.mode is.
    """
    ways = ["fewer rows (data.prompts limit)", "shorter rows (data.max_length, data.responses.max_new_tokens)"]
    if given:
        ways[1] = "shorter rows (data.max_length)"
    ways.append("fewer taps (head.taps)")
    if DTYPE_BYTES[dtype] > 2:
        ways.append("data.captures.dtype=bfloat16" + (f" ({readable(total / 2)})" if total else ""))
    if DTYPE_BYTES[dtype] > 1:
        size = f"{readable(total / DTYPE_BYTES[dtype])} and " if total else ""
        ways.append(f"8-bit captures: data.captures.dtype=float8 ({size}4 B of scale per state)")
    if not online:
        ways.append("online training, which stores little (data.captures.mode=online)")
    return ", ".join([*ways, "a larger disk (run_dir)"])


def check_disk(
    rows: int, tokens_per_row: float, hidden: int, taps: int, dtype: str, free: int, allow_low_disk: bool = False,
    given: bool = False, online: bool = False,
) -> str:  # fmt: skip
    """The estimate as text. DiskError when it exceeds the free bytes, unless `allow_low_disk`."""
    token = bytes_per_token(hidden, taps, dtype)
    total = token * tokens_per_row * rows
    text = (
        f"captures need {token:,} B per token, {round(token * tokens_per_row):,} B per row, {readable(total)} in all "
        f"({rows:,} rows of {tokens_per_row:,.0f} tokens, {taps} taps + last hidden, {dtype}{ONLINE * online}); "
        f"free: {readable(free)}"
    )
    if total <= free:
        return text
    if allow_low_disk:
        return f"{text}; started all the same (data.captures.allow_low_disk=true)"
    raise DiskError(
        f"{text}. Too little space. What helps: {what_helps(dtype, given, total, online)}; or "
        "data.captures.allow_low_disk=true to start all the same and stop before the disk is full. "
        "Not in this version: a ring buffer"
    )


def stored_rows(config: RecipeConfig, rows: int, tokens_per_row: float, hidden: int, taps: int) -> int:
    """About how many of so many rows are stored: all, or online those of `stored`."""
    if config.data.captures.mode == "offline":
        return rows
    valid = config.data.valid if config.data.valid >= 1 else config.data.valid * rows
    return min(rows, math.ceil(valid + tokens_of_start(taps, hidden) / max(tokens_per_row, 1)))


def under_way(folder: Path, kind: str) -> list[int]:
    """Batches that this or another process has begun, by their notes in `claims/`, and that have no file yet."""
    begun = (int(note.stem) for note in (folder / "claims").glob("[0-9]*.json"))
    return [batch for batch in begun if not (folder / claims.file_name(kind, batch)).is_file()]


def watch_disk(folder: Path, needed: int) -> None:
    """DiskError when `needed` more bytes, those of the batches under way, would fill the disk.

    What is finished stays, and the same command goes on later.
    """
    if (free := free_bytes(folder)) < needed + MARGIN:
        raise DiskError(
            f"stopped before the disk is full: batches under way need {readable(needed)}, free: {readable(free)}. "
            "Finished batches are kept; make room and run the same command again"
        )


# ------------------------------------------------------------------------------------------------- the stage

def stored(config: RecipeConfig, responses: ResponseStore, hidden: int, taps: int) -> list[RowInfo]:
    """The rows that are captured: all; with data.captures.mode=online those for validation and for a head's start."""
    if config.data.captures.mode == "offline":
        return responses.rows
    from headtrain.data_gen.store import rows_of_start

    start = {row.id for row in rows_of_start(responses.rows, taps, hidden)}
    return [row for row in responses.rows if row.split == "valid" or row.id in start]


def files_of(responses_folder: str | Path, captures_folder: str | Path) -> dict[int, dict[str, Any]]:
    """Batch -> rows and tokens of its file: of the responses, or as plan.json of online training has them."""
    plan = Path(captures_folder) / "plan.json"
    if plan.is_file():
        return {int(batch): file for batch, file in read_json(plan).items()}
    return dict(enumerate(read_json(Path(responses_folder) / "index.json")["files"]))


def facts(config: RecipeConfig, target: Target, taps: tuple[int, ...]) -> dict[str, Any]:
    """What a capture file says about itself."""
    return {
        "norm": "post_norm", "taps": list(taps), "dtype": config.data.captures.dtype, "hidden": target.hidden_size,
        "vocab": target.vocab_size, "argmax": True, "logsumexp": True,
        **({"quantised": words} if (words := getattr(target, "quantised", None)) else {}),
    }  # fmt: skip


def work(
    config: RecipeConfig,
    target: Target,
    responses_folder: str | Path,
    captures_folder: str | Path,
    taps: list[int] | tuple[int, ...],
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Captures the responses that have none yet, batch by batch; several processes may share the work.

    Returns the number of batches this process did. progress(tokens of the batch done, tokens of the batch).
    """
    from headtrain.data_gen import store
    from headtrain.team import shared

    responses_folder, captures_folder, taps = Path(responses_folder), Path(captures_folder), tuple(taps)
    responses = store.ResponseStore(responses_folder)
    chosen, done = stored(config, responses, target.hidden_size, len(taps)), 0
    by_file: dict[str, list[store.RowInfo]] = {}
    for row in chosen:
        by_file.setdefault(row.file, []).append(row)
    if config.data.captures.mode == "online":
        _plan_online(config, target, captures_folder, chosen, taps)
    batches = list(files_of(responses_folder, captures_folder))
    team = getattr(target, "team", None)
    lead = claims.leads(team)
    dtypes = [config.data.captures.dtype]
    if config.data.captures.backend == "vllm":
        dtypes.append(config.target.dtype)  # of the files that it writes on the way
    each = sum(bytes_per_token(target.hidden_size, len(taps), dtype) for dtype in dtypes)
    with _reader(config, target, taps, captures_folder) as read:
        for batch in shared(team, claims.unfinished(captures_folder, "captures", batches)):
            rows = by_file.get(claims.file_name("responses", batch), [])  # none: servers answered none of the batch
            meter = claims.Meter(captures_folder, batch, progress, sum(row.tokens for row in rows), tells=lead)
            meter.tell()
            begun = under_way(captures_folder, "captures")
            tokens = sum(row.tokens for n in begun for row in by_file.get(claims.file_name("responses", n), []))
            watch_disk(captures_folder, tokens * each)
            tensors = _capture(config, target, responses, rows, taps, meter, read)
            rows, tensors, left_out = keep_finite(rows, tensors, lambda ids: next(read([ids]))[1])
            meter.tell(left_out=left_out)
            told = facts(config, target, taps) | {"agreed": _agreed(tensors), "left_out": left_out}
            if lead:
                store.write_unit(captures_folder, "captures", batch, rows, tensors, **told)
            done += 1
    return done


def _plan_online(config, target, folder: Path, chosen: list[RowInfo], taps: tuple[int, ...]) -> None:
    """plan.json: the batches that the chosen rows lie in; the same whichever worker writes it."""
    if (folder / "plan.json").is_file():
        return
    rule, tokens = config.data.captures, sum(row.tokens for row in chosen)
    sizes = len(chosen), tokens / max(len(chosen), 1), target.hidden_size, len(taps), rule.dtype
    log.info(check_disk(*sizes, free_bytes(folder), rule.allow_low_disk, online=True))
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[int, dict[str, int]] = {}
    for row in chosen:
        file = files.setdefault(int(Path(row.file).stem.rpartition("-")[2]), {"rows": 0, "tokens": 0})
        file["rows"], file["tokens"] = file["rows"] + 1, file["tokens"] + row.tokens
    write_json(folder / "plan.json", dict(sorted(files.items())))


@contextlib.contextmanager
def _reader(config: RecipeConfig, target: Target, taps: tuple[int, ...], folder: Path) -> Iterator[Callable]:
    """Yields read(rows), which yields (n, tensors of row n) of rows of token ids: by the target or by vLLM."""
    from headtrain.data_gen.passes import buffer_dtype

    dtype = buffer_dtype(config.data.captures.dtype)
    if config.data.captures.backend == "local":
        from headtrain.lean import speed_up

        speed_up(target)
        yield functools.partial(_read_here, config, target, taps, dtype)
    else:
        from headtrain.data_gen.vllm_states import Engine, scratch

        with scratch(folder / "claims") as place:
            yield functools.partial(Engine(config, target, taps, place).read, dtype)


def _capture(config, target, responses, rows, taps, meter, read) -> dict[str, Any]:
    """The flat tensors of one capture file."""
    import torch

    from headtrain.data_gen.passes import buffer_dtype

    known = [responses.read(row) for row in rows]
    dtype = buffer_dtype(config.data.captures.dtype)
    if not rows:
        hidden, ints = target.hidden_size, torch.zeros(0, dtype=torch.int32)
        return {
            "ids": ints, "taps": torch.zeros(0, len(taps), hidden, dtype=dtype), "argmax": ints.clone(),
            "last": torch.zeros(0, hidden, dtype=dtype), "logsumexp": torch.zeros(0), "supervised": ints.bool(),
        }  # fmt: skip
    parts: list[dict | None] = [None] * len(rows)
    for n, part in read([row.ids for row in known]):
        parts[n] = part
        meter.add(rows[n].tokens)
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {**tensors, "supervised": torch.cat([row.supervised for row in known])}


def _read_here(config, target, taps, dtype, rows) -> Iterator[tuple[int, dict[str, Any]]]:
    """By the target itself. Rows of like length share a forward of at most batch_tokens tokens."""
    from headtrain.data_gen.passes import read_rows

    order = sorted(range(len(rows)), key=lambda n: (-len(rows[n]), n))
    while order:
        count = max(1, min(len(order), config.data.responses.batch_tokens // len(rows[order[0]])))
        group, order = order[:count], order[count:]
        flat = read_rows(target, [rows[n] for n in group], taps, dtype).flat()
        at = 0
        for n in group:
            yield n, {name: tensor[at : at + len(rows[n])] for name, tensor in flat.items()}
            at += len(rows[n])


def once_more(config: RecipeConfig, target: Target, taps: tuple[int, ...]) -> Callable[[Tensor], dict[str, Tensor]]:
    """A function that captures one row alone, by its token ids: the flat tensors of a capture file."""
    from headtrain.data_gen import passes

    dtype = passes.buffer_dtype(config.data.captures.dtype)
    return lambda ids: passes.read_rows(target, [ids], taps, dtype).flat()


def keep_finite(
    rows: list[RowInfo], tensors: dict[str, Tensor], again: Callable[[Tensor], dict[str, Tensor]]
) -> tuple[list[RowInfo], dict[str, Tensor], dict[str, int]]:
    """(rows, their flat tensors, reason -> number left out), without rows that have values that are not finite.

    Such a row is captured once more: what a fault of the machine made is gone then.
    """
    import torch

    from headtrain.data_gen.store import finite

    def whole(part: dict[str, Tensor]) -> bool:
        return all(finite(part[name]) for name in ("taps", "last", "logsumexp"))

    if whole(tensors):
        return rows, tensors, {}
    split = zip(*(tensor.split([row.tokens for row in rows]) for tensor in tensors.values()), strict=True)
    parts = [dict(zip(tensors, part, strict=True)) for part in split]
    parts = [part if whole(part) else part | again(part["ids"]) for part in parts]
    kept = [n for n, part in enumerate(parts) if whole(part)]
    if lost := [row.id for n, row in enumerate(rows) if n not in set(kept)]:
        log.warning("left out as non_finite, captured twice: %s", ", ".join(lost))
    empty = {name: tensor[:0] for name, tensor in tensors.items()}
    tensors = {name: torch.cat([empty[name], *(parts[n][name] for n in kept)]) for name in tensors}
    return [rows[n] for n in kept], tensors, {"non_finite": len(lost)} if lost else {}


def _agreed(tensors: dict[str, Any]) -> int:
    """How many supervised tokens are the target's choice after what stands before them."""
    return int((tensors["supervised"][1:] & (tensors["ids"][1:] == tensors["argmax"][:-1])).sum())


def missing(responses_folder: str | Path, captures_folder: str | Path) -> int:
    """How many batches of responses have no captures yet."""
    batches = list(files_of(responses_folder, captures_folder))
    return sum(not (Path(captures_folder) / claims.file_name("captures", n)).is_file() for n in batches)


def finish(config: RecipeConfig, responses_folder: str | Path, captures_folder: str | Path) -> dict[str, Any]:
    """Writes the index and completes the manifest of the captures folder; returns the counts."""
    from headtrain.data_gen import store

    batches = list(files_of(responses_folder, captures_folder))
    claims.remove_parts(Path(captures_folder), "*.json")
    index = store.write_index(captures_folder, "captures", batches)
    counts = {name: sum(file[name] for file in index["files"]) for name in ("rows", "tokens", "supervised")}
    left_out = store.left_out(captures_folder, "captures", batches)
    if not counts["rows"] and left_out:
        raise CaptureError(
            f"{captures_folder}: no row is left, {left_out['non_finite']} have states that are not finite: see that "
            "the target's weights are whole; data.captures.dtype=float16 ends at 65,504, bfloat16 does not"
        )
    counts["bytes"] = sum((Path(captures_folder) / file["file"]).stat().st_size for file in index["files"])
    rule = config.data.responses
    if rule.backend == "server" and rule.temperature == 0:
        headers = (store.read_header(Path(captures_folder) / file["file"])[1] for file in index["files"])
        counts["greedy_agreement"] = share = round(sum(own["agreed"] for own in headers) / counts["supervised"], 4)
        if share < AGREEMENT:
            log.warning(
                "only %.1f %% of the servers' greedy tokens are the choice of the target as loaded here: see that they "
                "serve the same weights, at the same precision, and that nothing changes their sampling", 100 * share
            )  # fmt: skip
    told = {key: index.get(key) for key in ("norm", "taps", "dtype")}
    Manifest(captures_folder).finish(
        counts, dict(left_out), index=sha256_file(Path(captures_folder) / "index.json"), **told
    )
    return counts


def status(
    responses_folder: str | Path, captures_folder: str | Path, memory: dict[str, Any] | None = None
) -> dict[str, Any]:
    """How far the captures are: claims.progress_of, and estimate: tokens of all; rows: captured; of: rows in all;
    row_tokens: of finished batches. memory: as of respond.status."""
    memory, planned = {} if memory is None else memory, (Path(captures_folder) / "plan.json").is_file()
    if memory.get("planned") is not planned:
        memory |= {"planned": planned, "files": files_of(responses_folder, captures_folder), "done": {}}
    files = memory["files"]
    found = claims.progress_of(Path(captures_folder), "captures", list(files), memory["done"])
    done = [files[n] for n in found["done"]]
    return {
        **found, "estimate": sum(file["tokens"] for file in files.values()),
        "of": sum(file["rows"] for file in files.values()),
        "rows": sum(file["rows"] for file in done), "row_tokens": sum(file["tokens"] for file in done),
    }  # fmt: skip
