"""Checkpoints that are whole or absent, and resuming from them.

A checkpoint is a folder `step-00000100`: `head.safetensors` (the head's fp32 weights and buffers, plain), `engine/`
(DeepSpeed's own files: optimizer state of every process), `rng-00000.safetensors` per process, and `state.json`
(position, time used, what the run must agree with, and the sizes of all files). It is written beside its place under a
`.part` name and renamed when every byte is on disk. Nothing of the target is in it: about 18 bytes per parameter.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headtrain.files import fsync_folder, read_json, write_json
from headtrain.training.ranks import Ranks, quiet

VERSION = 1
MUST_AGREE = ("zero_stage", "precision", "optimizer", "parts", "mapping", "data")


class CheckpointError(ValueError):
    """A checkpoint that this run cannot go on from; the message says how to proceed."""


def mapping_hash(head: nn.Module) -> str:
    """sha256 (32 hex digits) of the draft vocabulary mask `t2d`."""
    return hashlib.sha256(head.t2d.cpu().numpy().tobytes()).hexdigest()[:32]


def masters(head: nn.Module) -> dict[str, Tensor]:
    """The head's full fp32 weights and its buffers, on the CPU. Every process must call it."""
    from deepspeed.utils import safe_get_full_fp32_param

    tensors = {}
    for name, p in head.named_parameters():
        full = safe_get_full_fp32_param(p) if hasattr(p, "_hp_mapping") else None  # None: it is fp32 or frozen
        tensors[name] = (p.detach() if full is None else full).float().cpu().contiguous().clone()
    return tensors | {name: b.cpu().contiguous().clone() for name, b in head.named_buffers()}


# ------------------------------------------------------------------------------------------------- writing

def save(engine: Any, folder: Path, state: dict[str, Any], keep: int, ranks: Ranks) -> Path:
    """Writes the checkpoint of `state["step"]` and removes all but the last `keep`. Every process must call it."""
    from safetensors.torch import save_file

    place = folder / f"step-{state['step']:08d}"
    part = folder / f".{place.name}.part"
    if ranks.first:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    ranks.barrier()
    with quiet():
        engine.save_checkpoint(str(part), tag="engine", save_latest=False)
    save_file(_random_states(ranks), part / f"rng-{ranks.rank:05d}.safetensors")
    tensors = masters(engine.module)
    if ranks.first:
        save_file(tensors, part / "head.safetensors", metadata={"format": "pt"})
    ranks.barrier()
    if ranks.first:
        sizes = {str(p.relative_to(part)): p.stat().st_size for p in sorted(part.rglob("*")) if p.is_file()}
        write_json(part / "state.json", {**state, "version": VERSION, "world": ranks.world, "files": sizes})
        _flush(part)
        shutil.rmtree(place, ignore_errors=True)
        part.rename(place)
        fsync_folder(folder)
        for old in _whole(folder)[:-keep]:
            shutil.rmtree(old)
    ranks.barrier()
    return place


def _random_states(ranks: Ranks) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return states


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
        files = read_json(place / "state.json")["files"]
    except (ValueError, KeyError) as error:
        return f"state.json is unreadable ({error})"
    for name, size in files.items():
        path = place / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def load(engine: Any, place: Path, expected: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Restores weights, optimizer and random state; returns the checkpoint's state. CheckpointError when it cannot fit.

    expected: what this run has for the keys of MUST_AGREE.
    """
    from safetensors.torch import load_file

    state = read_json(place / "state.json")
    if state["version"] != VERSION:
        raise CheckpointError(f"{place}: checkpoint version {state['version']}, {VERSION} is known")
    if state["world"] != ranks.world:
        raise CheckpointError(
            f"{place.name} was written by {state['world']} processes and this run has {ranks.world}: start again with "
            f"launch.gpus={state['world']} (the optimizer state is kept per process), or begin a new run from its "
            f"weights with head.init_from and another run_dir"
        )
    for key in MUST_AGREE:
        if state.get(key) != expected[key]:
            raise CheckpointError(
                f"{place.name} was written with {key} = {state.get(key)} and this run has {expected[key]}: "
                "go on with the old setting, or start in another run_dir"
            )
    with quiet():
        loaded, _ = engine.load_checkpoint(str(place), tag="engine", load_module_strict=True)
    if loaded is None:
        raise CheckpointError(f"{place}: DeepSpeed found nothing in it; delete this folder to go on from an older one")
    random = load_file(place / f"rng-{ranks.rank:05d}.safetensors")
    torch.set_rng_state(random["cpu"])
    if "cuda" in random and ranks.device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"], ranks.device)
    return state
