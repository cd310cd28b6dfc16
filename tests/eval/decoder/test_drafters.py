"""What drafters propose: n-grams against a plain search, prompt lookup against transformers, the
head against its unroll, the mixture."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters import NAMES, Drafting, News, make_drafter
from headtrain.eval.decoder.drafters.ngram import History, NgramDrafter
from headtrain.eval.decoder.drafters.prompt_lookup import FirstOccurrences
from headtrain.eval.decoder.sampling import Sampling


def search(tokens, k, shortest=1, longest=3):
    """The n-gram drafter as a scan from the back, one token at a time."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                text = list(tokens)
                for i in range(k):
                    text.append(text[start + n + i])
                return text[len(tokens) :]
    return []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 2))
def test_the_ngram_drafter_equals_a_scan_for_the_latest_occurrence_of_the_longest_suffix(tokens, k, shortest):
    history = History(tokens[0], shortest, 3)
    history.extend(tokens[1 : len(tokens) // 2])
    history.extend(tokens[max(1, len(tokens) // 2) :])
    assert history.continuation(k) == search(tokens, k, shortest)


def test_the_ngram_drafter_prefers_the_longest_suffix_and_then_the_latest_place():
    history = History(1, 1, 3)
    history.extend([2, 3, 7, 9, 2, 3, 8, 5, 3, 6, 1, 2, 3])
    assert history.continuation(3) == [7, 9, 2]  # 1 2 3 -> 7; 2 3 alone would give 8, 3 alone 6
    history.extend([4, 2, 3])
    assert history.continuation(2) == [4, 2]  # 4 2 3 is new; the latest 2 3 was followed by 4


def test_the_ngram_drafter_continues_a_loop_beyond_the_end_of_the_text():
    history = History(5, 1, 3)
    history.extend([6, 5, 6, 5, 6])
    assert history.continuation(5) == [5, 6, 5, 6, 5]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 6), st.integers(1, 3))
def test_prompt_lookup_equals_transformers_candidates(tokens, k, longest):
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    theirs = PromptLookupCandidateGenerator(
        num_output_tokens=k, max_matching_ngram_size=longest, max_length=len(tokens) + 100
    )
    record = FirstOccurrences(tokens[0], longest)
    record.extend(tokens[1:])
    assert record.continuation(k) == theirs.get_candidates(torch.tensor([tokens]))[0][0, len(tokens) :].tolist()


FREE_OF_WEIGHTS = ["ngram", "ngram-map-k", "ngram-map-k4v", "prompt_lookup", "suffix"]


@pytest.fixture(scope="module")
def reference(tiny, prompts):
    """(prompts that repeat themselves, transformers' greedy continuations of them)."""
    repeating, out = [p + p for p in prompts], []
    for prompt in repeating:
        row = torch.tensor([prompt])
        options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
        out.append(tiny[1].generate(row, attention_mask=torch.ones_like(row), **options)[0, len(prompt) :].tolist())
    return repeating, out


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", FREE_OF_WEIGHTS)
def test_greedy_output_equals_transformers_generate(name, batch, target, reference):
    drafter = make_drafter(name, drafting=Drafting(ngram_n=2 if "map" in name else None, ngram_m=4))
    answers = decode(target, drafter, reference[0], k=4, max_new_tokens=32, batch=batch)
    assert [answer.ids for answer in answers] == reference[1]
    assert sum(step.accepted for answer in answers for step in answer.steps) > 0


@pytest.mark.parametrize("name", FREE_OF_WEIGHTS)
def test_what_is_copied_is_a_choice_and_not_a_draw(name):
    drafter = make_drafter(name, None, Sampling(0.8), Drafting(ngram_n=1))
    drafter.start([[1, 2], [3, 4]], 64)
    drafter.observe(news([[2, 9, 1, 2, 9, 1, 2, 9, 1, 2, 9, 1, 2], [4, 5]]))
    tree = drafter.propose(2, torch.zeros(2, 2))
    assert tree.q is None and tree.counts.tolist() == [2, 0] and tree.tokens[0].tolist() == [9, 1]


def news(rows):
    width = max(map(len, rows))
    tokens = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    return News(tokens, torch.tensor([len(r) for r in rows]), None, torch.zeros(len(rows), width, 4), rows)


def test_rows_without_a_match_propose_nothing_and_rows_can_leave():
    drafter = NgramDrafter(shortest=2)
    drafter.start([[1], [1], [4]], 64)
    drafter.observe(news([[2, 3, 4, 5], [2, 9, 1, 2], [4, 4, 4]]))
    tree = drafter.propose(3)
    assert tree.counts.tolist() == [0, 3, 3] and tree.tokens[1].tolist() == [9, 1, 2]
    drafter.select(torch.tensor([0, 2]))
    assert drafter.propose(2).counts.tolist() == [0, 2]
    drafter.select(torch.tensor([0]))
    assert drafter.propose(2).tokens.shape == (1, 0)


# ------------------------------------------------------------------------------------------------- the head

def feed(target, drafter, text, copies=1):
    """Gives the drafter a whole text at once, in so many rows; returns the target's states of it."""
    states = target.forward(torch.tensor([text[:-1]] * copies), taps=drafter.taps)
    drafter.start([text] * copies, len(text) + 8)
    counts = torch.full((copies,), len(text) - 1)
    known = [text[1:]] * copies
    drafter.observe(News(torch.tensor(known), counts, states.taps_BLAH, states.last_BLH, known))
    return states


def test_the_head_drafts_the_chain_that_its_training_unroll_drafts(target, head, prompts):
    from headtrain.heads.base import Batch

    text = prompts[4]
    drafter = make_drafter("head", head)
    states = feed(target, drafter, text)
    n = len(text)
    pad = lambda x: torch.cat([x[0], torch.zeros_like(x[0, :1])])  # noqa: E731
    supervised = torch.arange(n) > 2
    batch = Batch(
        torch.tensor(text), torch.arange(n), torch.tensor([0, n], dtype=torch.int32), supervised, pad(states.taps_BLAH),
        pad(states.last_BLH), torch.zeros(n, dtype=torch.long), torch.zeros(n),
    )  # fmt: skip
    trained = head.draft_all(batch, 3)
    for slot in (3, 11, n - 3):  # the chain from slot p knows the tokens up to p + 1
        feed(target, drafter, text[: slot + 2])
        assert drafter.propose(3).tokens[0].tolist() == trained[slot].tolist()


def test_a_sampled_draft_comes_with_the_distribution_it_was_drawn_from(target, head, prompts):
    drafter = make_drafter("head", head, Sampling(0.8, top_p=0.9))
    n = 2000
    feed(target, drafter, prompts[4], copies=n)
    uniform = torch.rand(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tree = drafter.propose(3, uniform)
    assert tree.q.shape == (n, 3, target.vocab_size) and torch.allclose(tree.q.sum(-1), torch.ones(n, 3))
    assert not tree.q[:, :, ~head.t2d].any()  # nothing outside the draft vocab
    assert (tree.q.gather(2, tree.tokens[..., None]) > 0).all()
    first = torch.bincount(tree.tokens[:, 0], minlength=target.vocab_size) / n
    assert (first - tree.q[0, 0]).abs().max() < 0.04


# ------------------------------------------------------------------------------------------------- the mixture

def test_the_mixture_copies_where_it_can_and_drafts_elsewhere(target, head):
    sampling, uniform = Sampling(0.8), torch.full((2, 3), 0.4, dtype=torch.float64)
    texts = [[7, 8, 9, 30, 7, 8, 9], [11, 12, 13, 14, 15, 16, 17]]
    states = target.forward(torch.tensor(texts)[:, :-1], taps=(1, 2, 3))
    told = News(
        torch.tensor(texts)[:, 1:], torch.tensor([6, 6]), states.taps_BLAH, states.last_BLH, [t[1:] for t in texts]
    )
    trees = {}
    for name in ("head", "head+ngram"):
        drafter = make_drafter(name, head, sampling)
        drafter.start(texts, 32)
        drafter.observe(told)
        trees[name] = drafter.propose(3, uniform)
    mixed, alone = trees["head+ngram"], trees["head"]
    assert mixed.tokens[0].tolist() == [30, 7, 8] and mixed.tokens[1].tolist() == alone.tokens[1].tolist()
    assert torch.equal(mixed.q[0], torch.nn.functional.one_hot(mixed.tokens[0], target.vocab_size).float())
    assert torch.equal(mixed.q[1], alone.q[1])


def test_drafters_are_made_by_name_and_what_is_missing_is_said(head, target, monkeypatch):
    monkeypatch.setattr(type(target.tokenizer), "get_vocab", lambda self: {"a": 0}, raising=False)
    drafting = Drafting(draft_model=target, skip_from=1)
    assert [make_drafter(name, head, None, drafting, target).name for name in NAMES] == list(NAMES)
    with pytest.raises(ValueError, match=r"unknown; known drafters: none, ngram, ngram-map-k, .*head\+ngram"):
        make_drafter("eagle")
    with pytest.raises(ValueError, match="needs a trained head"):
        make_drafter("head+ngram")
    with pytest.raises(ValueError, match="needs the target and skip_from"):
        make_drafter("layer_skip", target=target)
    with pytest.raises(ValueError, match="needs the target and draft_model"):
        make_drafter("draft_model", target=target)
    with pytest.raises(ValueError, match="tree 'wide'"):
        make_drafter("head", head, drafting=Drafting(tree="wide"))
    assert make_drafter("head", head, drafting=Drafting(tree="2x6")).nodes(3) == 6
    assert make_drafter("head+ngram", head, drafting=Drafting(ngram_n=4)).copier.longest == 4
    with pytest.raises(ValueError, match="n-gram lengths"):
        NgramDrafter(4, 3)
