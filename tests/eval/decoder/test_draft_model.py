"""A small model as a drafter: its chain against its own plain decoding, its cache, and two vocabularies."""

from __future__ import annotations

import pytest
import torch

from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters import Drafting, News, make_drafter
from headtrain.eval.decoder.drafters.draft_model import ModelDrafter, vocabulary_tables
from headtrain.eval.decoder.sampling import Sampling, probabilities


class Tokens:
    """A tokenizer by its list of tokens."""

    eos_token_id = None

    def __init__(self, tokens):
        self.tokens = tokens

    def get_vocab(self):
        return {token: i for i, token in enumerate(self.tokens)}


@pytest.fixture(scope="module")
def pair(make):
    """A target and a smaller model with the same 97 tokens."""
    target, small = make[0]()[0], make[0](layers=1, seed=2)[0]
    target.tokenizer = small.tokenizer = Tokens([f"t{i}" for i in range(97)])
    return target, small


def news(rows, start=0):
    width = max(map(len, rows))
    tokens = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    return News(tokens, torch.tensor([len(r) for r in rows]), None, torch.zeros(len(rows), width, 4), rows)


def greedy(model, text, k):
    text = list(text)
    for _ in range(k):
        text.append(int(model.logits(model.forward(torch.tensor([text])).last_BLH[0, -1]).argmax()))
    return text[-k:]


def test_its_cache_follows_the_text_whatever_was_accepted_and_whoever_leaves(pair, prompts):
    """Random news: drafts accepted in part, in whole (with the next draft as bonus), texts that others drafted."""
    target, small = pair
    drafter = ModelDrafter(Sampling(), target, small)
    torch.manual_seed(0)
    texts = [list(p) for p in prompts]
    drafter.start(texts, 120)
    drafter.observe(news([[*p[1:], 9] for p in texts]))
    texts = [[*p, 9] for p in texts]
    kept = []
    for step in range(10):
        tree = drafter.propose(4) if step != 6 else None  # 6: the request decoded plainly for a step
        if tree is not None:
            assert tree.tokens.tolist() == [greedy(small, text, 4) for text in texts]
        if step in (3, 7):
            rows = torch.randperm(len(texts))[: len(texts) - 2]
            drafter.select(rows)
            texts = [texts[i] for i in rows]
            tree.tokens = tree.tokens[rows]
        drafts = [[]] * len(texts) if tree is None else tree.tokens.tolist()
        accepted, bonus = torch.randint(0, 5, (len(texts),)), torch.randint(6, 97, (len(texts),))
        told = [[*d[:n], int(b)] for d, n, b in zip(drafts, accepted, bonus, strict=True)]
        for new, d in zip(told, drafts, strict=True):
            if len(new) == 3:  # the bonus is what the next draft was
                new[-1] = d[2]
        if step == 5:
            told = [[11, 12, 13] for _ in texts]  # what another drafter proposed
        drafter.observe(news(told))
        texts = [text + new for text, new in zip(texts, told, strict=True)]
        kept.append(drafter._true)
    assert max(map(max, kept)) > 40 and len(texts) == 4


@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_output_is_the_targets_own_with_a_random_and_with_a_perfect_model(batch, pair, prompts):
    target, small = pair
    plain = [a.ids for a in decode(target, make_drafter("none"), prompts, k=0, max_new_tokens=20)]
    for model, perfect in ((small, False), (target, True)):
        drafter = make_drafter("draft_model", drafting=Drafting(draft_model=model), target=target)
        answers = decode(target, drafter, prompts, k=4, max_new_tokens=20, batch=batch)
        assert [a.ids for a in answers] == plain
        if perfect:
            assert all(step.accepted == step.drafted for a in answers for step in a.steps[:-1])


