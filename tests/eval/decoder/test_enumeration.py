"""Every verification rule, exactly: all drafts and all random numbers summed over, on vocabularies of three and four.

A rule is a black box here. It answers drafts with steps at thresholds of its random numbers; the thresholds are found
by bisection, so that the distribution of what is emitted comes out exactly, and is held to the target's own.
Shapes: R rows (one draft, one part of the random numbers), N nodes, L = N + 1 positions, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import one_hot

from headtrain.eval.decoder import verify
from headtrain.eval.decoder.sampling import Sampling, probabilities

DRAW = "draw"  # a node drawn from the drafter's distribution; a number r: its r-th likeliest token, a choice
CHAIN, PAIR, FORK, BUSHY = (-1, 0, 1), (-1, -1), (-1, 0, 0), (-1, -1, 0, 1)


def tables(seed, vocab, depth, sampling=Sampling(1.0), only=None):
    """Distributions after every text of up to `depth` tokens: entry d is [V] * (d + 1). only: tokens it ever gives."""
    random = torch.Generator().manual_seed(seed)
    allowed = torch.tensor([only is None or v in only for v in range(vocab)])
    logits = [torch.randn([vocab] * (d + 1), generator=random).masked_fill(~allowed, -1e9) for d in range(depth + 1)]
    p = [probabilities(x * 1.5, sampling).double() for x in logits]
    return [x / x.sum(-1, keepdim=True) for x in p]


@dataclass
class Drafts:
    """All drafts a drafter can make, with their weights. q_RNV None: nothing was drawn."""

    weight_R: torch.Tensor
    tokens_RN: torch.Tensor
    parents: tuple[int, ...]
    counts_R: torch.Tensor
    q_RNV: torch.Tensor | None


def path(node, parents):
    return () if node < 0 else (*path(parents[node], parents), node)


def drafting(q, parents, kinds, count=lambda tokens, chances: len(tokens)):
    """count(tokens, their q) -> how many nodes of a draft are handed over; all of them by default."""
    rows = [(1.0, (), (), ())]
    for parent, kind in zip(parents, kinds, strict=True):
        grown = []
        for weight, tokens, given, chances in rows:
            above = tuple(tokens[i] for i in path(parent, parents))
            row = q[len(above)][above]
            if kind == DRAW:
                options = [(v, row, float(row[v])) for v in range(len(row)) if row[v] > 0]
            else:
                v = int(row.argsort(descending=True)[kind])
                options = [(v, one_hot(torch.tensor(v), len(row)).double(), 1.0)]
            grown += [(weight * c, (*tokens, v), (*given, g), (*chances, float(row[v]))) for v, g, c in options]
        rows = grown
    weights, tokens, given, chances = zip(*rows, strict=True)
    q_RNV = torch.stack([torch.stack(g) for g in given]) if DRAW in kinds else None
    counts = [count(t, c) for t, c in zip(tokens, chances, strict=True)]
    return Drafts(torch.tensor(weights).double(), torch.tensor(tokens), parents, torch.tensor(counts), q_RNV)


def chain_rule(name):
    def rule(p_RLV, drafts, accept_RN, bonus_R):
        verdict = getattr(verify, name)(p_RLV, drafts.tokens_RN, drafts.counts_R, drafts.q_RNV, accept_RN, bonus_R)
        nodes = torch.arange(len(drafts.parents))
        return torch.where(nodes < verdict.accepted_B[:, None], nodes, -1), verdict.bonus_B

    return rule


def tree_rule(p_RLV, drafts, accept_RN, bonus_R):
    parents = torch.tensor(drafts.parents)
    verdict = verify.sampled_tree(
        p_RLV, drafts.tokens_RN, parents, drafts.counts_R, drafts.q_RNV, accept_RN, bonus_R
    )
    assert torch.equal((verdict.path_BD >= 0).sum(1), verdict.accepted_B)
    return verdict.path_BD, verdict.bonus_B


def typical_rule(p_RLV, drafts, accept_RN, bonus_R):
    verdict = verify.typical_tree(p_RLV, drafts.tokens_RN, torch.tensor(drafts.parents), drafts.counts_R, bonus_R)
    return verdict.path_BD, verdict.bonus_B


def bisect(below, like):
    """The threshold in [0, 1] per row under which `below(value)` holds."""
    low, high = torch.zeros_like(like), torch.ones_like(like)
    for _ in range(32):
        middle = (low + high) / 2
        yes = below(middle)
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    return (low + high) / 2


def emitted(rule, p, drafts):
    """{text: probability} of a step's tokens: kept drafts and the bonus."""
    rows, nodes = drafts.tokens_RN.shape
    ways = [path(node, drafts.parents) for node in range(-1, nodes)]
    texts = [[tuple(row[i] for i in way) for way in ways] for row in drafts.tokens_RN.tolist()]
    p_RLV = torch.stack([torch.stack([p[len(text)][text] for text in row]) for row in texts])
    weight_R, row_R, accept_RN = drafts.weight_R, torch.arange(rows), torch.full((rows, nodes), 1 - 2**-50).double()

    def judge(row_R, accept_RN, bonus_R):
        q_RNV = None if drafts.q_RNV is None else drafts.q_RNV[row_R]
        here = Drafts(bonus_R, drafts.tokens_RN[row_R], drafts.parents, drafts.counts_R[row_R], q_RNV)
        return rule(p_RLV[row_R], here, accept_RN, bonus_R)

    for node in range(nodes):  # splits each row where the answer changes as this node's number grows
        def kept(value_R, node=node, row_R=row_R, accept_RN=accept_RN):
            numbers_RN = torch.cat([accept_RN[:, :node], value_R[:, None], accept_RN[:, node + 1 :]], 1)
            return judge(row_R, numbers_RN, value_R)[0]

        rejected = kept(accept_RN[:, node])
        edge_R = bisect(lambda value_R, kept=kept, rejected=rejected: (kept(value_R) != rejected).any(1), weight_R)
        low_RN, high_RN = accept_RN.clone(), accept_RN.clone()
        low_RN[:, node], high_RN[:, node] = edge_R / 2, (1 + edge_R) / 2
        accept_RN, row_R = torch.cat([low_RN, high_RN]), row_R.repeat(2)
        weight_R = torch.cat([weight_R * edge_R, weight_R * (1 - edge_R)])
        some = weight_R > 1e-12
        accept_RN, row_R, weight_R = accept_RN[some], row_R[some], weight_R[some]
    kept_RN, _ = judge(row_R, accept_RN, weight_R)
    edges = [bisect(lambda u, v=v: judge(row_R, accept_RN, u)[1] <= v, weight_R) for v in range(p_RLV.shape[-1] - 1)]
    bonus_RV = torch.stack([weight_R * 0, *edges, weight_R * 0 + 1], 1).diff(dim=1)
    out = defaultdict(float)
    for weight, row, nodes_kept, bonus in zip(*(x.tolist() for x in (weight_R, row_R, kept_RN, bonus_RV)), strict=True):
        start = tuple(drafts.tokens_RN[row, i].item() for i in nodes_kept if i >= 0)
        for v, chance in enumerate(bonus):
            out[*start, v] += weight * chance
    return out


