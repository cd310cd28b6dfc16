"""Export to vLLM. A trained head's folder already has vLLM's names and shapes; layers above the first get their norm
under a second name, since SGLang and TensorRT-LLM read it there. An MTP module goes back into its target's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headtrain.engines import SGLANG_FIRST_IS_1_SINCE, serve_command, sglang_rules_agree
from headtrain.export import ExportError
from headtrain.export.build import contract_for
from headtrain.export.contracts import load_contract
from headtrain.export.folder import HeadFolder, Layout


def layout(head: HeadFolder, info: dict[str, Any], version: str | None) -> Layout:
    """ExportError for a Medusa head with a reduced draft vocabulary: vLLM 0.32.0 does not start with one."""
    ours = head.ours
    if head.kind == "medusa" and ours["draft_vocab_size"] != ours["vocab_size"]:
        raise ExportError(
            f"draft vocabulary of {ours['draft_vocab_size']} tokens: vLLM's loader stops at the token_map of such a "
            "Medusa head; train with head.draft_vocab=full"
        )
    made = native(head)
    made.contract, made.version = contract_for("vllm", head.kind, version)
    return made


def native(head: HeadFolder) -> Layout:
    """The head as it is, in the layout that most formats begin with; of no particular release."""
    kind, ours = head.kind, head.ours
    contract = load_contract("vllm", kind)
    return Layout(
        contract,
        dict(head.config),
        with_both_norms(head.tensors),
        command("vllm", kind),
        contract["version"],
        k=ours["unroll"] if kind == "medusa" else None,
        notes=_notes(kind, ours),
    )


def with_both_norms(tensors: dict[str, Any]) -> dict[str, Any]:
    """Of layers above the first, vLLM applies input_layernorm and others hidden_norm: both are there, and equal."""
    more = {
        name.replace("input_layernorm", "hidden_norm"): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("layers.") and name.endswith(".input_layernorm.weight") and not name.startswith("layers.0.")
    }
    return more | tensors


def command(engine: str, kind: str) -> Callable[[str, str, int], str]:
    """What serves such a head, of target, folder and K."""
    return lambda target, folder, k: serve_command(engine, target, folder, k, head_type=kind)


def _notes(kind: str, ours: dict[str, Any]) -> list[str]:
    if kind == "peagle":
        return ["vLLM drafts all positions in one pass only with parallel_drafting, and with its V1 model runner"]
    if kind == "medusa":
        return ["num_speculative_tokens has to be the number of its heads"]
    taps, blocks = ours["taps"], ours["target_layers"]
    if kind != "eagle3" or sglang_rules_agree(taps, blocks):
        return []
    return [
        f"SGLang from {SGLANG_FIRST_IS_1_SINCE} on counts the layer ids of DeepSeek, Kimi and GLM-Lite targets "
        "otherwise: for SGLang use format=sglang, and say its version"
    ]
