"""Tiny random targets with an MTP module in their checkpoint, in the dialects and families that have one.

The module's decoder layer is the last layer of a model that transformers saved with one layer more, so its names, and
what it computes, are transformers' own and not those of the code under test.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYERS, HIDDEN, VOCAB = 2, 16, 20
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": VOCAB, "max_position_embeddings": 256, "num_hidden_layers": LAYERS + 1, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 19, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
GLM = EXPERTS | {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "use_qk_norm": True, "attention_bias": True,
}  # fmt: skip
LATENT = EXPERTS | {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4, "head_dim": 4,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
NEXT = EXPERTS | LINEAR | {"num_experts": 4, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # family: dialect, settings
    "glm4_moe": ("deepseek", GLM),
    "deepseek_v3": ("deepseek", LATENT),
    "qwen3_next": ("qwen", NEXT),
    "qwen3_5_text": ("qwen", LINEAR),
    "qwen2": ("mimo", {}),  # MiMo's own code is no part of transformers; its layer is Qwen2's
}
PREFIX = {"deepseek": f"model.layers.{LAYERS}.", "qwen": "mtp.", "mimo": "model.mtp_layers.0."}
NAMES = {
    "deepseek": ("eh_proj", "enorm", "hnorm", "shared_head.norm", ""),
    "qwen": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0."),
    "mimo": ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", ""),
}


def make(folder: Path, family: str, dtype: torch.dtype = torch.float32, width: float = 0.3, **more) -> SimpleNamespace:
    """Writes a target in two shards; returns what transformers makes of it: `model`, whose layer number LAYERS is the
    module's, and the module's other tensors `fc`, `embed_norm`, `hidden_norm`, `norm` by these names.

    width: of the random matrices. more: settings of the family's config besides those above, or instead of them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dialect, settings = FAMILIES[family]
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **(SIZES | settings | more))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() == 1:
                tensor += 0.1 * torch.randn_like(tensor)
            else:
                tensor.normal_(0, width)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    own = f"model.layers.{LAYERS}."
    *names, layer = NAMES[dialect]
    prefix = PREFIX[dialect]
    moved = {prefix + layer + n.removeprefix(own): t for n, t in tensors.items() if n.startswith(own)}
    rest = {n: t for n, t in tensors.items() if not n.startswith(own)}
    hidden = config.hidden_size
    extra = {"fc": width * torch.randn(hidden, 2 * hidden, dtype=dtype)}
    extra |= {name: 0.8 + 0.4 * torch.rand(hidden, dtype=dtype) for name in ("embed_norm", "hidden_norm", "norm")}
    moved |= {f"{prefix}{name}.weight": t for name, t in zip(names, extra.values(), strict=True)}
    if family == "deepseek_v3":  # as released; engines use the target's
        moved[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        moved[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    write_shards(folder, rest, moved)
    written = json.loads((folder / "config.json").read_text())
    written["num_hidden_layers"], written["num_nextn_predict_layers"] = LAYERS, 1
    if "layer_types" in written:
        written["layer_types"] = written["layer_types"][:LAYERS]
    (folder / "config.json").write_text(json.dumps(written))
    return SimpleNamespace(model=model, dialect=dialect, prefix=prefix, **extra)


def write_shards(folder: Path, *shards: dict[str, torch.Tensor]) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = {}
    for n, tensors in enumerate(shards, 1):
        file = f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