def joint(p, text, length):
    """The target's probabilities of all continuations of `text` to `length` tokens, [V] * (length - len(text))."""
    if len(text) == length:
        return torch.tensor(1.0).double()
    row = p[len(text)][text]
    return torch.stack([row[v] * joint(p, (*text, v), length) for v in range(len(row))])


def bias(rule, p, drafts):
    """The largest error in the probability of a text as long as a step can make one, plain decoding filling up."""
    length = max(len(path(node, drafts.parents)) for node in range(len(drafts.parents))) + 1
    out = torch.zeros_like(joint(p, (), length))
    for text, weight in emitted(rule, p, drafts).items():
        out[text] += weight * joint(p, text, length)
    return float((out - joint(p, (), length)).abs().max())


def accepted(rule, p, drafts):
    return sum((len(text) - 1) * weight for text, weight in emitted(rule, p, drafts).items())


RULES = {"chain": chain_rule("sampled_chain"), "block": chain_rule("block_chain"), "tree": tree_rule}
CASES = {
    "a drawn chain": (CHAIN, (DRAW,) * 3),
    "an argmax chain": (CHAIN, (0, 0, 0)),
    "a chain that begins with a choice": (CHAIN, (0, DRAW, DRAW)),
    "a chain that ends with a choice": (CHAIN, (DRAW, DRAW, 0)),
    "independent children": (BUSHY, (DRAW,) * 4),
    "three independent children": ((-1,) * 3, (DRAW,) * 3),
    "independent children of a child": (FORK, (DRAW,) * 3),
    "the likeliest children": (BUSHY, (0, 1, 0, 0)),
    "the likeliest children of a child": (FORK, (0, 0, 1)),
    "a choice, then a draw": (BUSHY, (0, DRAW, DRAW, 0)),
    "a draw, then a choice": (BUSHY, (DRAW, 0, 0, DRAW)),
}
LOSSLESS = [(rule, case) for rule in RULES for case in CASES if rule == "tree" or CASES[case][0] == CHAIN]
SAMPLINGS = [Sampling(0.7, top_p=0.8), Sampling(1.0, top_k=2), Sampling(1.2, min_p=0.3)]


