"""How fast stored captures reach the training step, and how long a step waits for them.

Rows of benchmarks/generate.py: a store of random captures of a large target, read from the page cache by training's own
reader; and the training of a finished run, by its own clock.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import timed
from benchmarks.steps import Case, Shape, step_flops

TAPS, ROW = 3, 1024  # tapped layers; tokens of a row
# The head of a target of 8B, its training on a GPU that works at this speed (40 % of an H100's peak)
LARGE = Shape(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
GPU_FLOPS, DEPTHS, DRAFT_VOCAB, SUPERVISED = 400e12, 7, 32000, 0.5
STORE = {"hidden": LARGE.hidden, "tokens": 32768, "budget": 8192}


def write_store(folder: Path, hidden: int, tokens: int) -> int:
    """Random bf16 captures of rows of ROW tokens, in files of 16 rows; returns the bytes."""
    import torch

    from headtrain.data_gen import store

    facts = {"norm": "post_norm", "taps": [2, 15, 27][:TAPS], "dtype": "bfloat16", "hidden": hidden}
    count, made = max(1, tokens // (16 * ROW)), torch.Generator().manual_seed(0)
    states = torch.randn(16 * ROW, TAPS + 1, hidden, generator=made).bfloat16()
    ids = torch.randint(1000, (16 * ROW,), generator=made).int()
    tensors = {
        "ids": ids, "supervised": torch.arange(16 * ROW) % ROW >= ROW // 2, "taps": states[:, :TAPS].contiguous(),
        "last": states[:, TAPS].contiguous(), "argmax": ids.roll(-1), "logsumexp": torch.ones(16 * ROW),
    }  # fmt: skip
    for n in range(count):
        rows = [store.RowInfo(f"{n}-{r}", "train", "random", ROW, "stop", ROW // 2, ROW // 2) for r in range(16)]
        store.write_unit(folder, "captures", n, rows, tensors, **facts)
    store.write_index(folder, "captures", count)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def read_store(folder: Path, budget: int, step_s: float) -> dict[str, Any]:
    """The reader alone, and beside steps of `step_s` seconds in which this CPU is idle, as it is while a GPU works.

    {batch_s, core_s: of a micro-batch; waited_s: of a step, beside such steps; bytes, tokens: of a micro-batch}.
    """
    import torch

    from headtrain.data_gen.store import CaptureStore
    from headtrain.training.batches import Plan, Reader

    store = CaptureStore(folder)
    plan = Plan([row.tokens for row in store.rows], budget, seed=0, parts=1)
    reader = Reader(store, store.rows, torch.ones(len(store.rows), 1), plan, rank=0, world=1)
    try:
        batches = len(plan.epoch(0))
        for _ in range(batches):  # checksums, page cache
            batch = reader.next()
        _, spent = timed(lambda: [reader.next() for _ in range(2 * batches)])
        waited = []
        for _ in range(2 * batches):
            time.sleep(step_s)
            waited.append(timed(reader.next)[1]["wall_s"])
    finally:
        reader.close()
    size = sum(tensor.nbytes for tensor in (batch.taps_NAT, batch.last_NT))
    return {
        "batch_s": spent["wall_s"] / (2 * batches), "core_s": spent["core_s"] / (2 * batches), "bytes": size,
        "waited_s": sum(waited[2:]) / len(waited[2:]), "step_s": step_s, "tokens": len(batch.ids_N),
    }  # fmt: skip


def gpu_step(budget: int, shape: Shape = LARGE) -> float:
    """Seconds of an EAGLE-3 training step over so many tokens, by its FLOPs."""
    from types import SimpleNamespace

    import torch

    case = Case(length=budget, depths=DEPTHS, draft_vocab=DRAFT_VOCAB, shape=shape, documents=max(1, budget // ROW))
    at = torch.arange(budget) % ROW
    batch = SimpleNamespace(
        supervised_N=at >= ROW * (1 - SUPERVISED), argmax_N=at, positions_N=at,
        cu_R1=torch.arange(0, budget + 1, min(ROW, budget)),
    )  # fmt: skip
    return step_flops(case, batch) / GPU_FLOPS


def watch_training(run: Path, steps: int) -> dict[str, Any]:
    """Seconds of a training step by part, as the trainer logs them, over so many steps of a finished run."""
    from omegaconf import OmegaConf

    from headtrain.configload import load_resolved
    from headtrain.training.trainer import train

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for part in ("prompts", "responses", "captures"):
            (place / part).symlink_to((run / part).absolute())
        changes = [f"train.steps={steps}", "train.seconds=null", "train.epochs=null", "train.log_every=10",
                   "train.save_every=1000000", "train.eval_every=1000000"]  # fmt: skip
        OmegaConf.save(
            OmegaConf.merge(OmegaConf.load(run / "config.yaml"), OmegaConf.from_dotlist(changes)), place / "config.yaml"
        )
        train(load_resolved(place / "config.yaml"), place)
        log = [json.loads(line) for line in (place / "training" / "log.jsonl").read_text().splitlines()]
    found = [line["seconds"] for line in log if "seconds" in line][1:]
    return {"steps": steps, "seconds": {part: sum(s[part] for s in found) / len(found) for part in found[0]}}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """request: tokens (of the random store), hidden, budget; run, steps."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        hidden, budget = request["hidden"], request["budget"]
        size = write_store(Path(folder), hidden, request["tokens"])
        found["store"] = read_store(Path(folder), budget, gpu_step(budget)) | {"size": size, "hidden": hidden}
    if request["run"]:
        found["training"] = watch_training(Path(request["run"]), request["steps"])
    return found


def text(found: dict[str, Any]) -> list[str]:
    """Sentences for the report."""
    s = found["store"]
    lines = [
        f"Captures of hidden size {s['hidden']:,}, {TAPS} taps and the last state in bf16, {s['size'] / 1e9:.1f} GB in "
        f"the page cache: a micro-batch of {s['tokens']:,} tokens ({s['bytes'] / 1e6:.0f} MB) is read in "
        f"{1e3 * s['batch_s']:.0f} ms ({1e3 * s['core_s']:.0f} core-ms, {s['bytes'] / s['batch_s'] / 1e9:.1f} GB/s, "
        f"{s['tokens'] / s['batch_s']:,.0f} tokens/s). Beside steps of {1e3 * s['step_s']:.0f} ms, in which the CPU is "
        f"idle as it is while a GPU works, a step waits {1e3 * s['waited_s']:.1f} ms, "
        f"{100 * s['waited_s'] / (s['waited_s'] + s['step_s']):.1f} % of its time.\n",
    ]
    if "training" in found:
        seconds = found["training"]["seconds"]
        parts = ", ".join(f"{part} {1e3 * spent:.1f}" for part, spent in seconds.items())
        share = 100 * seconds["data"] / sum(seconds.values())
        lines.append(
            f"Training of the run on this CPU, {found['training']['steps']} steps, ms of a step: {parts}. It waits for "
            f"data {share:.1f} % of its time, the change of dtype included.\n"
        )
    else:
        lines.append("Training of a finished run was not watched: none was given (`ARGS=--run=DIR`).\n")
    return lines
