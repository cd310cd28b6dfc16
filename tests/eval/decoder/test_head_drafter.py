"""Trees of a head against slow, obvious ones; chains that stop; the head and an n-gram in one tree."""

from __future__ import annotations

import pytest
import torch

from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters import Drafting, make_drafter
from headtrain.eval.decoder.drafters.base import News
from headtrain.eval.decoder.drafters.head import HeadDrafter
from headtrain.eval.decoder.drafters.hybrid import choose, merge
from headtrain.eval.decoder.drafters.shape import TreeShape
from headtrain.eval.decoder.sampling import Sampling, draw
from headtrain.eval.decoder.verify import sampled_tree
from headtrain.tree import DraftTree

PREFIXES = [[7, 20, 33, 4], [50, 8], [12, 13, 14]]  # of three requests; the last token is the pending one
W = 40  # draft vocab: even target ids


@pytest.fixture(scope="module")
def sharp(target, make):
    """A head that is sure at some places and not at others."""
    head = make[1](target, draft_vocab=W, seed=2)
    head.lm_head.weight.data.mul_(4)
    return head


def news(rows):
    counts = torch.tensor([len(PREFIXES[r]) - 1 for r in rows])
    tokens = [PREFIXES[r][1:] for r in rows]
    padded = torch.tensor([t + [0] * (3 - len(t)) for t in tokens])
    taps = torch.stack([torch.randn(3, 3, 64, generator=torch.Generator().manual_seed(r)) for r in rows])
    return News(padded, counts, taps, taps[:, :, 0], tokens)


def ready(drafter, rows=(0, 1, 2)):
    drafter.start([PREFIXES[r] for r in rows], 8)
    drafter.observe(news(rows))
    return drafter


def after(head, row, path):
    """The head's logits after a request's text and a path of draft tokens, all of it fed as a chain."""
    state, fed = head.start(1, 8), news([row])
    logits, _ = head.extend(state, fed.tokens_BL, fed.taps_BLAH, None, fed.counts_B)
    for token in path:
        logits = head.expand(state, torch.tensor([[token]]))[0][:, 0]
    return logits[0]


def warped(logits, sampling, text):
    """Probabilities over the draft vocab in plain steps: bias, repetition penalty, temperature, top-k."""
    logits = logits.double().tolist()
    for i in range(W):
        logits[i] += (sampling.logit_bias or {}).get(2 * i, 0.0)
        if 2 * i in text:
            logits[i] *= sampling.repetition_penalty if logits[i] < 0 else 1 / sampling.repetition_penalty
    logits = torch.tensor(logits) / (sampling.temperature or 1)
    if sampling.top_k:
        logits[logits < logits.sort().values[-sampling.top_k]] = -torch.inf
    return logits.softmax(-1)


def eagle2(head, row, shape, k, sampling, least):
    """{path: value} of a dynamic tree: expand level by level, then keep the best of all, shallower ones first."""
    every, level = {}, {(): 1.0}
    for _ in range(k):
        children = {}
        for path, value in sorted(level.items(), key=lambda item: -item[1])[: shape.width]:
            if value < least:
                continue
            p = warped(after(head, row, path), sampling, {*PREFIXES[row], *path})
            for i in sorted(range(W), key=lambda i: -p[i])[: shape.width]:
                if p[i] > 0:
                    children[(*path, 2 * i)] = value * float(p[i])
        every |= children
        level = children
    return dict(sorted(every.items(), key=lambda item: (-item[1], len(item[0])))[: shape.nodes])


def paths(tree, row):
    out, parents = [], tree.parents.expand(tree.tokens.shape)[row].tolist()
    for node in range(int(tree.counts[row])):
        assert parents[node] < node
        out.append((*(out[parents[node]] if parents[node] >= 0 else ()), int(tree.tokens[row, node])))
    return out


BIASED = {10: -torch.inf, 12: 3.0, 61: 5.0}  # the last is not in the draft vocab


@pytest.mark.parametrize("sampling", [
    Sampling(), Sampling(0.7, top_k=3), Sampling(repetition_penalty=1.8, logit_bias=BIASED),
])  # fmt: skip
@pytest.mark.parametrize("text, k, least", [("4x16", 4, 0), ("3x5", 5, 0), ("2x99", 3, 0), ("4x16", 4, 0.2)])
def test_a_dynamic_tree_is_the_one_of_a_slow_expansion_and_reranking(text, k, least, sampling, sharp):
    shape = TreeShape.parse(text)
    drafter = ready(HeadDrafter(sharp, sampling, shape, least))
    tree = drafter.propose(k)
    assert tree.q is None and tree.tokens.shape[1] <= drafter.nodes(k)
    for row in range(3):
        expected, found = eagle2(sharp, row, shape, k, sampling, least), paths(tree, row)
        assert set(found) == set(expected) and len(found) == len(expected)
        assert [len(path) for path in found] == sorted(len(path) for path in found), "shallower nodes come first"
        for parent in {path[:-1] for path in found}:  # a node's children: the likeliest is tried first
            values = [expected[path] for path in found if path[:-1] == parent]
            assert values == sorted(values, reverse=True)
    if not least and not sampling.top_k:
        assert tree.counts.tolist() == [drafter.nodes(k)] * 3