@pytest.mark.parametrize(("rule", "case"), LOSSLESS)
def test_what_is_emitted_has_the_targets_own_distribution(rule, case):
    parents, kinds = CASES[case]
    for seed in range(2):
        q = tables(seed + 50, 3, 3)
        assert bias(RULES[rule], tables(seed, 3, 3), drafting(q, parents, kinds)) < 1e-6


@pytest.mark.parametrize("only", [None, (0, 2)], ids=["full vocabulary", "draft vocabulary"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["top-p", "top-k", "min-p"])
@pytest.mark.parametrize(("rule", "case"), [
    ("chain", "a drawn chain"), ("block", "a drawn chain"), ("tree", "independent children"),
    ("tree", "a choice, then a draw"),
])  # fmt: skip
def test_so_it_has_when_both_sides_are_cut_and_the_drafter_knows_only_some_tokens(rule, case, sampling, only):
    parents, kinds = (CHAIN[:2], (DRAW,) * 2) if CASES[case][0] == CHAIN else (FORK, CASES[case][1][:3])
    p, q = tables(1, 4, 2, sampling), tables(51, 4, 2, sampling, only)
    assert min(float(x.min()) for x in p) == 0, "the cut cuts nothing"
    assert bias(RULES[rule], p, drafting(q, parents, kinds)) < 1e-6


@pytest.mark.parametrize("rule", ["chain", "block", "tree"])
@pytest.mark.parametrize("same", [True, False], ids=["the target itself", "a point mass"])
def test_so_it_has_at_the_drafters_extremes(rule, same):
    p, q = tables(1, 3, 3), tables(2, 3, 3, Sampling(1.0, top_k=1))
    drafts = drafting(p if same else q, CHAIN, (DRAW,) * 3)
    assert bias(RULES[rule], p, drafts) < 1e-6
    if same:
        assert accepted(RULES[rule], p, drafts) == pytest.approx(3, abs=1e-6)


@pytest.mark.parametrize("rule", ["chain", "block", "tree"])
def test_a_draft_may_stop_because_of_tokens_drawn_before(rule):
    drafts = drafting(tables(51, 3, 3), CHAIN, (DRAW,) * 3, lambda _, q: 1 if q[0] < 0.5 else 2 if q[1] < 0.5 else 3)
    assert set(drafts.counts_R.tolist()) == {1, 2, 3}
    assert bias(RULES[rule], tables(1, 3, 3), drafts) < 1e-6


# ------------------------------------------------------------------------------------------------- broken on purpose

def soft_q_for_choices(monkeypatch, p, q, rule, parents):
    """The drafter takes its likeliest tokens, and its softmax is handed over as if they had been drawn."""
    drafts = drafting(q, parents, (0, 1, 0, 0) if parents == BUSHY else (0,) * len(parents))
    texts = [[tuple(row[i] for i in path(p, parents)) for p in parents] for row in drafts.tokens_RN.tolist()]
    drafts.q_RNV = torch.stack([torch.stack([q[len(text)][text] for text in row]) for row in texts])
    return rule, p, drafts


def no_residual(monkeypatch, p, q, rule, parents):
    monkeypatch.setattr(verify, "residual", lambda p_BV, drafts_B, q_BV: p_BV)
    return rule, p, drafting(q, parents, (DRAW,) * len(parents))


def no_residual_in_a_block(monkeypatch, p, q, rule, parents):
    def broken(p_RLV, drafts, accept_RN, bonus_R):
        kept_RN, _ = rule(p_RLV, drafts, accept_RN, bonus_R)
        ends_R = (kept_RN >= 0).sum(1)
        return kept_RN, verify.draw(p_RLV[torch.arange(len(ends_R)), ends_R], bonus_R)

    return broken, p, drafting(q, parents, (DRAW,) * len(parents))


def one_position_off(monkeypatch, p, q, rule, parents):
    def broken(p_RLV, *rest):
        return rule(torch.cat([p_RLV[:, 1:], p_RLV[:, -1:]], 1), *rest)

    return broken, p, drafting(q, parents, (DRAW,) * len(parents))


def q_one_position_off(monkeypatch, p, q, rule, parents):
    drafts = drafting(q, parents, (DRAW,) * len(parents))
    drafts.q_RNV = drafts.q_RNV.roll(1, 1)
    return rule, p, drafts


def p_not_updated_between_children(monkeypatch, p, q, rule, parents):
    whole = verify.ratio
    monkeypatch.setattr(verify, "ratio", lambda p_BV, token_B, q_BV: whole(p[0].expand_as(p_BV), token_B, q_BV))
    return rule, p, drafting(q, PAIR, (DRAW,) * 2)


def siblings_drawn_without_replacement(monkeypatch, p, q, rule, parents):
    drafts = drafting(q, PAIR, (DRAW,) * 2)
    first, second = drafts.tokens_RN.unbind(1)
    drafts.weight_R = torch.where(first == second, 0, q[0][first] * q[0][second] / (1 - q[0][first]))
    return rule, p, drafts


def a_drawn_twin_is_dropped(monkeypatch, p, q, rule, parents):
    return rule, p, drafting(q, PAIR, (0, DRAW), lambda tokens, _: len(set(tokens)))


def an_unlikely_draw_is_dropped(monkeypatch, p, q, rule, parents):
    return rule, p, drafting(q, parents, (DRAW,) * len(parents), lambda _, q: 0 if q[0] < 0.5 else len(q))


def drafting_ignores_the_temperature(monkeypatch, p, q, rule, parents):
    drafts = drafting(q, parents, (DRAW,) * len(parents))
    drafts.q_RNV = (drafts.q_RNV**2) / (drafts.q_RNV**2).sum(-1, keepdim=True)  # as at half the temperature
    return rule, p, drafts


def kept_because_typical(monkeypatch, p, q, rule, parents):
    return typical_rule, p, drafting(q, parents, (DRAW,) * len(parents))


EVERYWHERE = [
    soft_q_for_choices, one_position_off, q_one_position_off, an_unlikely_draw_is_dropped,
    drafting_ignores_the_temperature,
]  # fmt: skip
TREES_ONLY = [p_not_updated_between_children, siblings_drawn_without_replacement, a_drawn_twin_is_dropped]
BROKEN = [
    *itertools.product(EVERYWHERE, RULES), (no_residual, "chain"), (no_residual, "tree"),
    (no_residual_in_a_block, "block"), (kept_because_typical, "tree"), *((mutant, "tree") for mutant in TREES_ONLY),
]  # fmt: skip


@pytest.mark.parametrize(("mutant", "rule"), BROKEN, ids=[f"{mutant.__name__}-{rule}" for mutant, rule in BROKEN])
def test_a_broken_rule_fails_the_same_check(mutant, rule, monkeypatch):
    parents = BUSHY if rule == "tree" else CHAIN
    p, q = tables(1, 3, 3), tables(51, 3, 3)
    assert bias(*mutant(monkeypatch, p, q, RULES[rule], parents)) > 1e-2


# ------------------------------------------------------------------------------------------------- how much is kept

def expected_accepted(p, q, depth, clamp_each):
    """Sum over lengths i and texts x of q(x) times the chance that x is kept: of products of p/q, each clamped at 1 …

    … on its own (the chain: Leviathan et al., theorem 3.8's acceptance), or the running product (a block: Sun et al.).
    """
    total = 0.0
    for length in range(1, depth + 1):
        for text in itertools.product(range(len(p[0])), repeat=length):
            drawn, kept = 1.0, 1.0
            for i, token in enumerate(text):
                a, b = float(p[i][text[:i]][token]), float(q[i][text[:i]][token])
                drawn *= b
                kept = kept * min(1, a / b) if clamp_each else min(1, kept * a / b)
            total += drawn * kept
    return total


def test_chain_and_block_keep_as_many_drafts_as_their_closed_forms_say_and_a_block_keeps_more():
    for seed in range(3):
        p, q = tables(seed, 3, 3), tables(seed + 50, 3, 3)
        drafts = drafting(q, CHAIN, (DRAW,) * 3)
        chain, block = (accepted(RULES[rule], p, drafts) for rule in ("chain", "block"))
        assert chain == pytest.approx(expected_accepted(p, q, 3, True), abs=1e-6)
        assert block == pytest.approx(expected_accepted(p, q, 3, False), abs=1e-6)
        assert block > chain


@pytest.mark.parametrize(("parents", "kinds"), [(CHAIN[:1], (DRAW,)), (CHAIN, (0, 0, 0))], ids=["one draft", "choices"])
def test_a_block_keeps_as_many_as_a_chain_where_there_is_nothing_to_win(parents, kinds):
    p, q = tables(3, 3, 3), tables(53, 3, 3)
    chain, block = (accepted(RULES[rule], p, drafting(q, parents, kinds)) for rule in ("chain", "block"))
    assert block == pytest.approx(chain, abs=1e-6)


def test_a_second_child_adds_what_the_closed_form_says():
    """Kept: the first with sum min(p, q); else the second, against the normalised max(0, p - q)."""
    p, q = tables(4, 3, 1), tables(54, 3, 1)
    first = float(torch.minimum(p[0], q[0]).sum())
    left = (p[0] - q[0]).clamp_min(0)
    second = float(torch.minimum(left / left.sum(), q[0]).sum())
    kept = accepted(tree_rule, p, drafting(q, PAIR, (DRAW, DRAW)))
    assert kept == pytest.approx(first + (1 - first) * second, abs=1e-6)
