"""Learning-rate schedules, the training clock, and the optimizers as DeepSpeed runs them."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import nn

from headtrain.config import TrainConfig

WSD_DECAY = 0.2  # the last share of a wsd schedule, in which lr falls


def lr_at(step: float, total: float, warmup: float, kind: str, min_lr: float = 0.0) -> float:
    """The share of the peak learning rate after `step` of `total` optimizer steps.

    step: 0 … total, whole or (in a run with a time budget) not. warmup: steps of the linear rise from 0.
    kind: cosine | linear | wsd (flat, then linear over the last fifth) | constant (never falls). min_lr: share of the
    peak at the end.
    """
    if step < warmup:
        return step / warmup
    if kind == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(total - warmup, 1e-12))
    if kind == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * done))
    elif kind == "linear":
        shape = 1 - done
    elif kind == "wsd":
        falling = max(total - warmup, 1e-12) / max(WSD_DECAY * total, 1e-12)
        shape = min(1.0, (1 - done) * falling)
    else:
        raise ValueError(f"train.schedule={kind}: known are cosine, linear, wsd, constant")
    return min_lr + (1 - min_lr) * shape


class Clock:
    """How far a run is, by steps and by time.

    steps: optimizer steps of the whole run, or None; seconds: budget of training wall time, or None; elapsed: seconds
    used before a resume. Only rank 0's reading counts; the trainer broadcasts it.
    """

    def __init__(self, steps: int | None, seconds: float | None, warmup: float, elapsed: float = 0.0):
        if steps is None and seconds is None:
            raise ValueError("how long to train is not set: give train.epochs, train.steps or train.seconds")
        self.steps, self.seconds, self.warmup = steps, seconds, warmup
        self._before, self._start = elapsed, time.monotonic()
        self.reserve = 0.0  # seconds the end of the run needs (a last evaluation)

    @property
    def elapsed(self) -> float:
        return self._before + time.monotonic() - self._start

    def progress(self, step: int) -> float:
        """0 … 1 after `step` optimizer steps: the further of steps and time."""
        by_steps = step / self.steps if self.steps else 0.0
        if not self.seconds:
            return min(1.0, by_steps)
        by_time = self.elapsed / max(self.seconds - self.reserve, 1e-9)
        if by_time >= 1:  # the reserve is spoken for: what is resumed from here is at its end too
            self._before += max(0.0, self.seconds - self.elapsed)
        return min(1.0, max(by_steps, by_time))

    def share(self, progress: float, step: int, kind: str, min_lr: float) -> float:
        """The share of the peak learning rate for optimizer step number `step` (1, 2, …)."""
        if self.seconds is None:
            return lr_at(step, self.steps, round(self.warmup * self.steps), kind, min_lr)
        return lr_at(max(progress, 1e-3 * self.warmup), 1.0, self.warmup, kind, min_lr)

    def facts(self, share: float) -> dict[str, float]:
        """Seconds used and, at this pace, left."""
        used = self.elapsed
        return {"elapsed_s": round(used, 2), "left_s": round(used * (1 - share) / max(share, 1e-9), 1)}


def peak_lr(group: dict[str, Any], config: TrainConfig) -> float:
    return config.muon_lr if group.get("use_muon") else config.lr


def is_muon_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Muon takes 2-D hidden weights; embeddings, the output matrix and norms stay with AdamW."""
    return parameter.dim() == 2 and not any(word in name for word in ("lm_head", "embed"))


def check_optimizer(config: TrainConfig, on_gpu: bool = True) -> None:
    """ValueError where DeepSpeed would change what a setting means, or where the device has no use for it.

    on_gpu: whether the run's device is a GPU.
    """
    if config.optimizer == "muon" and config.zero_stage > (1 if config.precision == "bf16" else 0):
        raise ValueError(
            f"train.optimizer=muon with train.zero_stage={config.zero_stage} and train.precision={config.precision}: "
            "there DeepSpeed clips Muon's orthogonalised update instead of the gradient; use train.zero_stage=0 "
            "(or 1 in bf16)"
        )
    if config.precision == "fp16" and config.optimizer == "muon":
        raise ValueError(
            "train.optimizer=muon with train.precision=fp16: DeepSpeed clips Muon's orthogonalised update there, not "
            "the gradient; use train.precision=bf16"
        )
    if config.precision == "fp16" and not on_gpu:
        raise ValueError(
            "train.precision=fp16 needs a GPU: a CPU computes it more slowly than fp32; use fp32 or bf16"
        )
    if config.offload and not on_gpu:
        raise ValueError("train.offload=true: on a CPU the optimizer's state is in its memory already; leave it out")


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, or Muon for the hidden matrices with AdamW for the rest. Norm weights are not decayed."""
    check_optimizer(config)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    adam = {"lr": config.lr, "betas": tuple(config.betas), "eps": 1e-8}
    for name, p in named:
        p.use_muon = config.optimizer == "muon" and is_muon_matrix(name, p)
    groups = []
    for is_matrix, of_target, decay in (
        (True, False, config.weight_decay), (False, False, 0.0), (True, True, config.weight_decay)
    ):  # fmt: skip
        chosen = [
            p for _, p in named
            if not p.use_muon and (p.dim() > 1) is is_matrix and getattr(p, "of_target", False) is of_target
        ]  # fmt: skip
        if chosen:
            groups.append({"params": chosen, "weight_decay": decay, "of_target": of_target, **adam})
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, fused=True)
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    for group in groups:
        group["use_muon"] = False
    muon = {
        "params": [p for _, p in named if p.use_muon],
        "use_muon": True,
        "lr": config.muon_lr,
        "momentum": config.muon_momentum,
        "weight_decay": config.weight_decay,
    }
    if not muon["params"]:
        raise ValueError("train.optimizer=muon: this head has no hidden matrix for Muon; use train.optimizer=adamw")
    return MuonWithAuxAdam([*groups, muon], adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={})


def engine_config(config: TrainConfig) -> dict[str, Any]:
    """DeepSpeed's configuration.

    bf16 and fp16 keep fp32 masters, bf16 accumulates gradients in fp32. DeepSpeed has no replicated form of that, so
    stage 0 runs its stage-1 optimizer there, which gives the same weights (and is the same thing with one process).
    """
    stage = config.zero_stage
    if config.precision != "fp32" and stage == 0:
        stage = 1
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.accumulate,
        "gradient_clipping": config.clip if stage else 0.0,  # at stage 0 the guard clips
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
    }
    if stage == 3:  # or DeepSpeed puts its own function in torch's place, for every head of this process
        settings["zero_optimization"]["memory_efficient_linear"] = False
    if config.offload:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        settings["zero_force_ds_cpu_optimizer"] = False  # which is compiled at the first start
    if config.precision == "bf16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.precision == "fp16":
        settings["fp16"] = {"enabled": True}  # with a loss scale that DeepSpeed adapts
    return settings