def test_levels_that_cannot_change_the_tree_are_not_drafted(sharp, monkeypatch):
    calls = []
    expand = type(sharp).expand
    monkeypatch.setattr(type(sharp), "expand", lambda *a: calls.append(a[2].shape) or expand(*a))
    flat = Sampling(temperature=9.0)  # every child is far less likely than any node of the level above
    tree = ready(HeadDrafter(sharp, flat, TreeShape(4, 16))).propose(5)
    assert len(calls) < 4 and tree.counts.tolist() == [16] * 3
    calls.clear()
    ready(HeadDrafter(sharp, Sampling(), TreeShape(), 0.999)).propose(5)
    assert len(calls) < 4


@pytest.mark.parametrize("least", [0, 0.15])
def test_a_drawn_tree_has_the_draws_of_a_slow_one_and_each_nodes_own_distribution(least, sharp):
    sampling, shape, k = Sampling(1.5, top_k=6, repetition_penalty=1.3), TreeShape.parse("iid-2x8"), 4
    drafter = ready(HeadDrafter(sharp, sampling, shape, least))
    uniform = torch.rand(3, drafter.nodes(k), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    tree = drafter.propose(k, uniform)
    for row in range(3):
        expected, level, column = [], [((), 1.0)], 0
        while column < 8:
            children = []
            for path, value in sorted(level, key=lambda item: -item[1])[:2]:
                p = warped(after(sharp, row, path), sampling, {*PREFIXES[row], *path})
                for u in uniform[row].tolist()[column : column + 2]:
                    token, column = int(draw(p[None], torch.tensor([u]).double())), column + 1
                    children.append(((*path, 2 * token), value * float(p[token]) if value >= least else 0))
                    if value >= least:
                        expected.append((children[-1][0], p))
            level = children
        found = paths(tree, row)
        assert found == [path for path, _ in expected]
        for node, (_, p) in enumerate(expected):
            assert torch.allclose(tree.q[row, node, : 2 * W : 2], p.float(), atol=1e-6)
            assert tree.q[row, node].sum() == pytest.approx(1, abs=1e-5)
    assert (min(tree.counts) < 8) == bool(least)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)])
