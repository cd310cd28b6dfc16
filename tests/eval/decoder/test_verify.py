"""The verification rules on single steps worked by hand; test_enumeration.py has whole distributions."""

from __future__ import annotations

import pytest
import torch

from headtrain.eval.decoder.verify import (
    block_chain,
    greedy_chain,
    greedy_tree,
    residual,
    sampled_chain,
    sampled_tree,
    typical_tree,
)


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


def test_every_row_may_have_a_tree_of_its_own():
    """300 random trees of one batch, against a walk from the root in plain Python."""
    random = torch.Generator().manual_seed(1)
    tokens, choice = (torch.randint(0, 3, (300, n), generator=random) for n in (9, 10))
    parents = torch.stack([torch.randint(-1, n, (300,), generator=random) for n in range(9)], 1)
    counts = torch.randint(0, 10, (300,), generator=random)
    verdict = greedy_tree(choice, tokens, parents, counts)
    for row in range(300):
        longest = 0
        for node in range(counts[row]):
            way = [node]
            while parents[row, way[0]] >= 0:
                way.insert(0, int(parents[row, way[0]]))
            right = all(tokens[row, n] == choice[row, parents[row, n] + 1] for n in way)
            longest = max(longest, len(way) if right else 0)
            if right and way == verdict.path_BD[row, : len(way)].tolist() and len(way) == verdict.accepted_B[row]:
                assert verdict.bonus_B[row] == choice[row, node + 1]
        path = verdict.path_BD[row]
        assert verdict.accepted_B[row] == longest == int((path >= 0).sum())
        at = -1
        for node in path[:longest].tolist():
            assert parents[row, node] == at and tokens[row, node] == choice[row, at + 1] and node < counts[row]
            at = node
        assert verdict.bonus_B[row] == choice[row, at + 1] and (path[longest:] == -1).all()


# ------------------------------------------------------------------------------------------------- chains are trees

@pytest.fixture
def step():
    """step(drawn): 512 chains of up to four drafts over 50 tokens in fp32, some with a q of zero at the draft."""
    def make(drawn, batch=512, k=4, vocab=50):
        random = torch.Generator().manual_seed(5)
        p = (torch.randn(batch, k + 1, vocab, generator=random) * 4).softmax(-1)
        q = (torch.randn(batch, k, vocab, generator=random) * 2 + p[:, :k].log()).softmax(-1)
        drafts = q.flatten(0, 1).multinomial(1, generator=random).view(batch, k) if drawn else p[:, :k].argmax(-1)
        q[:9].scatter_(2, drafts[:9, :, None], 0)
        uniform = torch.rand(batch, k + 1, generator=random, dtype=torch.float64)
        counts = torch.randint(0, k + 1, (batch,), generator=random)
        return p, drafts, counts, q if drawn else None, uniform[:, :k], uniform[:, k]

    return make


def test_a_chain_gives_the_same_verdict_as_a_chain_and_as_a_tree_when_greedy(step):
    p, drafts, counts, *_ = step(True)
    choice = torch.where(torch.rand(512, 5, generator=torch.Generator().manual_seed(0)) < 0.3, 0, p.argmax(-1))
    choice[:, :4] = torch.where(drafts % 3 > 0, drafts, choice[:, :4])
    chain, tree = greedy_chain(choice, drafts, counts), greedy_tree(choice, drafts, torch.arange(-1, 3), counts)
    same_verdict(chain, tree)


@pytest.mark.parametrize("drawn", [True, False], ids=["draws", "choices"])
def test_a_chain_gives_the_same_verdict_as_a_chain_and_as_a_tree_when_sampled(step, drawn):
    p, drafts, counts, *rest = step(drawn)
    chain = sampled_chain(p, drafts, counts, *rest)
    same_verdict(chain, sampled_tree(p, drafts, torch.arange(-1, 3), counts, *rest))
    if drawn:
        assert not chain.accepted_B[:9].any(), "a draft its own q cannot have given was kept"


def same_verdict(chain, tree):
    assert set(chain.accepted_B.tolist()) == {0, 1, 2, 3, 4}
    assert torch.equal(chain.accepted_B, tree.accepted_B) and torch.equal(chain.bonus_B, tree.bonus_B)
    nodes = torch.arange(4).expand(512, 4)
    assert torch.equal(tree.path_BD, torch.where(nodes < chain.accepted_B[:, None], nodes, -1))


@pytest.mark.parametrize("drawn", [True, False], ids=["draws", "choices"])
def test_each_rows_verdict_is_its_own_whatever_the_batch(step, drawn):
    everything = step(drawn)
    for rule in (sampled_chain, block_chain):
        whole = rule(*everything)
        for row in range(20):
            alone = rule(*(None if x is None else x[row : row + 1] for x in everything))
            assert alone.accepted_B == whole.accepted_B[row] and alone.bonus_B == whole.bonus_B[row]


