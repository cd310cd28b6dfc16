"""A tiny target on disk, and heads for it as the tools that wrote the contracts lay them out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, VOCAB, DRAFT = 12, 32, 60, 20
WIDE, HEADS, KV, HEAD_DIM = 48, 4, 2, 16  # 4 x 16 is not 32
IDS = [0, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 50, 53, 55, 59]  # of the draft vocabulary
LLAMA = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
    "intermediate_size": WIDE, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD_DIM,
    "num_hidden_layers": 1, "vocab_size": VOCAB, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    """A Llama of 12 blocks, with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from headtrain.smoke import byte_tokenizer

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV, head_dim=HEAD_DIM, vocab_size=VOCAB, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, pad_token_id=0, bos_token_id=None,
        eos_token_id=59,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def ends(target) -> dict[str, torch.Tensor]:
    """The target's embedding and lm_head, bfloat16 [V, H]."""
    from safetensors.torch import load_file

    found = load_file(target / "model.safetensors")
    return {"embedding": found["model.embed_tokens.weight"], "lm_head": found["lm_head.weight"]}


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