def test_a_drawn_token_comes_with_the_models_distribution(pair, prompts):
    target, small = pair
    sampling = Sampling(0.8, top_p=0.9, repetition_penalty=1.3)
    drafter = ModelDrafter(sampling, target, small)
    text = [*prompts[1], 11]
    drafter.start([text] * 3, 40)
    drafter.observe(news([text[1:]] * 3))
    tree = drafter.propose(3, torch.rand(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    for row in range(3):
        whole = [*text, *tree.tokens[row].tolist()]
        logits = small.logits(small.forward(torch.tensor([whole[:-1]])).last_BLH[0, len(text) - 1 :])
        for depth in range(3):
            seen = torch.zeros(97, dtype=torch.bool).index_fill(0, torch.tensor(whole[: len(text) + depth]), True)
            assert torch.allclose(tree.q[row, depth], probabilities(logits[depth], sampling, seen), atol=1e-5)
            assert tree.q[row, depth, tree.tokens[row, depth]] > 0


def test_drafting_stops_after_the_token_that_takes_confidence_below_the_threshold(pair, prompts):
    target, small = pair
    whole, sure = ModelDrafter(Sampling(), target, small), ModelDrafter(Sampling(), target, small, min_confidence=0.5)
    trees = []
    for drafter in (whole, sure):
        drafter.start(prompts, 64)
        drafter.observe(news([[*p[1:], 9] for p in prompts]))
        trees.append(drafter.propose(6))
    for row, prompt in enumerate(prompts):
        text, confidence, expected = [*prompt, 9], 1.0, 0
        while expected < 6 and confidence >= 0.5:
            p = small.logits(small.forward(torch.tensor([text])).last_BLH[0, -1]).softmax(-1)
            text, confidence, expected = [*text, int(p.argmax())], confidence * float(p.max()), expected + 1
        assert trees[1].counts[row] == expected
        assert trees[1].tokens[row, :expected].tolist() == trees[0].tokens[row, :expected].tolist()
    assert len(set(trees[1].counts.tolist())) > 1 and trees[0].counts.tolist() == [6] * 8


def test_a_model_with_fewer_positions_than_the_answer_drafts_on_and_a_longer_prompt_is_refused(make, prompts):
    target, small = make[0]()[0], make[0]("gpt2", layers=1, n_embd=64, n_head=4)[0]
    small.config.n_positions, small.backbone.wpe.weight.data = 24, small.backbone.wpe.weight.data[:24]
    target.tokenizer = small.tokenizer = Tokens([f"t{i}" for i in range(97)])
    drafter = ModelDrafter(Sampling(), target, small)
    plain = [a.ids for a in decode(target, make_drafter("none"), prompts[:4], k=0, max_new_tokens=20)]
    assert [a.ids for a in decode(target, drafter, prompts[:4], k=3, max_new_tokens=20)] == plain
    with pytest.raises(ValueError, match="tiny gpt2 reads 24 tokens; a prompt has 30"):
        drafter.start(prompts, 64)


# ------------------------------------------------------------------------------------------------- two vocabularies

def test_tokens_are_told_apart_by_their_strings_and_ids_may_differ(make, prompts):
    target, small = make[0]()[0], make[0](vocab=80, layers=1, seed=2)[0]
    target.tokenizer = Tokens([f"t{i}" for i in range(97)])
    small.tokenizer = Tokens([f"t{i + 9}" if i < 60 else f"own{i}" for i in range(80)])
    to_target, to_draft = vocabulary_tables(target, small)
    assert to_target.tolist() == [i + 9 if i < 60 else -1 for i in range(80)]
    assert to_draft.tolist() == [i - 9 if 9 <= i < 69 else 5 for i in range(97)]  # 5: the small model's end token
    drafter = make_drafter("draft_model", drafting=Drafting(draft_model=small), target=target)
    plain = [a.ids for a in decode(target, make_drafter("none"), prompts, k=0, max_new_tokens=20)]
    assert [a.ids for a in decode(target, drafter, prompts, k=3, max_new_tokens=20)] == plain

    drafter.start(prompts, 64)
    drafter.observe(news([[*p[1:], 20] for p in prompts]))
    tree = drafter.propose(5)
    counts = []
    for row, prompt in enumerate(prompts):
        own = greedy(small, to_draft[torch.tensor([*prompt, 20])].tolist(), 5)
        counts.append(next((i for i, token in enumerate(own) if to_target[token] < 0), 5))
        assert tree.tokens[row, : counts[-1]].tolist() == to_target[torch.tensor(own)][: counts[-1]].tolist()
    assert tree.counts.tolist() == counts and 0 < sum(counts) < 40


def test_rows_of_padding_that_no_token_stands_for_are_the_same_in_models_of_one_tokenizer(make, prompts):
    target = make[0]()[0]
    target.tokenizer = Tokens([f"t{i}" for i in range(60)])  # of 97 rows
    drafter = ModelDrafter(Sampling(), target, target)
    texts = [[*p, 9] for p in prompts]
    drafter.start([text[:-1] for text in texts], 120)
    drafter.observe(news([text[1:] for text in texts]))
    wanted = [greedy(target, text, 8) for text in texts]
    assert any(token >= 60 for row in wanted for token in row), "drafts of rows without a token"
    assert drafter.propose(8).tokens.tolist() == wanted


def test_a_model_with_another_vocabulary_is_refused_by_its_first_differing_token(pair, make):
    target, _ = pair
    small = make[0](layers=1)[0]
    small.tokenizer = Tokens([f"t{i}" if i < 40 else f"▁{i}" for i in range(97)])
    with pytest.raises(ValueError, match=r"only 40 of its 97 tokens .*id 40 is '▁40', the target's is 't40'"):
        ModelDrafter(Sampling(), target, small)


class Misstated(ModelDrafter):
    """Drafts the likeliest token, but says that it was drawn."""

    def propose(self, k, uniform_BK=None):
        return super().propose(k, torch.zeros_like(uniform_BK))


@pytest.mark.parametrize("kind, reduced", [(ModelDrafter, False), (ModelDrafter, True), (Misstated, False)])
def test_sampled_texts_follow_the_targets_distribution_and_would_not_with_a_wrong_q(kind, reduced, make):
    """4000 requests of one prompt, three tokens each, against the exact probabilities; with few tokens shared, too."""
    target, theirs = make[0](vocab=8, seed=1)
    small = make[0](vocab=8, layers=1, seed=2)[0]
    for model in (target.model, theirs, small.model):
        model.lm_head.weight.data.mul_(0.2)
    target.model.generation_config.eos_token_id = None
    target.tokenizer = Tokens([f"t{i}" for i in range(8)])
    small.tokenizer = Tokens([f"t{7 - i}" if i > 2 or not reduced else f"own{i}" for i in range(8)])
    sampling = Sampling(1.2, top_p=0.9)
    drafter = kind(sampling, target, small, min_confidence=0.2)
    prompt, n = [6, 7, 6, 7, 3, 6], 4000
    answers = decode(target, drafter, [prompt] * n, k=2, max_new_tokens=3, batch=2000, temperature=1.2, top_p=0.9)
    counts = torch.zeros(8, 8, 8)
    for answer in answers:
        counts[tuple(answer.ids)] += 1
    texts = torch.cartesian_prod(*[torch.arange(8)] * 2)
    logits = theirs(torch.cat([torch.tensor(prompt).expand(64, -1), texts], 1)).logits.detach()[:, -3:]
    p = probabilities(logits, sampling)
    expected = (p[:, 0].gather(1, texts[:, :1]) * p[:, 1].gather(1, texts[:, 1:]) * p[:, 2]).view(8, 8, 8)
    assert not counts[expected == 0].any()
    big = expected * n >= 5
    freedom, chi2 = int(big.sum()), float(((counts[big] - expected[big] * n) ** 2 / (expected[big] * n)).sum())
    assert freedom > 20 and (chi2 < freedom + 4 * (2 * freedom) ** 0.5) == (kind is ModelDrafter)
    assert sum(step.accepted for a in answers for step in a.steps) > 0.02 * n
