"""Whether an optimizer step is taken: asked inside DeepSpeed's step, when the norm of the whole gradient is known.

A step that is not taken leaves weights, moments and step count as they are, at every ZeRO stage: each of DeepSpeed's
optimizers drops a step whose norm is infinite, and that is what it is told.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

import torch
from torch import nn

from headtrain.config import TrainConfig
from headtrain.training.ranks import Ranks

REMEMBERED = 64  # norms of accepted steps that a spike is measured against
FEWEST = 16  # of them before a step can be called a spike
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # fp16's loss scale and its history


class Guard:
    """`norm`: of the last step's gradient; `reason`: None when the step was taken, else "not finite" or "a spike"."""

    def __init__(self, engine: Any, config: TrainConfig, ranks: Ranks):
        self.spike, self.clip, self.ranks = config.spike, config.clip, ranks
        self.norms: deque[float] = deque(maxlen=REMEMBERED)
        self.optimizer = engine.optimizer
        scaler = getattr(self.optimizer, "loss_scaler", None)
        self.scaler = scaler if getattr(scaler, "dynamic", False) else None
        if self.scaler:
            self.scaler.raise_error_at_min_scale = False  # the trainer stops the run, and names the rows
        self.reset()
        self._install()

    def reset(self) -> None:
        """Before each step. A step that ends before its norm is known (fp16 overflow) is one that is not finite."""
        self.norm, self.reason = math.nan, "not finite"
        self._scale = {key: getattr(self.scaler, key) for key in SCALER} if self.scaler else {}

    def allows(self, norm: float) -> bool:
        """Judges a step by its gradient norm; the same on every process, and every process must call it."""
        self.norm, self.reason = (norm if norm >= 0 else math.nan), None  # DeepSpeed's sign for NaN is -1
        if not math.isfinite(self.norm):
            self.reason = "not finite"
        elif self.spike and len(self.norms) >= FEWEST and norm > self.spike * median(self.norms):
            self.reason = "a spike"
        if self.spike:  # a norm at the limit could round differently
            self.reason = self.ranks.agree(self.reason)
        if self.reason is None:
            self.norms.append(norm)
        return self.reason is None

    @property
    def failing(self) -> bool:
        """Whether the skipped step counts towards the end of the run: not while fp16's loss scale is still falling."""
        if self.reason == "not finite" and self.scaler:
            return self.scaler.cur_scale <= self.scaler.min_scale
        return self.reason is not None

    def settle(self) -> None:
        """After each step: what DeepSpeed does to a dropped one and should not.

        It lowers fp16's loss scale, also at a spike; and with offload it adds the next step's gradients to this one's.
        """
        if self.reason == "a spike" and self.scaler:
            vars(self.scaler).update(self._scale)
        if self.reason and getattr(self.optimizer, "cpu_offload", False):
            self.optimizer.averaged_gradients.update(dict.fromkeys(self.optimizer.averaged_gradients))

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        scale = [getattr(self.scaler, key) for key in SCALER] if self.scaler else []
        return {"norms": list(self.norms), "scale": scale}

    def restore(self, state: dict[str, Any]) -> None:
        self.norms.extend(state["norms"])
        if self.scaler:
            vars(self.scaler).update(zip(SCALER, state["scale"], strict=True))

    # ------------------------------------------------------------------------------------------- DeepSpeed's side

    def _install(self) -> None:
        """Takes the place of the method in which each kind of optimizer makes or uses the norm."""
        if hasattr(self.optimizer, "fp32_partitioned_groups_flat"):  # ZeRO 3
            self._wrap("_get_norm_groups", self._zero3)
        elif hasattr(self.optimizer, "scaled_global_norm"):  # ZeRO 1 and 2
            self._wrap("scaled_global_norm", self._zero12)
        elif hasattr(self.optimizer, "bf16_groups"):
            self._wrap("step", self._bf16)
        else:
            self._wrap("step", self._plain)

    def _wrap(self, name: str, method: Any) -> None:
        inner = getattr(self.optimizer, name)
        setattr(self.optimizer, name, lambda *args, **kwargs: method(inner, *args, **kwargs))

    def _zero3(self, inner: Any) -> list[torch.Tensor]:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        norms = inner()
        total = combine_grad_norm_groups(norms)
        return norms if self.allows(float(total) / self.optimizer.loss_scale) else [torch.full_like(total, math.inf)]

    def _zero12(self, inner: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        total = inner(*args, **kwargs)
        return total if self.allows(float(total) / self.optimizer.loss_scale) else torch.full_like(total, math.inf)

    def _bf16(self, inner: Any, *args: Any, **kwargs: Any) -> None:
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        optimizer = self.optimizer
        optimizer.overflow = not self.allows(float(get_global_norm_of_tensors(optimizer.get_grads_for_norm()[0])))
        if optimizer.overflow:
            optimizer._global_grad_norm = math.inf
            optimizer.zero_grad(set_to_none=False)
        else:
            inner(*args, **kwargs)

    def _plain(self, inner: Any, *args: Any, **kwargs: Any) -> None:
        """Without ZeRO, DeepSpeed neither reports the norm nor drops a step, so the clipping is done here too."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not self.allows(float(norm)):
            return
        if self.clip:
            nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        inner(*args, **kwargs)
