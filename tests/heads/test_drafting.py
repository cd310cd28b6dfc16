"""Drafting in trees: what a node sees, against the same head run along each root path alone as a chain."""

from __future__ import annotations

import pytest
import torch

from headtrain.heads.base import HeadConfig
from headtrain.heads.drafting import ROOM
from headtrain.heads.eagle3 import Eagle3Head

V, H, A, CAPACITY = 60, 32, 2, 12
COUNTS = torch.tensor([9, 6, 2])  # true slots of three requests


def make_head(**options) -> Eagle3Head:
    torch.manual_seed(0)
    head = Eagle3Head(HeadConfig(
        hidden_size=H, target_hidden_size=H, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=V, draft_vocab_size=V, taps=[1, 2], target_layers=3, **options,
    ))  # fmt: skip
    for p in head.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.15)
    head.attach(torch.randn(V, H))
    return head.eval()


def extended(head, rows=slice(None)):
    """The state after the true prefixes of the requests `rows`, fed in two calls, the second one padded."""
    random, counts = torch.Generator().manual_seed(1), COUNTS[rows]
    tokens = torch.randint(V, (3, 9), generator=random)[rows]
    taps = torch.randn(3, 9, A, H, generator=random)[rows]
    state = head.start(len(counts), CAPACITY)
    head.extend(state, tokens[:, :1], taps[:, :1], None, torch.ones_like(counts))
    head.extend(state, tokens[:, 1:], taps[:, 1:], None, counts - 1)
    return state


def random_tree(generator, sizes):
    """Per call of expand: tokens [3, M] and parents [3, M] among all earlier nodes and the root."""
    calls, nodes = [], 0
    for m in sizes:
        tokens = torch.randint(V, (3, m), generator=generator)
        calls.append((tokens, torch.randint(-1, nodes, (3, m), generator=generator)))
        nodes += m
    return calls


def path_of(calls, row, node):
    tokens = torch.cat([t for t, _ in calls], 1)[row].tolist()
    parents = torch.cat([p for _, p in calls], 1)[row].tolist()
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True, "norm_output": True}])
def test_a_node_of_a_tree_is_drafted_as_at_the_end_of_its_path_alone(options):
    head, calls = make_head(**options), random_tree(torch.Generator().manual_seed(3), (3, 1, 5, 2, ROOM))
    state = extended(head)
    logits, hidden = (torch.cat(x, 1) for x in zip(*(head.expand(state, *call) for call in calls), strict=True))
    assert logits.shape[1] == state.nodes > ROOM, "the cache must have grown"
    for row in range(3):
        depths = set()
        for node in range(state.nodes):
            alone, path = extended(head, slice(row, row + 1)), path_of(calls, row, node)
            for token in path:
                one, its_hidden = head.expand(alone, torch.tensor([[token]]))
            depths.add(len(path))
            assert torch.allclose(logits[row, node], one[0, 0], atol=1e-5), (row, node)
            assert torch.allclose(hidden[row, node], its_hidden[0, 0], atol=1e-5), (row, node)
        assert len(depths) > 3


def test_a_chain_is_the_same_with_and_without_its_parents_named_and_after_a_tree():
    head = make_head()
    tokens = torch.randint(V, (3, 5), generator=torch.Generator().manual_seed(4))
    plain, named, later = extended(head), extended(head), extended(head)
    head.expand(later, tokens[:, :2], torch.full((3, 2), -1))  # two nodes that the chain does not descend from
    for depth in range(5):
        token = tokens[:, depth : depth + 1]
        expected, _ = head.expand(plain, token)
        assert torch.allclose(head.expand(named, token, torch.full((3, 1), depth - 1))[0], expected, atol=1e-5)
        below = None if depth else torch.full((3, 1), -1)
        assert torch.allclose(head.expand(later, token, below)[0], expected, atol=1e-5)
    assert plain.above_BNN is None, "a chain needs no mask of its own"


def test_a_nodes_token_reaches_its_descendants_and_nobody_else():
    head, calls = make_head(), random_tree(torch.Generator().manual_seed(5), (2, 4, 6))
    changed = [(tokens.clone(), parents) for tokens, parents in calls]
    changed[0][0][:, 0] = (changed[0][0][:, 0] + 1) % V  # node 0
    logits = []
    for tree in (calls, changed):
        state = extended(head)
        logits.append(torch.cat([head.expand(state, *call)[0] for call in tree], 1))
    moved = (logits[0] - logits[1]).abs().amax(-1) > 1e-5
    parents = torch.cat([p for _, p in calls], 1)
    for row in range(3):
        below = [True]
        for node in range(1, 12):
            below.append(int(parents[row, node]) >= 0 and below[int(parents[row, node])])
        assert moved[row].tolist() == below and 1 < sum(below) < 12


def test_nodes_leave_no_trace_in_the_next_step_and_a_request_may_leave():
    """A second extend after a tree, with one request gone, equals the same extend without anything drafted."""
    head, calls = make_head(), random_tree(torch.Generator().manual_seed(6), (3, 4))
    used, clean = extended(head), extended(head)
    for call in calls:
        head.expand(used, *call)
    rows, tokens, taps = torch.tensor([2, 0]), torch.tensor([[3, 4], [5, 0]]), torch.randn(2, 2, A, H)
    for state in (used, clean):
        head.select(state, rows)
    both = [head.extend(s, tokens, taps, None, torch.tensor([2, 1])) for s in (used, clean)]
    assert torch.equal(both[0][0], both[1][0])
    node = torch.tensor([[7], [8]])
    assert torch.equal(head.expand(used, node)[0], head.expand(clean, node)[0])
