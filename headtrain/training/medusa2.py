"""Medusa-2 (head.medusa2): low-rank factors of the target are trained along with the heads, through peft.

Source: Cai et al., Medusa (arXiv 2401.10774), sections 2.2.2 (joint training, heads first, separate learning rates) and
2.3.2 (self-distillation: the target as it was teaches the target with its factors). What the target as it was says is
in the captures, so that only the target with factors runs in a training step.

Shapes: N packed positions of R documents, L the longest of them, M slots, T hidden, V vocabulary, D = 1 depth.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headtrain.config import Medusa2Section, RecipeConfig
from headtrain.heads.base import Batch
from headtrain.heads.layers import Pairs, Teacher, fused_loss
from headtrain.heads.medusa import MedusaHead
from headtrain.heads.objectives import OBJECTIVES, WEIGHTS
from headtrain.heads.vocab import trained_pairs
from headtrain.target import Target
from headtrain.training.lora import ADAPTER

FOLDER = "adapter"  # beside a head's files
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Student(nn.Module):
    """The target with trained factors. Its own parameters are the factors alone; the target stays outside."""

    def __init__(self, target: Target, section: Medusa2Section, seed: int, checkpointing: bool = False):
        """ValueError where a target of the section is no linear layer of the target's blocks."""
        from peft import LoraConfig, get_peft_model

        super().__init__()
        rank = section.rank or 0
        torch.manual_seed(seed)
        settings = LoraConfig(
            r=rank, lora_alpha=section.alpha or 2 * rank, target_modules=_layers(target, section.targets),
            task_type="CAUSAL_LM",
        )  # fmt: skip
        adapted = get_peft_model(target.model, settings, ADAPTER)
        adapted.peft_config[ADAPTER].base_model_name_or_path = target.name
        self.outside: tuple[Any, ...] = (target, adapted)
        self.names = [name for name, p in adapted.named_parameters() if p.requires_grad]
        self.factors = nn.ParameterList(p for p in adapted.parameters() if p.requires_grad)
        for p in self.factors:
            p.of_target = True  # for the optimizer
        self.distill, self.joint = section.distill, False  # joint: no longer the heads alone
        if checkpointing:
            model = target.model  # whose method has another name from transformers 5.20 on
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            for layer in target.layers:
                layer.training = True  # or transformers does not; what is inside stays in evaluation mode

    @classmethod
    def load(cls, config: RecipeConfig) -> Student:
        target = Target.load(config.target, DTYPES[config.train.precision])
        return cls(target, config.head.medusa2, config.seed, config.train.checkpointing)

    def weights(self) -> dict[str, nn.Parameter]:
        """The factors by peft's names."""
        return dict(zip(self.names, self.factors, strict=True))

    def last_states(self, batch: Batch) -> Tensor:
        """What the target with factors has after its final norm, [N, T], with gradients."""
        target, _ = self.outside
        starts = batch.cu_R1.long()
        sizes_R = starts.diff()
        at_RL = torch.arange(int(sizes_R.max()), device=starts.device)[None]
        real_RL = at_RL < sizes_R[:, None]
        tokens_RL = torch.zeros_like(real_RL, dtype=torch.long)
        tokens_RL[real_RL] = batch.ids_N
        return target.last_states(tokens_RL)[real_RL]

    def followed(self, batch: Batch) -> Batch:
        """The batch as it would be captured from the target with factors: its last states, choices and log-sum-exp."""
        target, _ = self.outside
        with torch.no_grad():
            last_NT = self.last_states(batch)
            chunks = [target.logits(rows).float() for rows in last_NT.split(1024)]
        return replace(
            batch, last_NT=last_NT.to(batch.last_NT), argmax_N=torch.cat([logits.argmax(-1) for logits in chunks]),
            logsumexp_N=torch.cat([logits.logsumexp(-1) for logits in chunks]),
        )  # fmt: skip

    def loss(self, head: MedusaHead, batch: Batch, last_NT: Tensor) -> Tensor:
        """Cross-entropy of the target with factors with the target as it was, per token, over the supervised slots."""
        target, _ = self.outside
        _, reach_DN = trained_pairs(batch.supervised_N, batch.argmax_N, None, batch.cu_R1, 1)
        slots_M = reach_DN[0].nonzero()[:, 0]  # the distribution at slot + 1 is compared
        if not len(slots_M):
            return 0.0 * last_NT.sum()
        count = reach_DN.sum() if batch.count_D is None else batch.count_D[0]
        where, lm_head_VT = torch.zeros_like(slots_M), target.lm_head.weight.detach().to(last_NT)
        return fused_loss(
            partial(OBJECTIVES["soft_ce"], hard=0.0), partial(WEIGHTS["decay"], decay=1.0),
            (batch.parts / count.float().clamp(min=1))[None], last_NT.index_select(0, slots_M + 1), lm_head_VT,
            Pairs(slots_M, where, batch.argmax_N[slots_M + 1]),
            Teacher(batch.last_NT.to(last_NT), batch.logsumexp_N, lm_head_VT, head.logit_scale, head.softcap),
        )[0]  # fmt: skip

    def save(self, folder: Path, factors: dict[str, Tensor]) -> None:
        """Writes an adapter that peft, and `target.adapter`, read. factors: by the names of `weights`."""
        _, adapted = self.outside
        tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in factors.items()}
        adapted.save_pretrained(str(folder), state_dict=tensors, save_embedding_layers=False)


def _layers(target: Target, targets: list[str] | None) -> list[str]:
    """Names of the linear layers in the target's blocks; with targets those whose names end so."""
    names = [name for name, module in target.model.named_modules() if isinstance(module, nn.Linear)]
    blocks = next(name for name, module in target.model.named_modules() if module is target.layers)
    inside = [name for name in names if name.startswith(f"{blocks}.")]
    if targets is None:
        return inside
    for wanted in targets:
        if not any(name.endswith(f".{wanted}") for name in inside):
            ends = sorted({name.rpartition(".")[2] for name in inside})
            raise ValueError(
                f"head.medusa2.targets: {wanted} is no linear layer of the target's blocks; these are {', '.join(ends)}"
            )
    return [name for name in inside if any(name.endswith(f".{wanted}") for wanted in targets)]
