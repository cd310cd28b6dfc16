"""A target of 32 heads of 128 values and hidden size 2560: the head's sizes are the target's, not hidden / heads."""

import pytest
import torch
from transformers import Qwen3Config

from headtrain.config import HeadSection
from headtrain.heads.eagle3 import Eagle3Head
from headtrain.target import TargetParts, head_rope

CONFIG = Qwen3Config(
    hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    intermediate_size=9728, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1000000, max_position_embeddings=40960,
    tie_word_embeddings=True,
)  # fmt: skip
SHAPES = {
    "fc.weight": (2560, 7680),
    "midlayer.self_attn.q_proj.weight": (4096, 5120),
    "midlayer.self_attn.k_proj.weight": (1024, 5120),
    "midlayer.self_attn.v_proj.weight": (1024, 5120),
    "midlayer.self_attn.o_proj.weight": (2560, 4096),
    "midlayer.mlp.gate_proj.weight": (9728, 2560),
    "midlayer.mlp.up_proj.weight": (9728, 2560),
    "midlayer.mlp.down_proj.weight": (2560, 9728),
    "lm_head.weight": (32000, 2560),
    "d2t": (32000,),
    "t2d": (151936,),
}


@pytest.fixture(scope="module")
def head():
    with torch.device("meta"):
        embedding = torch.empty(151936, 2560)
        parts = TargetParts(embedding, embedding, torch.ones(2560), CONFIG, head_rope(CONFIG), {0})
        return Eagle3Head.fresh(HeadSection(draft_vocab=32000), parts)


def test_every_tensor_has_the_shape_that_the_explicit_head_size_gives(head):
    tensors = head.portable_tensors()
    assert {name: tuple(tensors[name].shape) for name in SHAPES} == SHAPES
    assert set(tensors) - set(SHAPES) == {
        "norm.weight", "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight",
        "midlayer.post_attention_layernorm.weight",
    }  # fmt: skip


def test_the_head_size_is_written_out(head):
    config = head.portable_config(torch.bfloat16)
    assert config["head_dim"] == 128 and config["num_attention_heads"] == 32 and config["rope_theta"] == 1000000
