"""Families whose attention or layers differ: chains and trees as in transformers, or the family is refused by name."""

from __future__ import annotations

import pytest
import torch

from headtrain.attention import attention
from headtrain.cache import StateCache
from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters import make_drafter
from headtrain.target import TargetError

NEW = 16
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


@pytest.mark.parametrize("family, more", [
    ("qwen3", {}),
    ("gemma2", {"sliding_window": 8, "attn_logit_softcapping": 2.0}),
    ("gemma3_text", {"sliding_window": 8, "layer_types": MIXED}),
    ("mistral", {"sliding_window": 3}),  # narrower than the trees are deep
    ("phi3", {}),
    ("gpt_oss", EXPERTS | {"sliding_window": 8, "layer_types": MIXED}),
    ("llama4_text", EXPERTS | {"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"] * 2,
                               "layers": 4}),
])  # fmt: skip
def test_every_family_decodes_chains_and_trees_as_transformers_does(
    family, more, make, prompts, transformers_says, oracles
):
    build_target, build_head = make
    target, theirs = build_target(family, **more)
    expected = [transformers_says(theirs, prompt, NEW) for prompt in prompts]
    half_right = lambda token, depth: token if depth < 2 else (token + 1) % 97  # noqa: E731
    chain, tree = oracles
    for drafter, batch in (
        (make_drafter("head+ngram", build_head(target)), 5), (chain(prompts, expected), 8),
        (tree(prompts, expected), 8), (tree(prompts, expected), 1), (tree(prompts, expected, half_right), 8),
    ):  # fmt: skip
        assert [a.ids for a in decode(target, drafter, prompts, k=4, max_new_tokens=NEW, batch=batch)] == expected


@pytest.mark.parametrize("family, more", [
    ("qwen3_next", DELTA | {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
                            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    ("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
                   "mamba_chunk_size": 8}),
])  # fmt: skip
def test_running_states_go_back_after_a_rejection(family, more, make, prompts, transformers_says, oracles):
    target, theirs = make[0](family, **more)
    expected = [transformers_says(theirs, prompt, NEW) for prompt in prompts]
    chain, tree = oracles
    half_right = chain(prompts, expected, lambda token, depth: token if depth < 2 else (token + 1) % 97)
    for drafter, batch in ((make_drafter("ngram"), 8), (half_right, 8), (half_right, 1), (chain(prompts, expected), 5)):
        assert [a.ids for a in decode(target, drafter, prompts, k=4, max_new_tokens=NEW, batch=batch)] == expected
    with pytest.raises(TargetError, match=rf"tiny {family}.*with trees.*one running state.*use chains"):
        decode(target, tree(prompts, expected), prompts, k=4, max_new_tokens=NEW)


@pytest.mark.parametrize("family, more, reason", [
    ("minimax", {"num_local_experts": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
     "cache of its own"),
    # its step of one token is another function than its pass over a text
    ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 16,
                    "ssm_state_size": 8, "chunk_size": 8}, "off those of the same text"),
])  # fmt: skip
def test_a_family_whose_states_the_cache_cannot_keep_is_refused_by_name(family, more, reason, make):
    target, _ = make[0](family, **more)
    with pytest.raises(TargetError, match=rf"the {family} family cannot be decoded here with chains: .*{reason}"):
        decode(target, make_drafter("none"), [[7, 8]], k=0, max_new_tokens=4)


def test_a_family_that_ignores_the_mask_is_refused_by_name(make, monkeypatch):
    target, _ = make[0]()

    def causal(module, query, key, value, attention_mask, **more):
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
        return attention(module, query, key, value, mask[None, None], **more)

    from transformers import AttentionInterface

    monkeypatch.setitem(AttentionInterface._global_mapping, "headtrain", causal)
    with pytest.raises(TargetError, match="the llama family cannot be decoded here with chains: its logits"):
        decode(target, make_drafter("none"), [[7, 8]], k=0, max_new_tokens=4)


def test_a_snapshot_outlives_a_model_that_changes_a_state_in_place():
    cache = StateCache(1, 4)
    cache.update_recurrent_state(torch.zeros(1, 2), 0)
    before = cache.snapshot()
    cache.get_recurrent_state(0).add_(1)
    assert before["recurrent", 0, 0].tolist() == [[0, 0]]


def test_an_attention_argument_that_would_have_to_be_ignored_is_an_error():
    with pytest.raises(ValueError, match="passes 'position_bias'"):
        attention(torch.nn.Identity(), *[torch.zeros(1, 2, 3, 4)] * 3, None, position_bias=torch.zeros(1))
