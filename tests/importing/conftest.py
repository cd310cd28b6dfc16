"""A tiny target on disk. The module checkpoints.py is importable as `importing_checkpoints` by the tests here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

_spec = importlib.util.spec_from_file_location("importing_checkpoints", Path(__file__).with_name("checkpoints.py"))
made = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    """A Llama of 12 blocks, with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from headtrain.smoke import byte_tokenizer

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=made.HIDDEN, intermediate_size=made.WIDE, num_hidden_layers=made.LAYERS,
        num_attention_heads=made.HEADS, num_key_value_heads=made.KV, head_dim=made.HEAD_DIM, vocab_size=made.VOCAB,
        max_position_embeddings=512,
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


@pytest.fixture
def lend(ends):
    """lend(head): the head with the target's embedding and lm_head."""

    def attach(head):
        head.attach(ends["embedding"].float(), ends["lm_head"].float() if head.borrows_lm_head else None)
        return head

    return attach
