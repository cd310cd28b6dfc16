"""What a training run says: training/log.jsonl, a progress line, and wandb when asked."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtrain.config import RecipeConfig, TrainConfig
from headtrain.files import room_for, write_text
from headtrain.heads.base import Batch, HeadConfig, HeadOutput
from headtrain.training.ranks import Ranks
from headtrain.training.timing import model_flops, peak_flops


class Tally:
    """Sums over the micro-batches since the last log line, kept on the device and added up over processes when read."""

    NAMES = ("loss_D", "count_D", "correct_D", "reach_D")

    def __init__(self, head: HeadConfig, config: TrainConfig, device: torch.device):
        self.head, self.config, self.device = head, config, device
        self._sums = torch.zeros(4 * head.unroll + 4, dtype=torch.float64, device=device)
        self._began, self.steps = time.monotonic(), 0

    def add(self, output: HeadOutput, batch: Batch) -> None:
        tokens = torch.as_tensor(batch.ids_N.numel(), device=batch.ids_N.device)
        seen = (batch.positions_N + 1)[batch.supervised_N].sum()
        rest = torch.stack([output.loss.detach() / batch.parts, tokens, batch.supervised_N.sum(), seen])
        self._sums += torch.cat([*(getattr(output, name).double() for name in self.NAMES), rest.double()])

    def leave_out(self, seconds: float) -> None:
        """Takes time that was not spent on training steps out of the interval."""
        self._began += seconds

    def read(self, ranks: Ranks) -> dict[str, Any]:
        """Means of the interval, over all processes; then starts a new one. Every process must call it."""
        sums = ranks.sum(self._sums.clone()).cpu()
        seconds = max(time.monotonic() - self._began, 1e-9)
        loss_D, count_D, correct_D, reach_D = sums[:-4].reshape(4, -1)
        loss, tokens, supervised, seen = sums[-4:].tolist()
        steps, self.steps, self._began = max(self.steps, 1), 0, time.monotonic()
        self._sums.zero_()
        found = {
            "loss": loss / steps,
            "loss_by_depth": _rounded(loss_D / count_D.clamp(min=1)),
            "accuracy": _rounded(correct_D / count_D.clamp(min=1)),  # of pairs with a target token in the draft vocab
            "accuracy_all": _rounded(correct_D / reach_D.clamp(min=1)),  # of all; outside the draft vocab is wrong
            "tokens": int(tokens),
            "supervised": int(supervised),
            "tokens_per_s": round(tokens / seconds, 1),
        }
        slots_D = [n * self.config.position_keep**depth for depth, n in enumerate(reach_D.tolist())]
        flops = model_flops(self.head, tokens, supervised, seen / max(supervised, 1), slots_D, count_D.tolist())
        peak = peak_flops(self.device, self.config.precision)
        if flops and peak:
            found["mfu"] = round(flops / (seconds * ranks.world * peak), 4)
        return found


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def memory(device: torch.device) -> dict[str, float]:
    """Peak memory of this process so far, GB."""
    peak = {"peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3)}
    if device.type == "cuda":
        peak["peak_gpu_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 3)
    return peak


class TrainLog:
    """Rank 0's log. Lines after `step` in an existing file, which a resumed run makes again, are dropped."""

    def __init__(self, config: RecipeConfig, run: Path, ranks: Ranks, step: int):
        self.active = ranks.first
        self.path, self._wandb, self._live = run / "training" / "log.jsonl", None, None
        if not self.active:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file():
            lines = [line for line in self.path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
            write_text(self.path, "".join(line + "\n" for line in lines))
        if config.logger == "wandb":
            self._wandb = _start_wandb(config, run)
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(refresh_per_second=4)
            self._live.start()

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line, and shows it."""
        if not self.active:
            return
        record = _finite(record)
        with room_for(self.path), open(self.path, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(record, allow_nan=False) + "\n")
        if self._wandb:
            flat = {key: value for key, value in record.items() if isinstance(value, int | float)}
            for key, value in record.items():
                if isinstance(value, list | dict):
                    pairs = value.items() if isinstance(value, dict) else enumerate(value)
                    flat |= {f"{key}/{name}": part for name, part in pairs}
            self._wandb.log(flat, step=record["step"])
        if self._live:
            from rich.text import Text

            self._live.update(Text(line(record)))
        else:
            print(line(record), flush=True)

    def say(self, text: str) -> None:
        if self.active:
            print(text, flush=True)

    def close(self) -> None:
        if self._live:
            self._live.stop()
        if self._wandb:
            self._wandb.finish()


def _finite(value: Any) -> Any:
    """The same, with None for numbers that JSON does not have: NaN and infinities, of a skipped step."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # cut off by a kill
        return float("inf")


def _start_wandb(config: RecipeConfig, run: Path) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError("logger=wandb: wandb is not installed; pip install wandb, or use logger=none") from error
    from dataclasses import asdict

    folder, name = run / "training", run.resolve().name
    shown = {"head": asdict(config.head), "train": asdict(config.train), "seed": config.seed}
    shown["head"].pop("init_from")  # may be a local path
    where = {"project": "headtrain", "name": name, "dir": str(folder), "id": _wandb_id(folder)}
    return wandb.init(**where, config=shown, resume="allow")


def _wandb_id(folder: Path) -> str:
    """The same id after a restart, so that a resumed run goes on in its own curve."""
    path = folder / "wandb-id.txt"
    if not path.is_file():
        import uuid

        write_text(path, uuid.uuid4().hex)
    return path.read_text(encoding="utf-8").strip()


def line(record: dict[str, Any]) -> str:
    """One line for a person: step, loss, speed, acceptance on validation rows, time left."""
    words = [f"step {record['step']}", f"{100 * record['share']:3.0f} %"]
    if record.get("loss") is not None:
        words.append(f"loss {record['loss']:.4f}")
    if record.get("accuracy"):
        words.append(f"top-1 {_percent(record['accuracy'])}")
    if record.get("tau") is not None:
        words.append(f"valid τ {record['tau']:.3f} (α {_percent(record['alpha'])})")
    if "decoded_tau" in record:
        words.append(f"decoded τ {record['decoded_tau']:.3f}")
    if "tokens_per_s" in record:
        words.append(f"{record['tokens_per_s']:.0f} tokens/s")
    if record.get("left_s") is not None:
        words.append(f"{record['left_s'] / 60:.1f} min left")
    return "  ".join(words)


def _percent(values: Sequence[float]) -> str:
    return "/".join("–" if value is None else f"{100 * value:.0f}" for value in values) + " %"
