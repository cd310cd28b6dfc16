"""llama3 rope scaling of the target reaches the head: in training, after reload, and from the exported config."""

import json

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headtrain.config import HeadSection
from headtrain.export import export
from headtrain.heads.base import load_head, save_head
from headtrain.heads.eagle3 import Eagle3Head
from headtrain.target import TargetParts, head_rope

SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
EXPECTED = {
    0: 1.0, 10: 1.28687373e-01, 20: 1.65604401e-02, 28: 3.21144599e-03, 29: 2.16657076e-03, 31: 8.56751413e-04,
    34: 1.78507813e-04, 35: 9.55621235e-05, 50: 4.41153467e-06, 63: 3.06892599e-07,
}  # fmt: skip


@pytest.fixture(scope="module")
def head():
    """Narrow but for the head size, which the frequencies hang on."""
    target = AutoConfig.for_model(
        "llama", hidden_size=32, num_hidden_layers=32, num_attention_heads=2, num_key_value_heads=1, head_dim=128,
        intermediate_size=48, vocab_size=64, max_position_embeddings=131072,
        rope_theta=500000.0, rope_scaling=dict(SCALING),  # a copy: transformers changes it
    )  # fmt: skip
    embedding = torch.randn(64, 32)
    parts = TargetParts(embedding, embedding, torch.ones(32), target, head_rope(target), {0})
    head = Eagle3Head.fresh(HeadSection(draft_vocab="full"), parts)
    head.attach(embedding)
    return head


def check(inverse):
    assert inverse.dtype == torch.float32 and len(inverse) == 64
    for index, value in EXPECTED.items():
        assert float(inverse[index]) == pytest.approx(value, rel=1e-5), index


def test_the_frequencies_are_scaled_in_training_after_reload_and_for_engines(head, tmp_path):
    check(head._lent["inverse"])
    save_head(head, tmp_path / "head")
    check(load_head(tmp_path / "head")._lent["inverse"])
    exported = export(tmp_path / "head", "vllm", tmp_path / "out")
    check(load_head(exported)._lent["inverse"])
    for keys in ({"rope_theta", "rope_scaling"}, {"rope_parameters"}):  # how old and how new readers see it
        written = json.loads((exported / "config.json").read_text())
        written = {key: value for key, value in written.items() if not key.startswith("rope_") or key in keys}
        config = AutoConfig.for_model(written.pop("model_type"), **written)
        check(ROPE_INIT_FUNCTIONS["llama3"](config, device=None)[0])


def test_a_cast_of_the_head_leaves_the_frequencies_in_float32(head, tmp_path):
    save_head(head, tmp_path, torch.bfloat16)
    check(load_head(tmp_path, dtype=torch.bfloat16)._frozen("inverse"))


def test_the_exported_config_has_all_of_the_scaling(head):
    config = head.portable_config(torch.float32)
    assert config["rope_theta"] == 500000.0 and config["max_position_embeddings"] == 131072
    assert config["rope_scaling"] == SCALING and config["rope_parameters"] == SCALING | {"rope_theta": 500000.0}


def test_the_attention_turns_by_these_frequencies(head):
    """The angle between a query at position 9 and a key at 5 is 4 times each frequency."""
    c = head.config
    width = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    ones = torch.ones(2, width)
    q, k, _ = head._split(ones, torch.tensor([9, 5]))
    products = (q[0, 0, 0] * k[1, 0]).unflatten(0, (2, 64)).sum(0)
    torch.testing.assert_close(products, 2 * (4 * head._lent["inverse"]).cos(), atol=1e-5, rtol=1e-5)
