"""rope_theta and rope_scaling against rope_parameters: one meaning, written both ways; contradictions are errors."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headtrain.config import HeadSection, TargetConfig
from headtrain.heads.eagle3 import Eagle3Head
from headtrain.target import TargetError, load_parts

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
INPUTS = {
    "A": {"rope_theta": 1000000, "rope_scaling": {"rope_type": "yarn", **YARN}},
    "B": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000, **YARN}},
    "C": {"rope_theta": 10000, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
    "D": {"rope_theta": 1000000, "rope_scaling": {"type": "yarn", **YARN}},
    "E": {},
}


@pytest.fixture
def parts_of(tmp_path):
    """parts_of(keys): what is read of a tiny llama whose config.json has these keys and no other about rope."""
    from tokenizers import Tokenizer, models

    def read(keys):
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8, "num_attention_heads": 2}
        LlamaForCausalLM(LlamaConfig(vocab_size=20, eos_token_id=5, **sizes)).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config = {key: value for key, value in config.items() if not key.startswith("rope_")}
        (tmp_path / "config.json").write_text(json.dumps(config | keys | {"max_position_embeddings": 131072}))
        words = Tokenizer(models.WordLevel({str(n): n for n in range(20)}, unk_token="3"))
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="5").save_pretrained(tmp_path)
        return load_parts(TargetConfig(model=str(tmp_path)))

    return read


def test_old_and_new_names_give_one_description_and_one_export(parts_of, caplog):
    parts = [parts_of(INPUTS[name]) for name in "ABD"]
    expected = {"rope_type": "yarn", "rope_theta": 1000000, **YARN}
    assert [p.rope for p in parts] == [expected] * 3
    heads = [Eagle3Head.fresh(HeadSection(draft_vocab="full"), p) for p in parts]
    configs = [head.portable_config(torch.float32) for head in heads]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0]["rope_theta"] == 1000000 and configs[0]["rope_parameters"] == expected
    assert configs[0]["rope_scaling"] == {"rope_type": "yarn", **YARN}
    assert torch.equal(heads[0]._lent["inverse"], heads[2]._lent["inverse"])
    assert "rope_theta" not in caplog.text


def test_two_values_for_one_key_are_an_error_that_shows_both(parts_of):
    with pytest.raises(TargetError, match=r"rope_theta=10000 and rope_parameters.rope_theta=1000000"):
        parts_of(INPUTS["C"])
    both = INPUTS["A"] | INPUTS["B"]
    both["rope_scaling"] = both["rope_scaling"] | {"factor": 2.0}
    with pytest.raises(TargetError, match=r"rope_scaling.factor=2.0 and rope_parameters.factor=4.0"):
        parts_of(both)


def test_a_default_is_only_taken_with_a_warning(parts_of, caplog):
    assert parts_of(INPUTS["E"]).rope == {"rope_theta": 10000.0, "rope_type": "default"}
    assert "config.json has no rope_theta: 10000 is taken, the default of family llama" in caplog.text


def test_what_a_kind_of_rope_has_of_the_targets_own_does_not_reach_engines(parts_of):
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    assert parts_of({"rope_parameters": partial}).rope == {"rope_theta": 10000.0, "rope_type": "default"}
    longrope = {"rope_type": "longrope", "rope_theta": 1e5, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    longrope |= {"original_max_position_embeddings": 4096, "factor": 32.0}
    assert parts_of({"rope_parameters": longrope}).rope == {"rope_theta": 1e5, "rope_type": "default"}
