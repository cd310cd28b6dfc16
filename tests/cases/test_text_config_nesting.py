"""A target whose config has everything under text_config, beside a vision config with sizes of its own."""

import json

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from headtrain.checks import target_config
from headtrain.config import HeadSection
from headtrain.engines import default_taps
from headtrain.export.contracts import faults, load_contract
from headtrain.heads.base import HeadConfig
from headtrain.heads.eagle3 import Eagle3Head
from headtrain.heads.layers import DecoderLayer
from headtrain.target import TargetParts, head_rope

TEXT = {
    "model_type": "example_text", "hidden_size": 1536, "num_hidden_layers": 35, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6144, "vocab_size": 262144,
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}  # fmt: skip
NESTED = {
    "architectures": ["ExampleForConditionalGeneration"], "model_type": "example_mm", "text_config": TEXT,
    "vision_config": {"hidden_size": 768, "num_hidden_layers": 16},
}  # fmt: skip


class ExampleText(PretrainedConfig):
    model_type = "example_text"


class ExampleVision(PretrainedConfig):
    model_type = "example_vision"


class Example(PretrainedConfig):
    model_type = "example_mm"
    sub_configs = {"text_config": ExampleText, "vision_config": ExampleVision}  # noqa: RUF012 (as transformers has it)

    def __init__(self, text_config=None, vision_config=None, **more):
        self.text_config, self.vision_config = ExampleText(**text_config or {}), ExampleVision(**vision_config or {})
        super().__init__(**more)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    from headtrain.config import TargetConfig

    AutoConfig.register("example_mm", Example, exist_ok=True)
    folder = tmp_path_factory.mktemp("nested")
    (folder / "config.json").write_text(json.dumps(NESTED))
    return target_config(TargetConfig(model=str(folder)))


@pytest.fixture(scope="module")
def head(text):
    with torch.device("meta"):
        embedding = torch.empty(text.vocab_size, text.hidden_size)
        parts = TargetParts(embedding, embedding, torch.ones(text.hidden_size), text, head_rope(text), {1})
        return Eagle3Head.fresh(HeadSection(), parts)


def test_the_targets_facts_are_those_of_its_text_config(text, head):
    c = head.config
    assert (c.hidden_size, c.target_hidden_size, c.target_layers) == (1536, 1536, 35)
    assert c.taps == default_taps(35) == [2, 17, 32]
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.intermediate_size) == (8, 1, 256, 6144)
    assert (c.vocab_size, c.rms_norm_eps, c.max_position_embeddings) == (262144, 1e-6, 131072)
    assert (text.hidden_activation, text.tie_word_embeddings) == ("gelu_pytorch_tanh", True)


def test_the_heads_config_is_flat_and_says_the_activation_it_has(head):
    config = head.portable_config(torch.float32)
    assert not {"text_config", "vision_config", "hidden_activation"} & set(config)
    assert (config["model_type"], config["hidden_act"], config["hidden_size"]) == ("llama", "silu", 1536)
    tensors = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in head.state_dict().items() if t.dim() == 1}
    found = faults(load_contract("vllm", "eagle3"), config, tensors)
    assert not [fault for fault in found if fault.startswith("config.json")]


def test_the_mlp_is_what_the_config_says():
    layer = DecoderLayer(HeadConfig(hidden_size=7, intermediate_size=7), 14, ("post_attention_layernorm",))
    layer.mlp = torch.nn.ModuleDict(dict.fromkeys(("gate_proj", "up_proj", "down_proj"), torch.nn.Identity()))
    layer.self_attn["o_proj"] = torch.nn.Identity()
    x = torch.linspace(-3, 3, 7)
    normed = x / (x.square().mean() + 1e-5).sqrt()
    torch.testing.assert_close(layer.rest(x, torch.zeros(1, 7, 1)), x + torch.nn.functional.silu(normed) * normed)


def test_a_config_that_asks_for_another_activation_is_not_exported(head):
    config = head.portable_config(torch.float32) | {"hidden_act": "gelu_pytorch_tanh"}
    found = faults(load_contract("vllm", "eagle3"), config, {})
    assert "config.json: hidden_act='gelu_pytorch_tanh' must be 'silu'" in found
