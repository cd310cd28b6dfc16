"""Five verification steps of a chain with K = 4 that accept 4, 2, 0, 3 and 1 draft tokens: every metric by hand."""

import pytest

from headtrain.eval.acceptance import FORMULAS, metrics

K, ACCEPTED = 4, [4, 2, 0, 3, 1]


@pytest.fixture(scope="module")
def told():
    return metrics([[(K, accepted) for accepted in ACCEPTED]], K)


def test_the_headline_counts_the_bonus_token_once_and_says_so(told):
    assert (told["steps"], told["drafted"], told["accepted"]) == (5, 20, 10)
    assert told["tau"] == 3.0  # neither 2.0, without the bonus, nor 4.0, with it twice
    assert FORMULAS["tau"].startswith("1 + accepted / steps")


def test_rates_per_position_are_unconditional_and_conditional(told):
    assert told["draft_acceptance_rate"] == 0.5
    assert told["alpha"] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert told["alpha_conditional"] == pytest.approx([0.8, 0.75, 2 / 3, 0.5])


def test_what_a_server_counts_with_the_prefills_token_is_an_extra(told):
    assert told["speculative_tokens"] == 15
    assert told["extra"]["tokens_per_call_with_prefill"] == pytest.approx(16 / 5)


def test_over_prompts_steps_are_summed_and_the_mean_of_prompts_is_labelled():
    split = metrics([[(K, 4), (K, 2), (K, 0), (K, 3)], [(K, 1)]], K)  # the same steps in two prompts
    assert split["tau"] == 3.0
    assert split["extra"]["tau_prompt_mean"] == pytest.approx((1 + 9 / 4 + 2) / 2)
