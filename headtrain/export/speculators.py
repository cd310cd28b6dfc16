"""Export to the layout of the speculators library, which vLLM loads too: EAGLE-3 and P-EAGLE."""

from __future__ import annotations

from typing import Any

from headtrain.engines import servable_name
from headtrain.export import ExportError
from headtrain.export.build import contract_for
from headtrain.export.folder import HeadFolder, Layout
from headtrain.export.vllm import native

LIBRARY = "0.9.0"
MODELS = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}
LAYER = (  # what describes the decoder layers, below transformer_layer_config
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_hidden_layers", "vocab_size", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "tie_word_embeddings",
)  # fmt: skip


def layout(head: HeadFolder, info: dict[str, Any], version: str | None) -> Layout:
    """ExportError where the target's architecture is not known."""
    config, ours, kind = head.config, head.ours, head.kind
    made = native(head)
    made.contract, made.version = contract_for("speculators", kind, version)
    made.tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in made.tensors.items()
        if name == "midlayer.hidden_norm.weight" or not name.endswith(".hidden_norm.weight")
    }
    if "mask_hidden" in made.tensors:
        made.tensors["mask_hidden"] = made.tensors["mask_hidden"].unsqueeze(0)
    name = servable_name(info.get("model"))
    named = name if name != "TARGET" and not info.get("adapter") else None
    methods = [{"proposal_type": "greedy", "speculative_tokens": ours["unroll"], "verifier_accept_k": 1}]
    made.config = {
        "architectures": [MODELS[kind]],
        "speculators_model_type": kind,
        "speculators_version": LIBRARY,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": methods,
            "verifier": {"name_or_path": named, "architectures": _architectures(info)},
        },
        "transformer_layer_config": {key: config[key] for key in LAYER if key in config},
        "draft_vocab_size": config.get("draft_vocab_size"),
        "norm_before_residual": config.get("norm_before_residual"),
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": config.get("norm_output", False),
        **({"target_hidden_size": config["target_hidden_size"]} if "target_hidden_size" in config else {}),
        "eagle_aux_hidden_state_layer_ids": ours["taps"],
        "embed_requires_grad": ours.get("own_embedding", False),
        **({"mask_token_id": config.get("ptd_token_id")} if kind == "peagle" else {}),
        "tie_word_embeddings": False,
        "torch_dtype": config.get("torch_dtype"),
        "headtrain": ours,
    }
    made.ours = False
    made.notes = ["vLLM loads this layout"]
    if named:
        made.notes.append(f"`vllm serve HEAD_FOLDER` alone serves {named} with it, {ours['unroll']} drafts a step")
    return made


def _architectures(info: dict[str, Any]) -> list[str]:
    """The target's classes, as its config.json names them; of a family, transformers' causal LM."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if known := info.get("architectures"):
        return list(known)
    if name := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(info.get("family") or ""):
        return [name]
    raise ExportError(
        f"format=speculators names the target's architecture, and family={info.get('family')!r} does not tell it: "
        "export from the head's run folder, with target.family in its recipe"
    )
