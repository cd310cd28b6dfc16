"""The tiny targets of smoke runs."""

from __future__ import annotations

import pytest

from headtrain import configload, smoke
from headtrain.config import ConfigError


def test_the_tokenizer_gives_every_byte_and_special_token_its_own_id_and_reads_back_any_text():
    tokenizer = smoke.byte_tokenizer()
    text = "héllo\n\t🙂 \x00 <|turn|>user"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.convert_tokens_to_ids("<|turn|>")) == 1
    assert [tokenizer.convert_tokens_to_ids(token) for token in smoke.SPECIAL] == [256, 257, 258]
    assert tokenizer.eos_token == "<|end|>" and len(tokenizer) == 259


def test_the_template_only_appends():
    tokenizer = smoke.byte_tokenizer()
    first = [{"role": "user", "content": "a"}]
    prompt = tokenizer.apply_chat_template(first, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([*first, {"role": "assistant", "content": "b"}], tokenize=False)
    assert whole == f"{prompt}b<|end|>\n"


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "phi3"])
def test_a_target_of_any_family_is_built_and_loads(family, tmp_path):
    from headtrain.target import Target

    config = smoke.shrink(configload.load_overrides([f"target.family={family}", f"run_dir={tmp_path}", "smoke=true"]))
    smoke.build_target(config, tmp_path / "target" / f"tiny-random-{family}")
    target = Target.load(config.target)
    assert target.model.config.get_text_config().model_type == family
    assert (target.num_layers, target.hidden_size) == (8, 64)
    assert target.tokenizer.eos_token_id in target.eos_ids


def test_a_smoke_run_needs_a_family():
    with pytest.raises(ConfigError, match=r"target\.family"):
        smoke.shrink(configload.load_overrides(["smoke=true"]))


def test_an_unknown_family_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"target.family=lama"):
        smoke.model_config("lama", smoke.SHAPE)


def test_the_recipe_itself_is_left_as_it_was():
    config = configload.load("eagle3_llama70b", ["smoke=true"])
    before = configload.to_yaml(config)
    small = smoke.shrink(config)
    assert configload.to_yaml(config) == before
    assert small.head.type == config.head.type and small.export == config.export and small.train.lr == config.train.lr


def test_a_smoke_run_passes_the_checks_of_an_ordinary_one():
    for name in configload.recipe_names():
        configload.validate(smoke.shrink(configload.load(name, ["smoke=true"])))
