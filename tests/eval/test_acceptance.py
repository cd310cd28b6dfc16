"""Metrics against numbers worked by hand and against one-line restatements of their definitions."""

from __future__ import annotations

import pytest

from headtrain.eval.acceptance import FORMULAS, difference_interval, metrics, tau_interval

# Chain of K = 4, five steps; the numbers are worked by hand.
ONE_PROMPT = [(4, accepted) for accepted in (4, 2, 0, 3, 1)]


def test_the_paired_interval_sees_a_small_but_steady_difference_that_separate_intervals_hide():
    theirs = [(20, accepted) for accepted in range(0, 60, 3)]  # prompts differ much
    ours = [(20, accepted + 4) for _, accepted in theirs]  # each is better by 0.2 tokens a step
    low, high = difference_interval(ours, theirs)
    assert 0.19 < low <= high < 0.21
    alone = [tau_interval([[(5, a / steps)] * steps for steps, a in rows]) for rows in (ours, theirs)]
    assert alone[0][0] < alone[1][1]
    low, high = difference_interval(theirs, ours)
    assert high < 0
    assert difference_interval([(0, 0)], [(3, 1)]) is None


def test_five_steps_of_a_chain_of_four():
    m = metrics([ONE_PROMPT], 4)
    assert (m["steps"], m["drafted"], m["accepted"]) == (5, 20, 10)
    assert m["draft_acceptance_rate"] == pytest.approx(0.5)
    assert m["tau"] == pytest.approx(3.0)
    assert m["alpha"] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert m["alpha_conditional"] == pytest.approx([0.8, 0.75, 2 / 3, 0.5])
    assert m["speculative_tokens"] == 15
    assert m["extra"]["tokens_per_call_with_prefill"] == pytest.approx(3.2)


def test_prompts_are_pooled_by_steps_and_the_mean_over_prompts_is_an_extra():
    long, short = [(4, 0)] * 9, [(4, 4)]
    m = metrics([long, short], 4)
    assert m["tau"] == pytest.approx(1 + 4 / 10)
    assert m["extra"]["tau_prompt_mean"] == pytest.approx((1 + 5) / 2)


def test_steps_that_drafted_nothing_still_count_as_steps():
    m = metrics([[(0, 0), (2, 1), (0, 0), (2, 2)]], 2)
    assert m["alpha"] == pytest.approx([0.5, 0.25]) and m["tau"] == pytest.approx(1.75)
    assert m["draft_acceptance_rate"] == pytest.approx(3 / 4)


def test_plain_decoding_has_a_tau_of_one_and_no_rates():
    m = metrics([[(0, 0)] * 7], 0)
    assert m["tau"] == 1 and m["alpha"] == [] and m["draft_acceptance_rate"] is None


def test_an_answer_without_steps_gives_no_numbers_instead_of_zeros():
    m = metrics([[]], 3)
    assert m["tau"] is None and m["alpha"] == [None] * 3 and tau_interval([[]]) is None


def test_a_position_never_reached_has_no_conditional_rate():
    assert metrics([[(3, 0), (3, 1)]], 3)["alpha_conditional"] == [0.5, 0.0, None]


def test_every_metric_that_is_reported_has_its_formula():
    m = metrics([ONE_PROMPT], 4)
    numbers = (m.keys() | m["extra"].keys()) - {"steps", "drafted", "accepted", "extra"}
    assert numbers == FORMULAS.keys()


def test_the_interval_holds_the_pooled_value_and_shrinks_with_more_prompts():
    prompts = [[(4, i % 5)] * (3 + i % 4) for i in range(40)]
    low, high = tau_interval(prompts)
    assert low < metrics(prompts, 4)["tau"] < high
    wide = tau_interval(prompts[:6])
    assert wide[1] - wide[0] > high - low
    assert tau_interval(prompts) == [low, high]  # the same every time
    assert tau_interval([[(4, 2)] * 5] * 9) == [3.0, 3.0]  # prompts that are all alike leave no doubt
