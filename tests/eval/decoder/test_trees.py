"""Trees in the decoding loop: the same tokens as without, whatever the tree; budgets, ends, states, sampling."""

from __future__ import annotations

import pytest
import torch

from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters import Drafter, make_drafter
from headtrain.eval.decoder.layout import lay_out, seen_tokens
from headtrain.tree import DraftTree

NEW = 30


@pytest.fixture(scope="module")
def reference(tiny, prompts, transformers_says):
    return [transformers_says(tiny[1], prompt, NEW) for prompt in prompts]


@pytest.fixture(scope="module")
def tree_oracle(oracles):
    return oracles[1]


# ------------------------------------------------------------------------------------------------- identity

@pytest.mark.parametrize("batch", [1, 8])
def test_a_perfect_tree_has_its_whole_depth_accepted(batch, target, prompts, reference, tree_oracle):
    answers = decode(target, tree_oracle(prompts, reference), prompts, k=4, max_new_tokens=NEW, batch=batch)
    assert [a.ids for a in answers] == reference
    for answer in answers:
        emitted = [step.accepted + 1 for step in answer.steps]
        assert emitted[:-1] == [5] * (len(emitted) - 1) and 1 + sum(emitted) == len(answer.ids)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("wrong", [(0, 1, 2, 3), (1,), (2, 3)])
def test_wrong_nodes_cost_steps_and_nothing_else(wrong, batch, target, prompts, reference, tree_oracle):
    spoilt = tree_oracle(prompts, reference, lambda token, depth: (token + 1) % 97 if depth in wrong else token)
    answers = decode(target, spoilt, prompts, k=4, max_new_tokens=NEW, batch=batch)
    assert [a.ids for a in answers] == reference
    assert {step.accepted for a in answers for step in a.steps[:-1]} == {min(wrong)}


def test_random_trees_change_nothing(target, prompts, reference):
    class Random(Drafter):
        """Nodes anywhere, counts from none to all, of few enough tokens that some are right by chance."""

        name, branches = "random", True

        def nodes(self, k):
            return 40

        def start(self, prompts, capacity):
            self.rows, self.generator = len(prompts), torch.Generator().manual_seed(0)

        def observe(self, news):
            self.likely = news.last_BLH @ target.lm_head.weight.T

        def select(self, rows):
            self.rows = len(rows)

        def propose(self, k, uniform_BN=None):
            parents = [
                [int(torch.randint(-1, i, (), generator=self.generator)) for i in range(40)] for _ in range(self.rows)
            ]
            likely = self.likely[:, -1].topk(5).indices
            picks = torch.randint(0, 5, (self.rows, 40), generator=self.generator)
            counts = torch.randint(0, 41, (self.rows,), generator=self.generator)
            return DraftTree(likely.gather(1, picks), torch.tensor(parents), counts)

    answers = decode(target, Random(), prompts, k=40, max_new_tokens=NEW)
    assert [a.ids for a in answers] == reference
    assert sum(step.accepted for a in answers for step in a.steps) > 0


def test_a_drafter_gets_the_states_of_the_accepted_path_in_order(target, prompts, reference, tree_oracle):
    class Listener(tree_oracle):
        taps = (1, 3)

        def start(self, prompts, capacity):
            super().start(prompts, capacity)
            self.heard = [[] for _ in prompts]
            self.mine = list(range(len(prompts)))

        def observe(self, news):
            super().observe(news)
            for row, count in enumerate(news.counts_B.tolist()):
                states = torch.cat([news.taps_BLAH[row, :count].flatten(1), news.last_BLH[row, :count]], 1)
                self.heard[self.mine[row]].append(states)

        def select(self, rows):
            super().select(rows)
            self.mine = [self.mine[i] for i in rows.tolist()]

    drafter = Listener(prompts, reference, lambda token, depth: (token + 1) % 97 if depth == 2 else token)
    decode(target, drafter, prompts, k=4, max_new_tokens=NEW)
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for heard, i in zip(drafter.heard, by_length, strict=True):
        heard = torch.cat(heard)
        states = target.forward(torch.tensor([prompts[i] + reference[i]])[:, : len(heard)], taps=(1, 3))
        torch.testing.assert_close(
            heard, torch.cat([states.taps_BLAH[0].flatten(1), states.last_BLH[0]], 1), rtol=1e-3, atol=1e-4
        )