def test_a_chain_goes_on_while_the_product_of_its_confidences_is_high_enough(sampling, sharp):
    uniform = torch.rand(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    whole = ready(HeadDrafter(sharp, sampling)).propose(5, uniform)
    short = ready(HeadDrafter(sharp, sampling, min_confidence=0.3)).propose(5, uniform)
    for row, (tokens, some) in enumerate(zip(whole.tokens.tolist(), short.tokens.tolist(), strict=True)):
        value, count = 1.0, 0
        while count < 5 and value >= 0.3:
            p = warped(after(sharp, row, tokens[:count]), sampling, set())
            value *= float(p[tokens[count] // 2])
            count += 1
        assert int(short.counts[row]) == count and some[:count] == tokens[:count]
    assert whole.counts.tolist() == [5] * 3 and len(set(short.counts.tolist())) > 1
    assert ready(HeadDrafter(sharp, sampling, min_confidence=1.0)).propose(5, uniform).tokens.shape[1] <= 2


def test_a_request_that_leaves_does_not_change_the_trees_of_the_others(sharp):
    drafter = ready(HeadDrafter(sharp, Sampling(repetition_penalty=1.5), TreeShape(3, 9)))
    drafter.propose(3)
    drafter.select(torch.tensor([2, 0]))
    more = news([2, 0])
    drafter.observe(more)
    alone = ready(HeadDrafter(sharp, Sampling(repetition_penalty=1.5), TreeShape(3, 9)), rows=(0,))
    alone.observe(news([0]))
    assert paths(drafter.propose(3), 1) == paths(alone.propose(3), 0)


@pytest.mark.parametrize("text, shape", [
    ("chain", TreeShape()), ("4x16", TreeShape(4, 16)), ("iid-2x8", TreeShape(2, 8, drawn=True)),
])  # fmt: skip
def test_shapes_are_read_as_users_write_them(text, shape):
    assert TreeShape.parse(text) == shape


@pytest.mark.parametrize("text", ["", "tree", "4", "4x", "x4", "1x8", "4x3", "0x4", "iid-4", "iid_2x8", "4x16x2"])
def test_a_shape_that_cannot_be_read_is_named_beside_the_forms(text):
    with pytest.raises(ValueError, match=f"tree '{text}'.*chain, 4x16.*iid-2x8"):
        TreeShape.parse(text)


def test_the_number_of_nodes_follows_width_depth_and_limit():
    assert [TreeShape().kept(k) for k in (0, 1, 5)] == [0, 1, 5]
    assert [TreeShape(4, 16).kept(k) for k in (0, 1, 2, 3)] == [0, 4, 16, 16]
    assert [TreeShape(3, 99).kept(k) for k in (1, 2, 3)] == [3, 12, 21]


def test_trees_that_cannot_be_are_refused(sharp):
    with pytest.raises(ValueError, match="temperature above 0"):
        HeadDrafter(sharp, Sampling(), TreeShape.parse("iid-2x8"))
    with pytest.raises(ValueError, match=r"width 41 .* the head has 40"):
        HeadDrafter(sharp, Sampling(), TreeShape(41, 99))


# ------------------------------------------------------------------------------------------------- two in one

def test_a_copied_chain_shares_what_the_drafted_tree_has_and_branches_off_after_it():
    #   row 0: 1 (2 3)  4        copy 1 3 9: shares 1 and 3, adds 9 below 3
    #   row 1: the same tree     copy 5 1:   adds 5 at the root and 1 below it
    #   row 2: two nodes of it   copy 1 3:   3 is not there (any more), so it is added
    #   row 3: nothing           copy 1
    #   row 4: the same tree     no copy
    drafted = DraftTree(
        torch.tensor([[1, 4, 2, 3]]).repeat(5, 1), torch.tensor([-1, -1, 0, 0]), torch.tensor([4, 4, 2, 0, 4])
    )
    copied = DraftTree.chain(
        torch.tensor([[1, 3, 9], [5, 1, 0], [1, 3, 0], [1, 0, 0], [1, 3, 9]]), torch.tensor([3, 2, 2, 1, 0])
    )
    tree = merge(drafted, copied)
    assert tree.counts.tolist() == [5, 6, 3, 1, 4] and tree.q is None
    four = [(1,), (4,), (1, 2), (1, 3)]
    assert [paths(tree, row) for row in range(5)] == [
        [*four, (1, 3, 9)], [*four, (5,), (5, 1)], [(1,), (4,), (1, 3)], [(1,)], four,
    ]  # fmt: skip


def test_one_or_the_other_takes_whole_rows_of_chains_and_trees():
    chain = DraftTree.chain(torch.tensor([[1, 2, 3, 4, 5], [0, 0, 0, 0, 0]]), torch.tensor([5, 0]))
    forked = torch.tensor([[7, 8, 9]] * 2), torch.tensor([[-1, -1, 1]] * 2)
    tree = DraftTree(*forked, torch.tensor([3, 3]), torch.rand(2, 3, 10))
    first = torch.tensor([[True], [False]])
    both = choose(first, chain, tree)
    assert [paths(both, row) for row in range(2)] == [
        [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5)], [(7,), (8,), (8, 9)],
    ]  # fmt: skip
    assert torch.equal(both.q[1, :3], tree.q[1]) and both.q[0].argmax(-1).tolist() == [1, 2, 3, 4, 5]
    short = choose(first, DraftTree.chain(torch.tensor([[1], [0]]), torch.tensor([1, 0])), tree)
    assert [len(paths(short, row)) for row in range(2)] == [1, 3]


def merged_wrongly(drafted, copied):
    """The copy first, and drawn tokens that repeat it left out: the rule that `merge` warns of."""
    away = (drafted.tokens == copied.tokens) & (drafted.parents < 0)
    tokens = torch.cat([copied.tokens, torch.where(away, 2, drafted.tokens)], 1)  # 2 stands in for "none", with q = 0
    q = torch.cat([torch.eye(3)[copied.tokens], torch.where(away[..., None], torch.zeros(3), drafted.q)], 1)
    return DraftTree(tokens, torch.tensor([-1, -1, -1]), drafted.counts + 1, q)


@pytest.mark.parametrize("rule, exact", [(merge, True), (merged_wrongly, False)])
def test_a_merged_tree_of_drawn_and_copied_tokens_keeps_the_targets_distribution(rule, exact):
    """Two children drawn from q and a copied one, over three tokens: the first new token's frequency is p."""
    n, random = 200_000, torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.7, 0.2, 0.1])
    uniform = torch.rand(6, n, generator=random, dtype=torch.float64)
    tokens = torch.stack([draw(q.expand(n, 3), u) for u in uniform[:2]], 1)
    drafted = DraftTree(tokens, torch.tensor([-1, -1]), torch.full((n,), 2), q.expand(n, 2, 3).contiguous())
    tree = rule(drafted, DraftTree.chain(torch.zeros(n, 1, dtype=torch.long)))
    verdict = sampled_tree(
        p.expand(n, 4, 3), tree.tokens, tree.parents, tree.counts, tree.q, uniform[2:5].T, uniform[5]
    )
    kept = tree.tokens.gather(1, verdict.path_BD[:, :1].clamp_min(0))[:, 0]
    first = torch.where(verdict.accepted_B > 0, kept, verdict.bonus_B)
    expected = p * n
    chi2 = float(((torch.bincount(first, minlength=3) - expected) ** 2 / expected).sum())
    assert (chi2 < 14) == exact, chi2  # 14: one in a thousand with two degrees of freedom