@pytest.mark.parametrize("rule", [sampled_chain, block_chain])
def test_without_drafts_the_next_token_comes_from_p(rule):
    p = torch.tensor([[[0.2, 0.0, 0.8]], [[0.2, 0.0, 0.8]]])
    none = torch.zeros(2, 0, dtype=torch.long)
    verdict = rule(p, none, torch.tensor([0, 0]), None, torch.zeros(2, 0), torch.tensor([0.1, 0.3]))
    assert verdict.accepted_B.tolist() == [0, 0] and verdict.bonus_B.tolist() == [0, 2]


@pytest.mark.parametrize("rule", [sampled_chain, block_chain])
def test_a_row_with_fewer_drafts_ends_with_a_token_from_p_not_from_a_residual(rule):
    p = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
    verdict = rule(p, torch.tensor([[1, 0]]), torch.tensor([1]), None, torch.zeros(1, 2), torch.tensor([0.5]))
    assert verdict.accepted_B.tolist() == [1] and verdict.bonus_B.tolist() == [0]


def test_where_nothing_is_left_of_p_the_residual_is_p():
    p = torch.tensor([[0.25, 0.75, 0.0]])
    assert torch.equal(residual(p, torch.tensor([1]), p.clone()), p)
    assert torch.equal(residual(torch.tensor([[0.0, 1.0]]), torch.tensor([1]), None), torch.tensor([[0.0, 1.0]]))


# ------------------------------------------------------------------------------------------------- blocks

def test_a_block_worked_by_hand_keeps_a_pair_of_which_the_chain_rejects_the_first():
    """p = (3/4, 1/4), q = (1/4, 3/4) twice. Drafts (1, 0): w_1 = (1/4)/(3/4) = 1/3, w_2 = min(1, 1/3 · 3) = 1.

    Prefix 1 leaves max(0, p/3 - q) = 0: it never passes alone; prefix 2 always passes. The chain keeps draft 1 at 1/3.
    """
    p, q = torch.tensor([0.75, 0.25]).expand(2, 3, 2), torch.tensor([0.25, 0.75]).expand(2, 2, 2)
    inputs = p, torch.tensor([[1, 0], [1, 1]]), torch.tensor([2, 2]), q
    numbers = torch.full((2, 2), 0.99), torch.tensor([0.5, 0.5])
    assert sampled_chain(*inputs, *numbers).accepted_B.tolist() == [0, 0]
    verdict = block_chain(*inputs, *numbers)
    assert verdict.accepted_B.tolist() == [2, 0]  # (1, 1): w_2 = 1/9, rejected; max(0, p - q) is all on token 0
    assert verdict.bonus_B.tolist() == [0, 0]
    just = torch.tensor([[0.99, 0.99], [0.99, 1 / 9 - 1e-4]])
    assert block_chain(*inputs, just, numbers[1]).accepted_B.tolist() == [2, 2]


# ------------------------------------------------------------------------------------------------- typical acceptance

def test_typical_acceptance_keeps_what_is_likely_enough_for_the_entropy_there():
    """Flat over 8 tokens: entropy log 8, bar min(0.09, 0.3 / 8) = 0.0375. Sharp (0.92, 0.08, 0 …): bar 0.09."""
    flat, sharp = torch.full((8,), 1 / 8), torch.tensor([0.92, 0.08, *[0.0] * 6])
    p = torch.stack([torch.stack([flat, sharp, flat]), torch.stack([sharp, flat, sharp])])
    verdict = typical_tree(p, torch.tensor([[5, 1], [1, 5]]), torch.arange(-1, 1), torch.tensor([2, 2]), torch.zeros(2))
    assert verdict.accepted_B.tolist() == [1, 0] and verdict.path_BD.tolist() == [[0, -1], [-1, -1]]
    assert verdict.bonus_B.tolist() == [0, 0]


def test_typical_acceptance_takes_the_longest_path_and_of_several_the_likeliest():
    p = torch.tensor([[0.5, 0.3, 0.2]]).expand(1, 6, 3)
    tokens, parents = torch.tensor([[0, 2, 1, 1, 0]]), torch.tensor([-1, -1, -1, 1, 2])  # 0 · 2 1 · 1 0
    verdict = typical_tree(p, tokens, parents, torch.tensor([5]), torch.tensor([0.9]))
    assert verdict.path_BD.tolist() == [[2, 4, -1, -1, -1]] and verdict.bonus_B.tolist() == [2]
    fewer = typical_tree(p, tokens, parents, torch.tensor([4]), torch.tensor([0.9]))
    assert fewer.path_BD.tolist() == [[1, 3, -1, -1, -1]]
    assert typical_tree(p, tokens, parents, torch.tensor([0]), torch.tensor([0.0])).accepted_B.tolist() == [0]
