"""The verification rules against tables and against exact integration over the random numbers they use."""

from __future__ import annotations

import itertools

import pytest
import torch

from headtrain.eval.decoder import verify
from headtrain.eval.decoder.sampling import Sampling, draw, probabilities
from headtrain.eval.decoder.verify import greedy_chain, greedy_tree, sampled_chain


def test_greedy_chain_accepts_leading_matches_and_adds_the_targets_next_token():
    choice = torch.tensor([[4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7]])
    drafts = torch.tensor([[4, 5, 6], [4, 9, 6], [9, 5, 6], [4, 5, 6]])
    verdict = greedy_chain(choice, drafts, torch.tensor([3, 3, 3, 1]))
    assert verdict.accepted_B.tolist() == [3, 1, 0, 1]  # the last row drafted one token only
    assert verdict.bonus_B.tolist() == [7, 5, 4, 5]


def test_greedy_chain_without_drafts_is_plain_decoding():
    verdict = greedy_chain(torch.tensor([[8], [3]]), torch.zeros(2, 0, dtype=torch.long), torch.tensor([0, 0]))
    assert verdict.accepted_B.tolist() == [0, 0] and verdict.bonus_B.tolist() == [8, 3]


A, B, C, D, E, F, Z = range(10, 17)


def follow(*continuation):
    """The target's greedy choice after each path of a text that it continues with `continuation`."""
    return lambda path: continuation[len(path)] if path == continuation[: len(path)] else 0


def choices(tokens, parents, target):
    """int64 [1, N + 1]: the target's choice after the root and after every node, by walking each node's path."""
    def path(node):
        return () if node < 0 else (*path(parents[node]), tokens[node])

    return torch.tensor([[target(path(node)) for node in range(-1, len(tokens))]])


def test_a_tree_accepts_the_branch_the_target_takes_where_the_best_chain_accepts_nothing():
    target = follow(A, C, Z)
    tokens, parents = [B, A, E, F, D, C], [-1, -1, 0, 0, 1, 1]
    choice = choices(tokens, parents, target)
    tree = greedy_tree(choice, torch.tensor([tokens]), torch.tensor(parents), torch.tensor([6]))
    assert tree.accepted_B.tolist() == [2] and tree.bonus_B.tolist() == [Z]
    assert tree.path_BD[0].tolist() == [1, 5, -1, -1, -1, -1] and [tokens[1], tokens[5]] == [A, C]
    chain = greedy_chain(choices([B, E], [-1, 0], target), torch.tensor([[B, E]]), torch.tensor([2]))
    assert chain.accepted_B.tolist() == [0] and chain.bonus_B.tolist() == [A]


def test_a_tree_does_not_accept_a_node_whose_parent_was_rejected():
    target = follow(A, C, Z)
    tokens, parents = [B, C, A], [-1, 0, -1]  # C after B: the token is right at depth 2, its path is not
    choice = choices(tokens, parents, target)
    verdict = greedy_tree(choice, torch.tensor([tokens]), torch.tensor(parents), torch.tensor([3]))
    assert verdict.path_BD.tolist() == [[2, -1, -1]]
    assert verdict.accepted_B.tolist() == [1] and verdict.bonus_B.tolist() == [C]


def test_a_chain_gives_the_same_verdict_as_a_chain_and_as_a_tree():
    random = torch.Generator().manual_seed(0)
    drafts = torch.randint(0, 2, (64, 4), generator=random)
    choice = torch.randint(0, 2, (64, 5), generator=random)
    counts = torch.randint(0, 5, (64,), generator=random)
    chain, tree = greedy_chain(choice, drafts, counts), greedy_tree(choice, drafts, torch.arange(-1, 3), counts)
    assert torch.equal(chain.accepted_B, tree.accepted_B) and torch.equal(chain.bonus_B, tree.bonus_B)
    for accepted, path in zip(tree.accepted_B.tolist(), tree.path_BD.tolist(), strict=True):
        assert path == [*range(accepted), *[-1] * (tree.path_BD.shape[1] - accepted)]


