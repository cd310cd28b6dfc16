"""Toy tokenizers, a tiny target and servers that speak for it, which the tests of this folder share."""

from __future__ import annotations

import importlib.util
import json
import string
from pathlib import Path
from types import SimpleNamespace

import pytest

from headtrain.data_gen import chat, prompts, respond, server
from headtrain.data_gen.store import ResponseStore
from headtrain.files import read_json

TAPS = (1, 2)  # of what servers answered

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


# ------------------------------------------------------------------------------------------------- servers

@pytest.fixture(scope="session")
def loopback():
    spec = importlib.util.spec_from_file_location("headtrain_loopback", Path(__file__).with_name("loopback.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def target(tiny_folder):
    """What the responses stage knows of a target whose weights are not loaded."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer, config = AutoTokenizer.from_pretrained(tiny_folder), AutoConfig.from_pretrained(tiny_folder)
    own = {"vocab_size": config.vocab_size, "eos_ids": {tokenizer.eos_token_id}}
    return SimpleNamespace(tokenizer=tokenizer, hidden_size=64, **own)


@pytest.fixture
def engines(loopback, target):
    """engines("vllm", "sglang", …): running servers of these dialects."""
    started = []

    def start(*dialects, **more):
        started.extend(loopback.Engine(d, target.vocab_size, 1, target.tokenizer, **more) for d in dialects)
        return started[-len(dialects) :]

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def served(recipe, monkeypatch):
    """The recipe, answered by servers that are retried without waiting."""
    monkeypatch.setattr(server, "FIRST_WAIT", 0.01)
    recipe.data.responses.backend, recipe.target.model = "server", "tiny"
    recipe.data.responses.concurrency, recipe.data.responses.timeout = 4, 10.0
    recipe.data.responses.patience = 5.0
    return recipe


class Run:
    """A responses stage in folders of its own."""

    def __init__(self, recipe, target, root, engines):
        self.recipe, self.target = recipe, target
        self.folders = [root / name for name in ("prompts", "responses", "captures")]
        self.responses = self.folders[1]
        recipe.data.responses.urls = [engine.url for engine in engines]
        if not self.folders[0].is_dir():
            prompts.gather(recipe, self.folders[0])

    def work(self):
        return respond.work(self.recipe, self.target, *self.folders, TAPS)

    def finish(self):
        respond.finish(self.recipe, *self.folders[1:])
        return read_json(self.responses / "manifest.json")

    def whole(self):
        self.work()
        return self.finish()

    def rows(self):
        store = ResponseStore(self.responses)
        return {row.id: (store.read(row).ids.tolist(), row.finish, row.first) for row in store.rows}

    def expected(self, loopback):
        """By the servers' rule, from the prompts alone."""
        found = {}
        for prompt in prompts.load(self.folders[0]):
            if prompt.split != "heldout":
                ids = chat.prompt_ids(self.target.tokenizer, prompt.messages)
                new, finish = loopback.answer(ids, 20, self.target.vocab_size, 1)
                found[prompt.id] = (ids + new, finish, len(ids))
        return found


@pytest.fixture
def run(served, target, tmp_path):
    return lambda *engines, root="run": Run(served, target, tmp_path / root, engines)
