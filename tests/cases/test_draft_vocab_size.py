"""Fewer tokens in the data than entries in the draft vocabulary, and sizes that make no sense."""

from dataclasses import replace

import pytest
import torch

from headtrain import configload
from headtrain.config import ConfigError
from headtrain.heads.base import Batch, new_head

SEEN = {2: 5, 9: 3, 17: 1}


@pytest.fixture
def made(recipe, parts, counts):
    """made(size): a fresh head whose responses hold nothing but SEEN."""

    def make(size):
        recipe.head.draft_vocab = size
        n = 12
        sample = Batch(
            ids_N=torch.arange(n), positions_N=torch.arange(n), cu_R1=torch.tensor([0, n]),
            supervised_N=torch.ones(n, dtype=torch.bool), taps_NAT=torch.randn(n, 3, 16), last_NT=torch.randn(n, 16),
            argmax_N=torch.arange(n), logsumexp_N=torch.zeros(n),
        )  # fmt: skip
        return new_head(recipe, replace(parts, eos_ids={2}), counts(SEEN), counts(SEEN), sample)

    return make


def test_a_draft_vocabulary_is_filled_up_with_the_lowest_unused_ids_and_says_so(made, caplog):
    head = made(8)
    assert head.t2d.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 9, 17]
    assert head.d2t.tolist() == [0, 0, 0, 0, 0, 0, 3, 10]
    assert head.to_target_ids(torch.arange(8)).tolist() == [0, 1, 2, 3, 4, 5, 9, 17]
    assert head.lm_head.weight.shape == (8, 16)
    assert "5 of 8 entries of the draft vocabulary never occur" in caplog.text


@pytest.mark.parametrize("size", [0, -1, 4.5, 21])
def test_a_size_outside_the_vocabulary_is_an_error_that_gives_the_range(made, size):
    with pytest.raises(ValueError, match=rf"draft_vocab_size={size}: give a whole number in 1\.\.20"):
        made(size)


@pytest.mark.parametrize("size", [0, -1, 4.5, 21])
def test_the_recipe_is_refused_before_anything_runs(size, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("target: {shape: {vocab: 20}}\n")
    with pytest.raises(ConfigError, match=rf"head\.draft_vocab={size}"):
        configload.load(str(path), [f"head.draft_vocab={size}"])


@pytest.mark.parametrize("size", [20, "full"])
def test_the_whole_vocabulary_needs_no_mapping_and_no_warning(made, size, caplog):
    head = made(size)
    assert head.t2d_or_none is None and not {"d2t", "t2d"} & set(head.portable_tensors())
    assert head.to_target_ids(torch.arange(20)).tolist() == list(range(20))
    assert "draft vocabulary" not in caplog.text
