"""Suffix automata and their drafts against scans of the texts; what is remembered, and how much."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headtrain.eval.decoder.drafters import News, suffix
from headtrain.eval.decoder.drafters.suffix import GAP, Answers, Automaton, SuffixDrafter, Text

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def ends(text, piece):
    return frozenset(i + len(piece) for i in range(len(text) - len(piece) + 1) if text[i : i + len(piece)] == piece)


def followers(text, piece):
    """Tokens after a piece, each as often as it came, in the order in which they first came."""
    return [text[end] for end in sorted(ends(text, piece)) if end < len(text)]


def draft(text, context, k):
    """(tokens expected to be accepted, tokens) by counting what followed the longest suffix that anything followed."""
    chance, expected, tokens = 1.0, 0.0, []
    while len(tokens) < k:
        while context and not followers(text, context):
            context = context[1:]
        if not context:
            break
        found = followers(text, context)
        best = max(dict.fromkeys(found), key=lambda token: (found.count(token), found.index(token)))
        chance *= found.count(best) / len(found)
        if chance < suffix.LEAST or best == GAP:
            break
        expected += chance
        tokens.append(best)
        context = [*context, best]
    return expected, tokens


def best(text, pattern, k):
    """The best draft over all suffixes of the pattern that something followed; equal ones: the longest's."""
    expected, tokens, classes = 0.0, [], []
    for length in range(len(pattern), 0, -1):
        piece = pattern[len(pattern) - length :]
        if not followers(text, piece):
            continue
        if ends(text, piece) not in classes:
            classes.append(ends(text, piece))
        if len(classes) > suffix.CHAIN:
            break
        found = draft(text, piece, min(k, length))
        if found[0] > expected:
            expected, tokens = found
    return pytest.approx(expected), tokens


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_the_automaton_has_every_substring_with_its_number_of_places(text):
    automaton = Automaton()
    for token in text:
        automaton.add(token)
    assert len(automaton.link) <= 2 * len(text) + 1
    for start in range(len(text)):
        state = 0
        for end in range(start + 1, len(text) + 1):
            state = automaton.next[state][text[end - 1]]
            assert automaton.count[state] == len(ends(text, text[start:end]))
            assert automaton.length[automaton.link[state]] < end - start <= automaton.length[state]


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 8))
def test_a_request_drafts_what_most_often_followed_the_end_of_its_text(text, k):
    made = Text(text[0], Answers())
    made.extend(text[1:])
    own = made.own.link[made.own.last]
    assert made.own.best(own, made.own.length[own], k) == best(text, text, k)
    assert made.continuation(k) == best(text, text, k)[1]


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=3), TEXTS, st.integers(0, 40), st.integers(1, 8))
def test_earlier_answers_are_searched_too_also_those_that_come_while_a_request_runs(texts, text, at, k):
    answers = Answers()
    made = Text(text[0], answers)
    made.extend(text[1 : max(1, at)])
    for earlier in texts:
        answers.add(earlier)
    made.extend(text[max(1, at) :])
    joined = [token for earlier in texts for token in (*earlier, GAP)]
    known = answers.automaton.best(made.state, made.length, k)
    assert known == best(joined, text, k)
    assert made.length == next((n for n in range(len(text), 0, -1) if ends(joined, text[len(text) - n :])), 0)


def news(rows):
    width = max(map(len, rows))
    tokens = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    return News(tokens, torch.tensor([len(r) for r in rows]), None, torch.zeros(len(rows), width, 4), rows)


def test_answers_of_requests_that_left_help_the_others_and_the_next_batch():
    drafter = SuffixDrafter()
    drafter.start([[1, 2], [3]], 64)
    drafter.observe(news([[2, 7, 8, 9, 10], [4]]))
    drafter.select(torch.tensor([1]))  # 7 8 9 10 was the first one's answer; 1 2 was its prompt
    drafter.observe(news([[7, 8]]))
    assert drafter.propose(4).tokens.tolist() == [[9, 10]]  # no longer than the suffix 7 8
    drafter.start([[5, 8, 9], [1, 1]], 64)
    drafter.observe(news([[8, 9], [1]]))
    tree = drafter.propose(3)
    assert tree.tokens[0, :1].tolist() == [10] and tree.counts.tolist() == [1, 1]
    assert SuffixDrafter()._answers.tokens == 0  # each drafter has a memory of its own


def test_the_memory_is_bounded_and_keeps_the_latest_answers(monkeypatch):
    monkeypatch.setattr(suffix, "LIMIT", 100)
    answers = Answers()
    waiting = Text(500, answers)
    for n in range(60):
        answers.add([n, n + 100, n + 200])
        assert answers.tokens <= 100 and len(answers.automaton.link) <= 2 * (100 + len(answers.texts)) + 1
    waiting.extend([58, 158])
    assert waiting.continuation(2) == [258]
    waiting.extend([1, 101])
    assert waiting.continuation(2) == []  # forgotten
