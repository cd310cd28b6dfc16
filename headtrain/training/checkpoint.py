"""Checkpoints that are whole or absent, and resuming from them.

A checkpoint is a folder `step-00000100`: `head/`, the head as it would be served (see heads.base.save_head); the
training state by parameter name, whole and in fp32, one safetensors file each: `weights` (frozen ones and buffers
too), the optimizer's `exp_avg`, `exp_avg_sq` and `momentum_buffer`, and `ema`; and `state.json` (position, time used,
what the run must agree with, and the checksums of all files). Nothing in it depends on the number of processes or on
the ZeRO stage, and nothing of it is the target's: 12 bytes per parameter (16 with an average), and the head.
It is written beside its place under a `.part` name and renamed when every byte is on disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headtrain.files import fsync_folder, read_json, room_for, sha256_file, write_json
from headtrain.heads import vocab
from headtrain.heads.base import Head
from headtrain.training.ranks import Ranks
from headtrain.training.weights import Answer, Average, Shards

VERSION = 3
Write = Callable[[Head, Path], None]  # of a head into a folder
MUST_AGREE = ("precision", "optimizer", "ema", "mapping", "data")


class CheckpointError(ValueError):
    """A checkpoint that this run cannot go on from; the message says how to proceed."""


def mapping_hash(head: nn.Module) -> str:
    """sha256 (32 hex digits) of the draft vocabulary mask `t2d`."""
    return vocab.mapping_hash(head.t2d)


# ------------------------------------------------------------------------------------------------- writing

def save(
    folder: Path, state: dict[str, Any], head: Head, fixed: dict[str, Tensor], write: Write, shards: Shards,
    average: Average | None, keep: int, ranks: Ranks,
) -> Path:  # fmt: skip
    """Writes the checkpoint of `state["step"]` and removes all but the last `keep`. Every process must call it.

    head: the head to serve (weights.Snapshot), which `write` saves. fixed: what of its weights is not trained.
    """
    from safetensors.torch import save_file

    place = folder / f"step-{state['step']:08d}"
    part = folder / f".{place.name}.part"
    with _building(place, part, ranks):
        if ranks.first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            write(head, part / "head")
        kinds: dict[str, Sequence[Tensor | None]] = {"weights": shards.flats, **shards.moments()}
        if average:
            kinds["ema"] = average.values
        for kind, values in kinds.items():
            tensors = {}
            if kind == "weights":
                tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in fixed.items()}
            for name in shards.places:
                whole = shards.whole(values, name)
                if whole is not None and ranks.first:
                    tensors[name] = whole.detach().cpu().contiguous().clone()
            if ranks.first:
                save_file(tensors, part / f"{kind}.safetensors", metadata={"format": "pt"})
        if ranks.first:
            files = {str(p.relative_to(part)): sha256_file(p) for p in sorted(part.rglob("*")) if p.is_file()}
            facts = {"version": VERSION, "world": ranks.world, "updates": shards.steps, "files": files}
            write_json(part / "state.json", {**state, **facts})
            _flush(part)
            shutil.rmtree(place, ignore_errors=True)
            part.rename(place)
            fsync_folder(folder)
            for old in _whole(folder)[:-keep]:
                shutil.rmtree(old)
    ranks.barrier()
    return place


@contextlib.contextmanager
def _building(place: Path, part: Path, ranks: Ranks):
    """Where `part` does not become the checkpoint `place`, it is removed. DiskFull when there is no room for it."""
    try:
        with room_for(place):
            yield
    except BaseException:
        if ranks.first:
            shutil.rmtree(part, ignore_errors=True)
        raise


def _flush(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as handle:
                os.fsync(handle.fileno())
        else:
            fsync_folder(path)
    fsync_folder(folder)


# ------------------------------------------------------------------------------------------------- reading

def _whole(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if (p / "state.json").is_file())


def latest(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint. Half-written ones are removed, damaged ones passed over, both with a message."""
    for part in folder.glob(".step-*.part"):
        say(f"ignoring the half-written checkpoint {part.name.strip('.').removesuffix('.part')}")
        shutil.rmtree(part)
    for place in reversed(_whole(folder)):
        if not (fault := damage(place)):
            return place
        say(f"ignoring the checkpoint {place.name}: {fault}")
    return None


def damage(place: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        state = read_json(place / "state.json")
        files = state["files"] if state["version"] == VERSION else {}  # `accumulation` refuses other versions
    except (ValueError, KeyError) as error:
        return f"state.json is unreadable ({error})"
    for name, checksum in files.items():
        if not (place / name).is_file():
            return f"{name} is missing"
        if sha256_file(place / name) != checksum:
            return f"{name} is damaged (its checksum differs)"
    return None


def accumulation(place: Path, accumulate: int, world: int) -> int:
    """Micro-batches that each of `world` processes adds up, so that a step has as many as in the checkpoint's run.

    CheckpointError when that is impossible, or when the number of processes is the same and `accumulate` is another.
    """
    state = read_json(place / "state.json")
    if state["version"] != VERSION:
        raise CheckpointError(
            f"{place}: checkpoint version {state['version']}, this headtrain reads {VERSION}; finish the run with the "
            "headtrain that began it, or start in another run_dir"
        )
    parts, before = state["parts"], state["world"]
    if world == before and parts != world * accumulate:
        raise CheckpointError(
            f"{place.name} was written with {parts // before} micro-batches per process in a step and this run has "
            f"{accumulate}: set train.accumulate={parts // before}, or start in another run_dir"
        )
    if parts % world:
        raise CheckpointError(
            f"{place.name} was written by {before} processes with {parts} micro-batches in a step, which {world} "
            f"processes cannot share equally: use a number of processes (launch.gpus) that divides {parts}, "
            "or start in another run_dir"
        )
    return parts // world


def load_weights(model: Answer, place: Path) -> None:
    """Weights and buffers, before the engine starts. Low-precision copies are roundings of them, as after a step."""
    from safetensors.torch import load_file

    model.take(load_file(place / "weights.safetensors"))


def check(place: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's state. CheckpointError where it does not agree with what this run has for MUST_AGREE."""
    state = read_json(place / "state.json")
    for key in MUST_AGREE:
        if state.get(key) != expected[key]:
            raise CheckpointError(
                f"{place.name} was written with {key} = {state.get(key)} and this run has {expected[key]}: "
                "go on with the old setting, or start in another run_dir"
            )
    return state


def load_moments(place: Path, updates: int, shards: Shards, average: Average | None) -> None:
    """This process's share of the fp32 weights, the optimizer's state, and the average."""
    from safetensors import safe_open

    files = {path.stem: path for path in place.glob("*.safetensors")}
    names = {kind: set(safe_open(path, "pt").keys()) for kind, path in files.items()}
    moments = {kind: held for kind, held in names.items() if kind not in ("weights", "ema")}
    values: dict[str, Sequence[Any]] = {"weights": shards.flats, **shards.start_moments(moments, updates)}
    if average:
        values["ema"] = average.values
    for kind, path in files.items():
        with safe_open(path, "pt") as held:
            for name in names[kind] & shards.places.keys():
                shards.put(values[kind], name, held.get_tensor(name))
