"""Heads for a tiny target, as the tools that wrote the contracts lay them out."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from headtrain.heads.base import Batch

LAYERS, HIDDEN, VOCAB, DRAFT = 12, 32, 60, 20
WIDE, HEADS, KV, HEAD_DIM = 48, 4, 2, 16  # 4 x 16 is not 32
IDS = [0, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 50, 53, 55, 59]  # of the draft vocabulary
LLAMA = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
    "intermediate_size": WIDE, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD_DIM,
    "num_hidden_layers": 1, "vocab_size": VOCAB, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def drawn(shapes: dict[str, tuple[int, ...]], dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    return {
        name: (torch.randn(shape, generator=g) * 0.2 + (len(shape) == 1)).to(dtype) for name, shape in shapes.items()
    }


def layer(prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama layer whose q, k and v read `inputs`, but for its norms."""
    q, kv = HEADS * HEAD_DIM, KV * HEAD_DIM
    return {
        f"{prefix}self_attn.q_proj.weight": (q, inputs), f"{prefix}self_attn.k_proj.weight": (kv, inputs),
        f"{prefix}self_attn.v_proj.weight": (kv, inputs), f"{prefix}self_attn.o_proj.weight": (HIDDEN, q),
        f"{prefix}mlp.gate_proj.weight": (WIDE, HIDDEN), f"{prefix}mlp.up_proj.weight": (WIDE, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, WIDE), f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
    }  # fmt: skip


def eagle3_tensors(first: str = "midlayer.", taps: int = 3) -> dict[str, torch.Tensor]:
    """What every EAGLE-3 writer has; d2t holds offsets."""
    norms = {f"{first}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "hidden_norm")}
    shapes = layer(first, 2 * HIDDEN) | norms
    shapes |= {"fc.weight": (HIDDEN, taps * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (DRAFT, HIDDEN)}
    marks = torch.zeros(VOCAB, dtype=torch.bool)
    marks[IDS] = True
    return drawn(shapes) | {"d2t": torch.tensor(IDS) - torch.arange(DRAFT), "t2d": marks}


def write(folder: Path, config: dict, tensors: dict, weights: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / weights)
    return folder


# ------------------------------------------------------------------------------------------------- one of each kind


def eagle3(**keys) -> tuple[dict, dict]:
    """(config, tensors) of a plain EAGLE-3 head without layer ids, as SafeAILab's: the default taps."""
    return {**LLAMA, "draft_vocab_size": DRAFT, **keys}, eagle3_tensors()


def sglang() -> tuple[dict, dict]:
    """As SpecForge exports it; taps 2, 6, 9."""
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True}
    return eagle3(eagle_config=nested)


def vllm() -> tuple[dict, dict]:
    """Taps 4, 6, 12, the last after every block."""
    return eagle3(eagle_aux_hidden_state_layer_ids=[4, 6, 12], norm_before_residual=True)


def trtllm() -> tuple[dict, dict]:
    """As ModelOpt exports it: layers.0, no t2d, draft ids in the order of frequency, other ids than the default's."""
    nested = {
        "eagle_aux_hidden_state_layer_ids": [2, 5, 10], "use_aux_hidden_state": True, "use_last_layernorm": True,
        "use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False, "next_layer_regular": True,
        "parallel_draft_step": 1,
    }  # fmt: skip
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 512, "rope_theta": 500000.0}
    config, _ = eagle3(eagle_config=nested, rope_scaling=yarn)
    tensors = eagle3_tensors("layers.0.")
    del tensors["t2d"]
    tensors["d2t"] = torch.tensor(IDS[::-1]) - torch.arange(DRAFT)
    return config, tensors


def speculators(kind: str = "eagle3") -> tuple[dict, dict]:
    """As the speculators library saves it: the layer's config inside; norm_before_residual is left out."""
    layer_config = {k: v for k, v in LLAMA.items() if k not in ("architectures", "rope_theta", "torch_dtype")}
    layer_config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 4}
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": kind, "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind, "proposal_methods": [proposal], "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer_config, "draft_vocab_size": DRAFT, "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": [2, 6, 9], "target_hidden_size": None, "tie_word_embeddings": False,
    }  # fmt: skip
    return config, eagle3_tensors("layers.0.")


def peagle(plain: bool = False) -> tuple[dict, dict]:
    config, tensors = speculators("peagle")
    if plain:
        config, _ = eagle3(eagle_aux_hidden_state_layer_ids=[2, 6, 9], ptd_token_id=58)
    config |= {"num_hidden_layers": 2} if plain else {"mask_token_id": 58}
    if not plain:
        config["transformer_layer_config"]["num_hidden_layers"] = 2
    second = layer("layers.1.", HIDDEN) | {"layers.1.input_layernorm.weight": (HIDDEN,)}
    return config, tensors | drawn(second) | {"mask_hidden": drawn({"m": (1, 1, 3 * HIDDEN)})["m"]}


def eagle(bias: bool = False) -> tuple[dict, dict]:
    """EAGLE-1 of the original code; with a bias in fc, as many have."""
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "bias": bias}
    shapes = layer("layers.0.", HIDDEN) | {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    return config, drawn(shapes | ({"fc.bias": (HIDDEN,)} if bias else {}))


def medusa(names: str = "{i}.{j}", heads: int = 3, **keys) -> tuple[dict, dict]:
    """As the original code has it; its released configs count fewer heads than there are."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        stem = names.format(i=i, j=0)
        shapes |= {f"{stem}.linear.weight": (HIDDEN, HIDDEN), f"{stem}.linear.bias": (HIDDEN,)}
        shapes[names.format(i=i, j=1) + ".weight"] = (VOCAB, HIDDEN)
    return {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/x", **keys}, drawn(shapes)


def batch(taps: int = 3) -> Batch:
    """Two documents of random states."""
    g, n = torch.Generator().manual_seed(1), 24
    return Batch(
        ids_N=torch.randint(0, VOCAB, (n,), generator=g), positions_N=torch.arange(n) % 12,
        cu_R1=torch.tensor([0, 12, 24], dtype=torch.int32), supervised_N=torch.arange(n) % 12 > 2,
        taps_NAT=torch.randn(n, taps, HIDDEN, generator=g), last_NT=torch.randn(n, HIDDEN, generator=g),
        argmax_N=torch.randint(0, VOCAB, (n,), generator=g), logsumexp_N=torch.zeros(n),
    )  # fmt: skip
