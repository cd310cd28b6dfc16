"""Logits to distributions, against the classes that transformers' own generation puts them through."""

from __future__ import annotations

import pytest
import torch
import transformers

from headtrain.eval.decoder.sampling import Sampling, adjust, draw, probabilities

V = 40
TEXT = torch.tensor([[3, 3, 7], [0, 1, 2], [39, 5, 5], [8, 9, 10], [1, 1, 1], [30, 20, 10]])
BIAS = {3: 2.5, 0: -4.0, 39: float("-inf"), 17: 0.5}
WARPED = [
    Sampling(0.7), Sampling(1.3, 0.8), Sampling(1.0, top_k=5), Sampling(0.6, 0.9, 7), Sampling(1.1, min_p=0.2),
    Sampling(0.8, 0.9, 12, 0.1), Sampling(1.0, repetition_penalty=1.4), Sampling(0.9, 0.7, logit_bias=BIAS),
    Sampling(0.9, 0.8, 15, 0.05, 0.7, BIAS),
]  # fmt: skip


@pytest.fixture
def logits():
    return torch.randn(6, V, generator=torch.Generator().manual_seed(2)) * 2


@pytest.fixture
def seen():
    return torch.zeros(6, V, dtype=torch.bool).scatter(1, TEXT, True)


def transformers_processors(s):
    """In the order in which `generate` applies them."""
    biases = [[[token], bias] for token, bias in (s.logit_bias or {}).items()]
    return transformers.LogitsProcessorList([
        *([transformers.SequenceBiasLogitsProcessor(biases)] if biases else []),
        transformers.RepetitionPenaltyLogitsProcessor(s.repetition_penalty),
        *([] if s.greedy else [transformers.TemperatureLogitsWarper(s.temperature)]),
        *([transformers.TopKLogitsWarper(s.top_k)] if s.top_k else []),
        transformers.TopPLogitsWarper(s.top_p),
        transformers.MinPLogitsWarper(s.min_p),
    ])  # fmt: skip


@pytest.mark.parametrize("sampling", WARPED)
def test_probabilities_equal_those_of_transformers_generation(sampling, logits, seen):
    expected = transformers_processors(sampling)(TEXT, logits.clone()).softmax(-1)
    torch.testing.assert_close(probabilities(logits, sampling, seen), expected, atol=1e-6, rtol=1e-5)


def test_greedy_decoding_takes_the_argmax_of_transformers_own_adjusted_logits(logits, seen):
    sampling = Sampling(repetition_penalty=1.8, logit_bias=BIAS)
    expected = transformers_processors(sampling)(TEXT, logits.clone())
    assert not torch.equal(expected.argmax(-1), logits.argmax(-1))
    torch.testing.assert_close(adjust(logits, sampling, seen), expected)


def test_the_order_is_that_of_transformers_own_generation(tiny, prompts):
    """Whole texts: a loop over `adjust` against `generate`, with a bias and a penalty strong enough to change them."""
    model, prompt = tiny[1], torch.tensor([prompts[1]])
    sampling, more = Sampling(repetition_penalty=1.5, logit_bias={9: 6.0, 40: -6.0}), {"max_new_tokens": 12}
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt), **more}
    expected = model.generate(
        prompt, repetition_penalty=1.5, sequence_bias=[[[9], 6.0], [[40], -6.0]], **options
    )
    assert not torch.equal(expected, model.generate(prompt, **options))
    ids = prompt
    with torch.no_grad():
        while ids.shape[1] < expected.shape[1]:
            last = model(ids).logits[:, -1]
            seen = torch.zeros_like(last, dtype=torch.bool).scatter(1, ids, True)
            ids = torch.cat([ids, adjust(last, sampling, seen).argmax(-1, keepdim=True)], 1)
    assert torch.equal(ids, expected)


def test_a_draft_vocab_gets_its_columns_of_the_bias_and_of_the_seen_tokens(logits, seen):
    ids = torch.tensor([0, 3, 5, 8, 17, 38])
    for bias in (BIAS, {3: 1.0}):  # the vocabulary goes on after the last biased token, too
        sampling = Sampling(1.0, repetition_penalty=1.3, logit_bias=bias)
        whole = adjust(logits, sampling, seen)[:, ids]
        torch.testing.assert_close(adjust(logits[:, ids], sampling, seen, ids), whole)
        torch.testing.assert_close(probabilities(logits[:, ids], sampling, seen, ids), whole.softmax(-1))


def test_adjust_leaves_its_input_alone_and_works_on_any_leading_shape(logits, seen):
    before, sampling = logits.clone(), Sampling(repetition_penalty=2.0, logit_bias=BIAS)
    flat = adjust(logits, sampling, seen)
    assert torch.equal(logits, before)
    assert torch.equal(adjust(logits.view(2, 3, V), sampling, seen.view(2, 3, V)).view(6, V), flat)
    assert adjust(logits.bfloat16(), Sampling()).dtype == torch.float32


def test_draw_inverts_the_cumulated_weights_and_never_gives_a_token_without_weight():
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 1.0], dtype=torch.float64)
    assert draw(weights.expand(6, -1), uniform).tolist() == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("wrong", [
    {"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": 1.1}, {"min_p": -0.1},
    {"repetition_penalty": 0}, {"logit_bias": {-1: 1.0}}, {"logit_bias": {4: float("nan")}},
    {"logit_bias": {4: float("inf")}},
])  # fmt: skip
def test_impossible_sampling_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_a_biased_token_that_the_vocabulary_lacks_is_named(logits):
    with pytest.raises(ValueError, match="token 40, but the vocabulary ends at 39"):
        adjust(logits, Sampling(logit_bias={40: 1.0}))
