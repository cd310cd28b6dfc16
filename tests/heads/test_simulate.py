"""Simulated chain decoding against a literal decoder, and the metrics against worked numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headtrain.heads.simulate import accepted_chain, correct_prefix, spans, summarize


def literal_decoder(drafts_of_slot, choice_after, prompt: int, end: int, k: int) -> list[int]:
    """Decodes token by token. choice_after(i): the target's choice after token i; drafts_of_slot(p): the chain."""
    known = prompt + 1  # tokens of the document that are out, the first from the prefill
    accepted = []
    while known < end:
        room = end - known  # tokens still to emit, the bonus token among them
        proposed = drafts_of_slot(known - 2)[: min(k, room - 1)]
        right = 0
        for draft in proposed:
            if draft != choice_after(known - 1 + right):
                break
            right += 1
        known += right + 1
        accepted.append(right)
    return accepted


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_accepted_counts_equal_those_of_a_literal_decoder(data):
    k = data.draw(st.integers(1, 5))
    documents = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=4))
    n = sum(prompt + answer for prompt, answer in documents)
    numbers = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    argmax = torch.randint(3, (n,), generator=numbers)
    drafts = torch.randint(3, (n, k), generator=numbers)
    supervised, cu, expected = [], [0], []
    for prompt, answer in documents:
        start = cu[-1]
        supervised += [False] * prompt + [True] * answer
        cu.append(start + prompt + answer)
        expected += literal_decoder(
            lambda p, s=start: drafts[s + p].tolist(), lambda i, s=start: int(argmax[s + i]), prompt, prompt + answer, k
        )
    assert accepted_chain(drafts, argmax, torch.tensor(supervised), torch.tensor(cu), k) == expected


def test_the_first_step_starts_at_the_last_prompt_token():
    argmax = torch.tensor([9, 9, 5, 6, 7, 0])  # choice after tokens 0 … 5; prompt = tokens 0, 1
    drafts = torch.full((6, 2), -1)
    drafts[1] = torch.tensor([5, 6])  # after the first answer token (2) comes 5, after that 6
    supervised = torch.tensor([False, False, True, True, True, True])
    assert accepted_chain(drafts, argmax, supervised, torch.tensor([0, 6]), 2) == [2]


def test_each_answer_of_a_row_is_decoded_by_itself():
    supervised = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    assert spans(supervised, torch.tensor([0, 8])) == [(1, 3), (5, 8)]
    assert spans(torch.ones(6, dtype=torch.bool), torch.tensor([0, 2, 6])) == [(0, 2), (2, 6)]
    wrong = torch.full((8, 3), -1)
    assert accepted_chain(wrong, torch.zeros(8).long(), supervised, torch.tensor([0, 8]), 3) == [0, 0, 0]


def test_a_right_draft_after_a_wrong_one_does_not_count():
    argmax = torch.tensor([0, 1, 2, 3, 4])
    drafts = torch.tensor([[1, 9, 3]] * 5)
    assert correct_prefix(drafts, argmax).tolist() == [1, 0, 0, 0, 0]


def test_metrics_of_the_worked_example():
    found = summarize([4, 2, 0, 3, 1], k=4)
    assert (found.steps, found.accepted, found.tau) == (5, 10, 3.0)
    assert found.alpha == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_no_steps_is_plain_decoding():
    assert summarize([], k=2) == summarize(torch.tensor([]), k=2)
    assert summarize([], k=2).tau == 1.0
