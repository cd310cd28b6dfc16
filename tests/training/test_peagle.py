"""P-EAGLE through the real trainer, on the toy language: the loss falls at every depth, the folder is served, and a
second run goes on from it."""

from __future__ import annotations

import json

import pytest
import torch

from headtrain.config import ConfigError, RecipeConfig
from headtrain.configcheck import validate
from headtrain.heads.base import load_head, new_head
from headtrain.target import TargetParts


@pytest.fixture
def parts(toy):
    class Config:
        hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim = toy.HIDDEN, 48, 4, 2, 8
        rms_norm_eps, max_position_embeddings, num_hidden_layers = 1e-5, 512, 4

    embedding, lm_head, _ = toy.language()
    rope = {"rope_theta": 1e4, "rope_type": "default"}
    return TargetParts(embedding, lm_head, torch.ones(toy.HIDDEN), Config, rope, set())


@pytest.fixture
def train(toy, parts, monkeypatch):
    """train(config, run): the training stage on a toy run; returns the log's lines."""
    from headtrain.training import trainer

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")  # so that what the trainer sets is taken back after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(trainer, "load_parts", lambda target: parts)
    monkeypatch.setattr(trainer, "leave", lambda: None)

    def run_it(config, run):
        toy.make_run(run)
        trainer.train(config, run)
        return [json.loads(line) for line in (run / "training" / "log.jsonl").read_text().splitlines()]

    return run_it


@pytest.fixture
def recipe(toy) -> RecipeConfig:
    made = toy.recipe(steps=60, lr=3e-3, log_every=2, position_keep=0.8)
    head = made.head
    head.type, head.layers, head.unroll, head.taps, head.draft_vocab = "peagle", 2, 3, [1, 2], 40
    return made


def test_training_lowers_the_loss_at_every_depth_and_the_head_is_loaded_and_continued(train, recipe, parts, tmp_path):
    recipe.head.train_embedding = True
    lines = [line for line in train(recipe, tmp_path / "first") if "loss_by_depth" in line]
    losses = torch.tensor([line["loss_by_depth"] for line in lines])
    first, last = losses[:5].mean(0), losses[-5:].mean(0)
    assert (last < 0.9 * first).all(), (first, last)
    head = load_head(tmp_path / "first" / "head", parts.embedding)
    assert not torch.equal(head.embed_tokens.weight, parts.embedding)
    assert (head.config.type, head.config.layers, head.config.mask_token) == ("peagle", 2, 47)

    recipe.head.init_from, recipe.head.layers, recipe.train.steps = str(tmp_path / "first" / "head"), None, 2
    again = [line for line in train(recipe, tmp_path / "second") if "loss_by_depth" in line]
    assert again[0]["loss_by_depth"][0] < 0.9 * float(first[0])


def test_the_later_layers_of_a_fresh_head_change_nothing_so_that_eagle3s_start_holds(recipe, parts, toy):
    from headtrain.training.batches import collate

    sample = collate([toy.row(n, 5, 20) for n in range(8)], list("abcdefgh"))
    counts = torch.bincount(sample.ids_N, minlength=toy.VOCAB)
    head = new_head(recipe, parts, counts, counts, sample)
    drafts = head.draft_all(sample, 3)
    assert len(head.layers) == 1
    head.layers.clear()
    assert torch.equal(head.draft_all(sample, 3), drafts)
    assert int((drafts >= 0).sum()) > 200


@pytest.mark.parametrize(("key", "value", "words"), [
    ("layers", 3, r"head\.layers=3: the parent .* has 2; set head\.layers=2"),
    ("train_embedding", True, "has no embedding of its own"),
    ("taps", [1], r"head\.taps=\[1\]: the parent"),
])  # fmt: skip
def test_a_recipe_that_does_not_fit_its_parent_is_refused(train, recipe, tmp_path, key, value, words):
    recipe.train.steps = 1
    train(recipe, tmp_path / "first")
    recipe.head.init_from = str(tmp_path / "first" / "head")
    setattr(recipe.head, key, value)
    with pytest.raises(ValueError, match=words):
        train(recipe, tmp_path / "second")


@pytest.mark.parametrize(("key", "value"), [("layers", 2), ("train_embedding", True), ("mask_token", 1)])
def test_keys_of_peagle_are_refused_for_other_heads(recipe, key, value):
    recipe.head.type, recipe.head.layers = "eagle3", None
    setattr(recipe.head, key, value)
    with pytest.raises(ConfigError, match=rf"head\.{key}.*heads of type eagle3 have no such setting \(only peagle\)"):
        validate(recipe)


def test_a_mask_token_that_the_target_does_not_have_is_refused(recipe, parts, toy):
    recipe.head.mask_token = toy.VOCAB
    with pytest.raises(ValueError, match=r"head\.mask_token=48: the target has 48 tokens"):
        new_head(recipe, parts, torch.ones(toy.VOCAB), torch.ones(toy.VOCAB), None)
