"""Export to the layout of the original Medusa code (FasterDecoding): medusa_lm_head.safetensors and config.json."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from headtrain.engines import servable_name
from headtrain.export import ExportError
from headtrain.export.build import contract_for
from headtrain.export.folder import HeadFolder, Layout

NEAREST = "use format=vllm engine_version=0.32.0"


def layout(head: HeadFolder, info: dict[str, Any], version: str | None) -> Layout:
    """ExportError for what the original code cannot run: a reduced draft vocabulary, several blocks per head."""
    ours = head.ours
    if ours["draft_vocab_size"] != ours["vocab_size"]:
        raise ExportError(
            f"draft vocabulary of {ours['draft_vocab_size']} tokens: the original Medusa code drafts over all of "
            "the target's, and so does vLLM; train with head.draft_vocab=full"
        )
    blocks = ours["blocks"]
    if blocks > 1:
        raise ExportError(f"{blocks} blocks per head: the original Medusa code has the same weights in all; {NEAREST}")
    contract, version = contract_for("medusa", "medusa", version)
    target = "TARGET" if info.get("adapter") else servable_name(info.get("model"))
    config = {
        "medusa_num_heads": ours["unroll"],
        "medusa_num_layers": blocks,
        "base_model_name_or_path": target,
        "hidden_size": ours["hidden_size"],
        "vocab_size": ours["vocab_size"],
        "torch_dtype": head.config.get("torch_dtype"),
        "headtrain": ours,
    }
    return Layout(
        contract,
        config,
        original_names(head.tensors, ours["unroll"], blocks),
        lambda target, folder, k: (
            f"cd {folder} && python -c \"import torch, safetensors.torch as s; torch.save(s.load_file('medusa_lm_head."
            f"safetensors'), 'medusa_lm_head.pt')\"\npython -m medusa.inference.cli --model {folder}"
        ),
        version,
        k=ours["unroll"],
        ours=False,
        weights="medusa_lm_head.safetensors",
        notes=[
            f"config.json names the target: {target}",
            "the original code reads medusa_lm_head.pt: the first command makes it; others read safetensors",
        ],
    )


def original_names(tensors: dict[str, Tensor], heads: int, blocks: int) -> dict[str, Tensor]:
    """Head by head: `{head}.{block}.linear` and `{head}.{blocks}`, its lm_head; a shared one is there for each."""
    shared = "lm_heads.1.weight" not in tensors
    named = {}
    for name, tensor in tensors.items():
        if block := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name):
            named[f"{block[1]}.{block[2]}.linear.{block[3]}"] = tensor
        elif lm_head := re.fullmatch(r"lm_heads\.(\d+)\.weight", name):
            for n in range(heads) if shared else [lm_head[1]]:
                named[f"{n}.{blocks}.weight"] = tensor.clone()
        else:
            named[name] = tensor
    return named