# ------------------------------------------------------------------------------------------------- in the decoder

@pytest.fixture(scope="module")
def reference(tiny, prompts, transformers_says):
    return [transformers_says(tiny[1], prompt, 16) for prompt in prompts]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name, drafting", [
    ("head", {"tree": "4x16"}), ("head", {"tree": "2x5", "min_confidence": 0.05}), ("head", {"min_confidence": 0.2}),
    ("head+ngram", {"tree": "3x9"}), ("head+ngram-tree", {}), ("head+ngram-tree", {"tree": "3x9"}),
])  # fmt: skip
def test_greedy_text_is_that_of_transformers(name, drafting, batch, target, sharp, prompts, reference):
    drafter = make_drafter(name, sharp, drafting=Drafting(**drafting))
    answers = decode(target, drafter, prompts, k=4, max_new_tokens=16, batch=batch)
    assert [a.ids for a in answers] == reference
    assert max(step.accepted for a in answers for step in a.steps) > 0
    assert max(step.nodes for a in answers for step in a.steps) <= drafter.nodes(4)


SAMPLING = {"temperature": 1.3, "top_k": 6}


@pytest.mark.parametrize("name, drafting", [
    ("head", {"tree": "2x6"}), ("head", {"tree": "iid-2x6"}), ("head", {"tree": "iid-2x6", "min_confidence": 0.3}),
    ("head", {"min_confidence": 0.3}), ("head+ngram", {"tree": "iid-2x6"}), ("head+ngram-tree", {}),
    ("head+ngram-tree", {"tree": "iid-2x6"}), ("head+ngram-tree", {"tree": "2x6"}),
])  # fmt: skip
def test_sampled_texts_follow_the_targets_own_distribution(name, drafting, make):
    """4000 requests of one prompt, three tokens each, against the exact probabilities of every three-token text."""
    target, theirs = make[0](vocab=8, seed=1)
    for model in (target, theirs):
        model.lm_head.weight.data.mul_(0.2)
    target.model.generation_config.eos_token_id, target.tokenizer.eos_token_id = None, None
    prompt, n = [6, 7, 6, 7, 3, 6], 4000
    head = make[1](target, draft_vocab=4)
    drafter = make_drafter(name, head, Sampling(**SAMPLING), Drafting(**drafting))
    answers = decode(target, drafter, [prompt] * n, k=2, max_new_tokens=3, batch=2000, **SAMPLING)
    counts = torch.zeros(8, 8, 8)
    for answer in answers:
        counts[tuple(answer.ids)] += 1
    texts = torch.cartesian_prod(*[torch.arange(8)] * 2)
    logits = theirs(torch.cat([torch.tensor(prompt).expand(64, -1), texts], 1)).logits.detach()[:, -3:]
    logits[logits < logits.topk(6, -1).values[..., -1:]] = -torch.inf
    p = (logits / 1.3).softmax(-1)
    expected = (p[:, 0].gather(1, texts[:, :1]) * p[:, 1].gather(1, texts[:, 1:]) * p[:, 2]).view(8, 8, 8) * n
    assert not counts[expected == 0].any()
    big = expected >= 5
    chi2, freedom = float(((counts - expected)[big] ** 2 / expected[big]).sum()), int(big.sum())
    assert freedom > 20 and chi2 < freedom + 4 * (2 * freedom) ** 0.5
    assert sum(step.accepted for a in answers for step in a.steps) > 0.1 * n


@pytest.mark.parametrize("name", ["head", "head+ngram", "head+ngram-tree"])
@pytest.mark.parametrize("tree", ["iid-2x3", "iid-2x8", "2x3", "3x4"])
def test_a_sampled_trees_answer_does_not_depend_on_its_batch(name, tree, target, sharp):
    """Also where the tree has no more nodes than a chain of that depth, so that it might be taken for one."""
    drafter = make_drafter(name, sharp, Sampling(6.0), Drafting(tree=tree), target)
    prompts = [[7 + i, 8, 9] for i in range(5)]
    options = {"k": 5, "max_new_tokens": 12, "temperature": 6.0}
    together = [a.ids for a in decode(target, drafter, prompts, **options)]
    assert together == [a.ids for a in decode(target, drafter, prompts, batch=1, **options)]
