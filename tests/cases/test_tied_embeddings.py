"""Targets whose lm_head is the embedding: missing in the files, missing although not tied, and stored twice."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headtrain.config import TargetConfig
from headtrain.heads.base import load_head, save_head
from headtrain.target import Target, TargetError, load_parts

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def stored(tmp_path):
    """stored(tied, lm_head): a sharded folder of a tiny llama; lm_head: absent, same or other."""
    from tokenizers import Tokenizer, models

    def write(tied: bool, lm_head: str) -> TargetConfig:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            tie_word_embeddings=tied, eos_token_id=5,
        ))  # fmt: skip
        tensors = {name: t.clone() for name, t in model.state_dict().items() if name != HEAD}
        files = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
        save_file(tensors, tmp_path / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
        if lm_head != "absent":
            rows = tensors[EMBED] if lm_head == "same" else torch.randn(20, 16)
            save_file({HEAD: rows}, tmp_path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
            files[HEAD] = "model-00002-of-00002.safetensors"
        index = {"metadata": {"total_size": 1}, "weight_map": files}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        model.config.save_pretrained(tmp_path)
        words = Tokenizer(models.WordLevel({str(n): n for n in range(20)}, unk_token="3"))
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="5").save_pretrained(tmp_path)
        return TargetConfig(model=str(tmp_path), dtype="float32", device="cpu")

    return write


def test_a_tied_target_without_lm_head_in_its_files_teaches_with_its_embedding(stored, caplog):
    config = stored(True, "absent")
    parts, target = load_parts(config), Target.load(config)
    assert torch.equal(parts.lm_head, parts.embedding) and torch.equal(parts.lm_head, target.lm_head.weight)
    assert "ties lm_head" not in caplog.text


def test_the_head_of_a_tied_target_has_an_lm_head_of_its_own(make_head, tmp_path, parts):
    head = make_head([0, 3, 5, 7, 11, 19])
    save_head(head, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["tie_word_embeddings"] is False and (written["vocab_size"], written["draft_vocab_size"]) == (20, 6)
    assert load_head(tmp_path, parts.embedding).lm_head.weight.shape == (6, 16)


def test_a_missing_lm_head_that_is_not_tied_is_an_error_that_names_the_keys(stored):
    with pytest.raises(TargetError, match=(
        r"tie_word_embeddings is false but no lm_head.weight .*keys seen: model.embed_tokens.weight, "
        r"model.norm.weight.*set tie_word_embeddings=true"
    )):  # fmt: skip
        load_parts(stored(False, "absent"))
    with pytest.raises(TargetError, match=r"its files lack lm_head\.weight \(1 in all\)"):  # not a random one
        Target.load(stored(False, "absent"))


def test_a_tied_target_that_stores_another_lm_head_is_taught_by_that_with_a_warning(stored, caplog):
    config = stored(True, "other")
    parts, target = load_parts(config), Target.load(config)
    assert not torch.equal(parts.lm_head, parts.embedding)
    assert torch.equal(parts.embedding, target.embed.weight) and torch.equal(parts.lm_head, target.lm_head.weight)
    assert "ties lm_head to the embedding, but stores another one: that counts" in caplog.text


def test_a_tied_lm_head_that_is_stored_twice_alike_needs_no_word(stored, caplog):
    parts = load_parts(stored(True, "same"))
    assert torch.equal(parts.lm_head, parts.embedding) and "ties lm_head" not in caplog.text