# ------------------------------------------------------------------------------------------------- probabilities

@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.3, 0.8), Sampling(1.0, top_k=5), Sampling(0.6, 0.9, 7)])
def test_probabilities_equal_those_of_transformers_generation(sampling):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)) * 2
    expected = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        expected = TopKLogitsWarper(sampling.top_k)(None, expected)
    if sampling.top_p < 1:
        expected = TopPLogitsWarper(sampling.top_p)(None, expected)
    torch.testing.assert_close(probabilities(logits, sampling), expected.softmax(-1), atol=1e-6, rtol=1e-5)


def test_draw_inverts_the_cumulated_weights_and_never_gives_a_token_without_weight():
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 1.0], dtype=torch.float64)
    assert draw(weights.expand(6, -1), uniform).tolist() == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}])
def test_impossible_sampling_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


# ------------------------------------------------------------------------------------------------- the sampled chain

def middles(points):
    """(middle, width) of every interval that `points` cut [0, 1] into."""
    edges = sorted({0.0, 1.0, *(float(p) for p in points if 0 < p < 1)})
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(edges)]


def normalised(weights):
    return weights / weights.sum(-1, keepdim=True)


def cuts(distributions):
    return distributions.cumsum(-1).flatten().tolist()


class Pair:
    """A target and a drafter over V tokens, two drafts deep: p0, p1[x], p2[x, y] and q0, q1[x]."""

    def __init__(self, vocab=3, seed=0):
        random = torch.Generator().manual_seed(seed)

        def distribution(*shape):
            return normalised(torch.rand(*shape, vocab, generator=random, dtype=torch.float64) ** 2 + 0.01)

        self.vocab = vocab
        self.p0, self.p1, self.p2 = distribution(), distribution(vocab), distribution(vocab, vocab)
        self.q0, self.q1 = distribution(), distribution(vocab)

    def expected(self):
        """The target's own probability of each three-token text, [V, V, V]."""
        return self.p0[:, None, None] * self.p1[:, :, None] * self.p2

    def produced(self, deterministic=False, soft_q=True):
        """The same for drafting, verifying and then plain decoding to three tokens: all random numbers integrated out.

        deterministic: the drafter takes its likeliest token; soft_q: its distribution is handed to the verification.
        """
        v = self.vocab
        q0, q1 = self.q0, self.q1
        if deterministic:
            q0, q1 = (torch.nn.functional.one_hot(q.argmax(-1), v).double() for q in (q0, q1))
        rest0 = torch.stack([normalised((self.p0 - q).clamp_min(0) + 1e-300) for q in (self.q0, q0, *torch.eye(v))])
        rest1 = torch.cat([(self.p1 - q).clamp_min(0) + 1e-300 for q in (self.q1, q1, *torch.eye(v)[:, None])])
        drop = [d * (1 - torch.eye(v)) + 1e-300 for d in (self.p0[None], *self.p1[:, None])]
        first = middles([*(self.p0 / self.q0).tolist(), *self.p0.tolist()])
        second = middles([*(self.p1 / self.q1).flatten().tolist(), *self.p1.flatten().tolist()])
        ends = torch.cat([rest0, rest1, *drop, self.p0[None], self.p1, self.p2.flatten(0, 1)])
        bonus = middles(cuts(normalised(ends)))
        drafts = [(x, y) for x, y in itertools.product(range(v), repeat=2) if q0[x] * q1[x, y] > 0]
        rows = [
            (x, y, a, b, c, q0[x] * q1[x, y] * wa * wb * wc)
            for (x, y), (a, wa), (b, wb), (c, wc) in itertools.product(drafts, first, second, bonus)
        ]
        x, y = (torch.tensor([row[i] for row in rows]) for i in (0, 1))
        a, b, c, weight = (torch.tensor([float(row[i]) for row in rows], dtype=torch.float64) for i in (2, 3, 4, 5))
        p = torch.stack([self.p0.expand(len(rows), -1), self.p1[x], self.p2[x, y]], 1)
        q = torch.stack([self.q0.expand(len(rows), -1), self.q1[x]], 1) if soft_q else None
        verdict = sampled_chain(p, torch.stack([x, y], 1), torch.full_like(x, 2), q, torch.stack([a, b], 1), c)
        out = torch.zeros(v, v, v, dtype=torch.float64)
        columns = (verdict.accepted_B, x, y, verdict.bonus_B, weight)
        for accepted, t, s, u, w in zip(*(column.tolist() for column in columns), strict=True):
            if accepted == 0:
                out[u] += w * self.p1[u][:, None] * self.p2[u]
            elif accepted == 1:
                out[t, u] += w * self.p2[t, u]
            else:
                out[t, s, u] += w
        return out


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_sampled_chain_reproduces_the_targets_distribution_exactly(seed, deterministic):
    pair = Pair(seed=seed)
    produced = pair.produced(deterministic, soft_q=not deterministic)
    torch.testing.assert_close(produced, pair.expected(), atol=1e-6, rtol=0)