# ------------------------------------------------------------------------------------------------- ends and budgets

@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_no_tree_goes_beyond_the_budget(budget, target, prompts, reference, tree_oracle):
    for k in (1, 4, 9):
        oracle = tree_oracle(prompts, [r + [11] * 12 for r in reference])
        steps = []
        options = {"k": k, "max_new_tokens": budget, "on_step": lambda i, ids, step, heard=steps: heard.append(step)}
        answers = decode(target, oracle, prompts, **options)
        assert [a.ids for a in answers] == [r[:budget] for r in reference]
        assert all(1 + sum(s.accepted + 1 for s in a.steps) == len(a.ids) for a in answers)
        records = iter(step for step in steps if step)
        for number, depths_of_rows in enumerate(oracle.proposed):
            useful = budget - 1 - number * (k + 1) - 1  # of what is left; so far every row has had all accepted
            for depths in depths_of_rows:
                allowed = [depth for depth in depths if depth <= useful]
                assert next(records)[::2] == (max(allowed, default=0), len(allowed))


def test_tokens_after_an_end_token_in_a_tree_are_dropped(target, prompts, reference, tree_oracle):
    stopped = [i for i, r in enumerate(reference) if r[-1] in target.eos_ids]
    assert stopped
    beyond = [r + [11] * 8 for r in reference]  # the drafter goes on after the end
    for i in stopped:
        answer = decode(target, tree_oracle(prompts, beyond), [prompts[i]], k=6, max_new_tokens=NEW)[0]
        assert answer.ids == reference[i] and answer.finish == "stop"
        assert 1 + sum(step.accepted + 1 for step in answer.steps) == len(answer.ids)


def test_a_tree_may_reach_past_the_last_position(make, prompts, transformers_says, tree_oracle):
    """Learned positions have no row for what a draft would hold beyond the budget."""
    target, theirs = make[0]("gpt2")
    texts = [(prompts[4] * 17)[:500], prompts[0]]
    expected = [transformers_says(theirs, text, 12) for text in texts]
    beyond = [answer + [9] * 12 for answer in expected]
    answers = decode(target, tree_oracle(texts, beyond), texts, k=9, max_new_tokens=12)
    assert [a.ids for a in answers] == expected


def test_block_verification_of_a_tree_is_refused(target, prompts, reference, tree_oracle):
    with pytest.raises(ValueError, match=r"'block' verifies chains.*'tree oracle' proposes trees"):
        decode(target, tree_oracle(prompts, reference), prompts, k=2, max_new_tokens=4, temperature=1.0, rule="block")


# ------------------------------------------------------------------------------------------------- sampling

PARENTS = [-1, -1, 0, 1, 0, 1]


class Drawn(Drafter):
    """Six nodes: two children of the root and two of each of them. `point`: the same tokens always, else drawn from a
    distribution that depends on the token above."""

    name, branches = "drawn", True

    def __init__(self, point, vocab=8):
        generator = torch.Generator().manual_seed(3)
        self.point, self.q_VV = point, (3 * torch.rand(vocab, vocab, generator=generator)).softmax(-1)

    def nodes(self, k):
        return 6

    def start(self, prompts, capacity):
        pass

    def observe(self, news):
        self.last_B = torch.tensor([tokens[-1] for tokens in news.tokens])

    def select(self, rows):
        pass

    def propose(self, k, uniform_BN=None):
        batch = len(self.last_B)
        if self.point:
            tokens = torch.tensor([[3, 6, 1, 1, 7, 2]]).expand(batch, 6)
            return DraftTree(tokens, torch.tensor(PARENTS), torch.full((batch,), 6))
        tokens, q = [], []
        for node, parent in enumerate(PARENTS):
            q.append(self.q_VV[self.last_B if parent < 0 else tokens[parent]])
            tokens.append((q[-1].cumsum(-1) < uniform_BN[:, node : node + 1]).sum(-1).clamp_max(7))
        return DraftTree(torch.stack(tokens, 1), torch.tensor(PARENTS), torch.full((batch,), 6), torch.stack(q, 1))


