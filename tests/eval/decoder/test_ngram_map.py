"""The maps of n-grams against a scan of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headtrain.eval.decoder.drafters import Drafting, make_drafter
from headtrain.eval.decoder.drafters.ngram_map import Counted, Latest, NgramMapDrafter

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=50)


def places(tokens, n):
    """Where the continuation of every earlier occurrence of the last n tokens begins, in order."""
    return [i + n for i in range(len(tokens) - n) if tokens[i : i + n] == tokens[len(tokens) - n :]]


def record(kind, tokens, *settings):
    made = kind(tokens[0], *settings)
    made.extend(tokens[1 : len(tokens) // 2])
    made.extend(tokens[max(1, len(tokens) // 2) :])
    return made


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6))
def test_the_map_with_one_continuation_copies_from_the_latest_place_after_enough_hits(tokens, n, m, hits, k):
    expected, found = [], places(tokens, n) if len(tokens) > n else []
    if len(found) >= hits:
        text = list(tokens)
        for i in range(min(k, m)):
            text.append(text[found[-1] + i])
        expected = text[len(tokens) :]
    assert record(Latest, tokens, n, m, hits).continuation(k) == expected


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6))
def test_the_map_with_four_continuations_drafts_the_one_with_a_clear_majority(tokens, n, m, hits, k):
    counts = {}
    for start in places(tokens, n) if len(tokens) > n else []:
        value = tuple(tokens[start : start + m])
        if len(value) == m and (value in counts or len(counts) < 4):
            counts[value] = counts.get(value, 0) + 1
    expected = []
    if counts and sum(counts.values()) >= hits:
        best = max(counts, key=counts.get)
        if counts[best] >= 2 * (sum(counts.values()) - counts[best]):
            expected = list(best)[:k]
    assert record(Counted, tokens, n, m, hits).continuation(k) == expected


def test_a_fifth_continuation_of_a_key_is_not_kept():
    text = [x for value in (1, 2, 3, 4, 5, 5, 5, 5) for x in (9, value)] + [9]
    assert len(record(Counted, text, 1, 1, 1).values[9,]) == 4
    assert record(Counted, [9, 1, 9, 1, 9, 2, 9], 1, 1, 1).continuation(3) == [1]  # 2 against 1: twice as often
    assert record(Counted, [9, 1, 9, 2, 9, 2, 9, 1, 9], 1, 1, 1).continuation(3) == []  # even


def test_sizes_and_hits_come_from_the_settings():
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    for name in ("ngram-map-k", "ngram-map-k4v"):
        drafter = make_drafter(name, drafting=Drafting(ngram_n=2, ngram_m=3, ngram_hits=2))
        made = drafter.record(text[0])
        made.extend(text[1:7])
        assert made.continuation(8) == []  # 1 2 came once before
        made.extend(text[7:])
        assert made.continuation(8) == [3, 4, 5]
    assert make_drafter("ngram", drafting=Drafting(ngram_n=2)).record(1).lengths == range(2, 1, -1)
    with pytest.raises(ValueError, match="ngram-map-k: size n=0"):
        NgramMapDrafter("ngram-map-k", n=0)