def test_a_soft_distribution_for_a_draft_that_was_an_argmax_would_be_noticed():
    pair = Pair()
    assert (pair.produced(deterministic=True, soft_q=True) - pair.expected()).abs().max() > 1e-2


def test_a_rejection_that_samples_from_p_instead_of_the_residual_would_be_noticed(monkeypatch):
    pair = Pair()
    monkeypatch.setattr(verify, "residual", lambda p_BV, drafts_B, q_BV: p_BV)
    assert (pair.produced() - pair.expected()).abs().max() > 1e-2


P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])


def test_three_tokens_worked_by_hand():
    p, q = P.expand(3, 1, 3), Q.expand(3, 1, 3)
    accept = verify.ratio(p, torch.tensor([[0], [1], [2]]), q)[:, 0].clamp_max(1)
    assert float((accept * Q).sum()) == pytest.approx(0.7)  # sum of min(p, q)
    assert verify.residual(P[None], torch.tensor([1]), Q[None])[0].tolist() == [1, 0, 0]
    point = verify.ratio(P.expand(1, 1, 3), torch.tensor([[1]]), None)  # argmax of q, a choice
    assert float(point) == pytest.approx(0.3)
    rest = verify.residual(P[None], torch.tensor([1]), None)[0]
    assert rest.tolist() == pytest.approx([5 / 7, 0, 2 / 7])


@pytest.mark.parametrize("argmax", [False, True])
def test_two_hundred_thousand_draws_follow_the_target(argmax):
    n, random = 200_000, torch.Generator().manual_seed(3)
    uniform = torch.rand(3, n, generator=random, dtype=torch.float64)
    drafts = torch.ones(n, dtype=torch.long) if argmax else draw(Q.expand(n, -1), uniform[0])
    p, q = P.expand(n, 2, 3), None if argmax else Q.expand(n, 1, 3)
    verdict = sampled_chain(p, drafts[:, None], torch.ones(n, dtype=torch.long), q, uniform[1][:, None], uniform[2])
    first = torch.where(verdict.accepted_B > 0, drafts, verdict.bonus_B)
    assert (torch.bincount(first, minlength=3) / n - P).abs().max() < 0.005
    assert float(verdict.accepted_B.float().mean()) == pytest.approx(0.3 if argmax else 0.7, abs=0.005)


def test_a_row_with_fewer_drafts_ends_with_a_token_from_p_not_from_a_residual():
    p = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
    verdict = sampled_chain(p, torch.tensor([[1, 0]]), torch.tensor([1]), None, torch.zeros(1, 2), torch.tensor([0.5]))
    assert verdict.accepted_B.tolist() == [1] and verdict.bonus_B.tolist() == [0]
