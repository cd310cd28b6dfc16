"""Toy tokenizers and a tiny target that the tests of this folder share."""

from __future__ import annotations

import json
import string

import pytest

TOY_TEMPLATE = (
    "{%- for m in messages -%}{{- '[' ~ m.role ~ ']\\n' ~ m.content ~ '[end]\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '[assistant]\\n' -}}{%- endif -%}"
)


def _tokenizer(vocabulary, split, template, eos=None, bos=None):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({token: n for n, token in enumerate(vocabulary)}, unk_token="[?]"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(split), "removed" if split == r"\s+" else "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[?]", eos_token=eos, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def char_tokenizer():
    """Makes a tokenizer with one token per character; the given special tokens are one token each."""

    def make(template=TOY_TEMPLATE, eos=None, bos=None):
        specials = [token for token in (eos, bos) if token]
        characters = [c for c in string.printable + "äö\u2028" if c not in "\x0b\x0c"]
        return _tokenizer(["[?]", *specials, *characters], r"[\s\S]", template, eos, bos)

    return make


@pytest.fixture(scope="session")
def word_tokenizer():
    """Makes a tokenizer with one token per word; newlines give no token."""

    def make(template=TOY_TEMPLATE.replace("content ~ '[end]", "content ~ ' [end]")):
        words = ["[?]", "[user]", "[assistant]", "[end]", "short", "answer"]
        words += [f"{letter}{n}" for letter in "wa" for n in range(60)]
        return _tokenizer(words, r"\s+", template)

    return make


@pytest.fixture
def write_jsonl(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, char_tokenizer):
    """A folder with a random llama of 4 blocks, hidden 64, and a character tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny-target")
    tokenizer = char_tokenizer(eos="[end]")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tiny_folder):
    from headtrain.config import TargetConfig
    from headtrain.target import Target

    return Target.load(TargetConfig(model=str(tiny_folder), dtype="float32", device="cpu"))


@pytest.fixture
def recipe(tiny_folder, tmp_path):
    """A recipe over the tiny target: 24 prompts, batches of a few rows, float32."""
    from headtrain.config import (
        CapturesConfig,
        DataConfig,
        PromptSource,
        RecipeConfig,
        ResponsesConfig,
        TargetConfig,
    )

    source = tmp_path / "questions.jsonl"
    texts = [f"{word} {'x' * (3 * n % 17)}?" for n, word in enumerate(string.ascii_lowercase[:24])]
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts]
    source.write_text("\n".join(lines), encoding="utf-8")
    return RecipeConfig(
        target=TargetConfig(model=str(tiny_folder), dtype="float32", device="cpu"),
        data=DataConfig(
            prompts=[PromptSource(str(source))], held_out=3, valid=2, max_length=256,
            responses=ResponsesConfig(max_new_tokens=20, batch_tokens=200), captures=CapturesConfig(dtype="float32"),
        ),
    )  # fmt: skip
