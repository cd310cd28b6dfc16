"""DraftTree: who stands above whom, against walking up node by node."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headtrain.tree import DraftTree


def tree_of(parents):
    parents = torch.tensor(parents, dtype=torch.long)
    shape = parents.shape if parents.dim() == 2 else (1, len(parents))
    return DraftTree(torch.zeros(shape, dtype=torch.long), parents, torch.full((shape[0],), shape[1]))


def line(parents, node):
    """The node and all above it."""
    return set() if node < 0 else {node} | line(parents, parents[node])


some_parents = st.integers(0, 12).flatmap(lambda n: st.tuples(*[st.integers(-1, i - 1) for i in range(n)]))


@settings(max_examples=60, deadline=None)
@given(some_parents)
def test_ancestors_and_depths_are_those_found_by_walking_up(parents):
    tree = tree_of(parents)
    lines = [line(parents, node) for node in range(len(parents))]
    assert [set(row.nonzero()[:, 0].tolist()) for row in tree.ancestors()] == lines
    assert tree.depths().tolist() == [len(above) for above in lines]
    assert tree.is_chain == (list(parents) == list(range(-1, len(parents) - 1)))


def test_every_request_may_have_a_tree_of_its_own():
    rows = [[-1, 0, 1, 2], [-1, -1, 0, 1], [-1, 0, 0, 0]]
    tree = tree_of(rows)
    assert tree.depths().tolist() == [[1, 2, 3, 4], [1, 1, 2, 2], [1, 2, 2, 2]] and not tree.is_chain
    for row, above in zip(rows, tree.ancestors(), strict=True):
        assert torch.equal(above, tree_of(row).ancestors())


@pytest.mark.parametrize("k", [0, 1, 4])
def test_a_chain_is_a_tree_with_one_child_per_node(k):
    chain = DraftTree.chain(torch.ones(2, k, dtype=torch.long))
    assert chain.is_chain and chain.counts.tolist() == [k, k] and chain.parents.tolist() == list(range(-1, k - 1))
    assert torch.equal(chain.ancestors(), torch.ones(k, k).tril().bool())