@pytest.mark.parametrize("point", [True, False])
def test_sampled_texts_follow_the_targets_own_distribution(point, make):
    """4000 requests of one prompt, three tokens each, against the exact probabilities of every three-token text."""
    target, theirs = make[0](vocab=8, seed=1)
    target.lm_head.weight.data.mul_(0.2)
    theirs.lm_head.weight.data.mul_(0.2)
    target.model.generation_config.eos_token_id, target.tokenizer = None, type("Endless", (), {"eos_token_id": None})
    prompt, n, options = [6, 7, 6, 7, 3, 6], 4000, {"temperature": 1.2, "min_p": 0.05}
    answers = decode(target, Drawn(point), [prompt] * n, k=2, max_new_tokens=3, batch=2000, **options)
    counts = torch.zeros(8, 8, 8)
    for answer in answers:
        counts[tuple(answer.ids)] += 1
    texts = torch.cartesian_prod(*[torch.arange(8)] * 2)
    p = (theirs(torch.cat([torch.tensor(prompt).expand(64, -1), texts], 1)).logits.detach()[:, -3:] / 1.2).softmax(-1)
    p = p.masked_fill(p < 0.05 * p.amax(-1, keepdim=True), 0)
    p = p / p.sum(-1, keepdim=True)
    expected = (p[:, 0].gather(1, texts[:, :1]) * p[:, 1].gather(1, texts[:, 1:]) * p[:, 2]).view(8, 8, 8)
    assert not counts[expected == 0].any()
    big = expected * n >= 5
    chi2 = float(((counts[big] - expected[big] * n) ** 2 / (expected[big] * n)).sum())
    freedom = int(big.sum())
    assert freedom > 20 and chi2 < freedom + 4 * (2 * freedom) ** 0.5
    assert sum(step.accepted for a in answers for step in a.steps) > 0.1 * n


def test_a_sampled_answer_does_not_depend_on_its_batch(target, prompts):
    options = {"k": 2, "max_new_tokens": 20, "temperature": 1.5}
    drafter = Drawn(False, vocab=97)
    together = [a.ids for a in decode(target, drafter, prompts, **options)]
    assert together == [a.ids for a in decode(target, drafter, prompts, batch=1, **options)]
    assert together == [a.ids for a in decode(target, drafter, prompts, batch=3, **options)]


@pytest.mark.parametrize("rule", ["block", "typical"])
def test_other_rules_at_temperature_0_are_the_targets_choice(rule, target, prompts, reference, tree_oracle):
    drafter = make_drafter("ngram") if rule == "block" else tree_oracle(prompts, reference)
    answers = decode(target, drafter, prompts, k=4, max_new_tokens=NEW, rule=rule)
    assert [a.ids for a in answers] == reference


def test_a_penalty_sees_the_text_and_the_nodes_above():
    parents = torch.tensor([[-1, 0, 0], [-1, -1, 1]])
    tree = DraftTree(torch.tensor([[4, 5, 6], [7, 7, 7]]), parents, torch.tensor([3, 3]))
    text = torch.zeros(2, 9, dtype=torch.bool)
    text[0, 1] = text[1, 2] = True
    seen = seen_tokens(text, tree, lay_out(tree, torch.tensor([1, 1]))[2])
    found = [[set(position.nonzero()[:, 0].tolist()) for position in row] for row in seen]
    assert found == [[{1}, {1, 4}, {1, 4, 5}, {1, 4, 6}], [{2}, {2, 7}, {2, 7}, {2, 7}]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_of_trees_may_propose_nothing(temperature, target, prompts):
    class Silent(Drafter):
        """A tree, a chain, nothing, in turn."""

        name, branches = "silent", True

        def start(self, prompts, capacity):
            self.rows, self.turn = len(prompts), 0

        def observe(self, news):
            pass

        def propose(self, k, uniform_BN=None):
            self.turn += 1
            parents = (torch.tensor([-1, -1]), torch.tensor([-1, 0]), torch.zeros(0, dtype=torch.long))[self.turn % 3]
            counts = torch.full((self.rows,), len(parents))
            return DraftTree(torch.full((self.rows, len(parents)), 7), parents, counts)

        def select(self, rows):
            self.rows = len(rows)

    options = {"max_new_tokens": 16, "temperature": temperature}
    answers = decode(target, Silent(), prompts, k=2, **options)
    assert all(1 + sum(step.accepted + 1 for step in a.steps) == len(a.ids) for a in answers)
    if not temperature:
        plain = decode(target, make_drafter("none"), prompts, k=0, **options)
        assert [a.ids for a in answers] == [a.ids for a in plain]
