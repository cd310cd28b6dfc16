"""The closed-form start: it copies repeated text, and regression finds what the features say, before any training."""

import pytest
import torch

from headtrain.config import RecipeConfig
from headtrain.heads import calibrate
from headtrain.heads.base import Batch, new_head
from headtrain.heads.calibrate import orthogonal, ridge
from headtrain.target import TargetParts

V, T = 300, 128


class Config:
    hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim = T, 96, 4, 2, 32
    rms_norm_eps, max_position_embeddings, num_hidden_layers = 1e-5, 512, 8


def parts(tied: bool) -> TargetParts:
    g = torch.Generator().manual_seed(0)
    embedding = torch.randn(V, T, generator=g)
    lm_head = embedding if tied else embedding @ torch.randn(T, T, generator=g)
    return TargetParts(embedding, lm_head, torch.ones(T), Config, {"rope_theta": 1e6, "rope_type": "default"}, {0})


def repeating_text(embedding, seed=1, length=60, rows=20) -> Batch:
    """Rows of random tokens, said twice; the lowest tap holds the current token, the others noise of another size."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randint(1, V, (length // 2,), generator=g).repeat(2) for _ in range(rows)])
    n = len(ids)
    taps = torch.randn(n, 3, T, generator=g) * torch.tensor([0.1, 1.0, 50.0])[:, None]
    taps[:, 0] += embedding[ids]
    return Batch(
        ids_N=ids, positions_N=torch.arange(length).repeat(rows), cu_R1=torch.arange(0, n + 1, length),
        supervised_N=torch.arange(length).repeat(rows) > 2, taps_NAT=taps, last_NT=torch.randn(n, T, generator=g),
        argmax_N=ids.roll(-1), logsumexp_N=torch.zeros(n),
    )  # fmt: skip


def second_half_hits(start: str, tied: bool) -> float:
    """Share of the slots whose first draft is the token that followed the same token half a row earlier."""
    recipe, p = RecipeConfig(), parts(tied)
    recipe.head.start, recipe.head.draft_vocab, recipe.head.unroll = start, "full", 2
    counts = torch.ones(V, dtype=torch.long)
    head = new_head(recipe, p, counts, counts, repeating_text(p.embedding))
    fresh = repeating_text(p.embedding, seed=2)
    drafts = head.draft_all(fresh, 1)[:, 0]
    index = torch.arange(len(drafts))
    slots = index[(index % 60 >= 32) & (index % 60 < 57)]
    return float((drafts[slots] == fresh.ids_N[slots + 2]).float().mean())


@pytest.mark.parametrize("tied", [True, False])
def test_a_calibrated_head_continues_repeated_text_and_a_random_one_does_not(tied):
    assert second_half_hits("calibrated", tied) > 0.5
    assert second_half_hits("random", tied) < 0.1


def test_a_calibrated_head_knows_what_follows_the_token_read_even_from_features_that_say_nothing(monkeypatch):
    monkeypatch.setattr(calibrate, "COPY", 0.0)  # copying without a match adds noise
    g = torch.Generator().manual_seed(0)
    follower = torch.randperm(40, generator=g)  # text: each of 40 tokens is always followed by the same one
    recipe, p = RecipeConfig(), parts(tied=False)
    recipe.head.draft_vocab, recipe.head.unroll = "full", 2

    def chain(seed):
        batch = repeating_text(p.embedding, seed)
        batch.ids_N = batch.ids_N % 40
        for i in (i for i in range(len(batch.ids_N)) if i % 60):
            batch.ids_N[i] = follower[batch.ids_N[i - 1]]
        batch.taps_NAT, batch.argmax_N = torch.randn(batch.taps_NAT.shape, generator=g), batch.ids_N.roll(-1)
        return batch

    counts, fresh = torch.ones(V, dtype=torch.long), chain(2)
    head = new_head(recipe, p, counts, counts, chain(1))
    drafts = head.draft_all(fresh, 1)[:, 0]
    slots = [i for i in range(len(drafts)) if 2 < i % 60 < 8]  # before anything repeats
    assert float((drafts[slots] == fresh.ids_N[torch.tensor(slots) + 2]).float().mean()) > 0.8


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (2, 2), (8, 8), (6, 2), (4, 1)])
def test_any_number_of_heads_and_key_heads_gets_a_start_of_finite_numbers(heads, key_heads):
    recipe, p = RecipeConfig(), parts(tied=True)
    recipe.head.draft_vocab, recipe.head.heads, recipe.head.kv_heads = "full", heads, key_heads
    counts, sample = torch.ones(V, dtype=torch.long), repeating_text(p.embedding)
    head = new_head(recipe, p, counts, counts, sample)
    assert all(bool(tensor.isfinite().all()) for tensor in head.parameters())
    assert bool(head(sample).loss.isfinite())


def test_ridge_regression_finds_a_linear_map():
    g = torch.Generator().manual_seed(0)
    x, true = torch.randn(500, 6, generator=g), torch.randn(6, 4, generator=g)
    assert torch.allclose(ridge(x, x @ true), true, atol=0.05)


@pytest.mark.parametrize("rows", [3, 8, 20])
def test_orthogonal_rows_are_orthogonal_within_a_block(rows):
    made = orthogonal(rows, 8, torch.Generator().manual_seed(0))
    assert made.shape == (rows, 8)
    for block in made.split(8):
        assert torch.allclose(block @ block.T, torch.eye(len(block)), atol=1e-5)
