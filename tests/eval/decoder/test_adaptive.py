"""When a request stops speculating and when it tries again, by hand-computed sequences; who is asked meanwhile."""

from __future__ import annotations

import pytest
import torch

from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters import Drafter, Drafting, NgramDrafter, make_drafter
from headtrain.eval.decoder.drafters.adaptive import LONGEST_PAUSE, AdaptiveDrafter, Request
from headtrain.eval.decoder.drafters.base import News
from headtrain.tree import DraftTree


def run(shares, steps, plain_below=0.4, drafted=5):
    """Lets a request run for some steps; `shares(n)`: tokens accepted of its n-th drafted step. Its plain steps."""
    row, plain, n = Request(), [], 0
    for step in range(steps):
        if row.plain:
            plain.append(step)
            row.add(0, 0, plain_below)
        else:
            row.add(drafted, shares(n), plain_below)
            n += 1
    return plain


def test_a_request_below_the_threshold_pauses_and_each_further_bad_window_doubles_the_pause():
    expected = [*range(8, 16), *range(24, 40), *range(48, 80), *range(88, 152)]  # 8, 16, 32, 64 plain steps
    assert run(lambda n: 1, 152) == expected  # 20 % of the drafts
    assert run(lambda n: 1, 5000)[-1] < 5000 and len(run(lambda n: 1, 5000)) / 5000 > 0.9
    assert LONGEST_PAUSE == 128


def test_at_the_threshold_and_above_a_request_goes_on_drafting():
    assert run(lambda n: 2, 200) == []  # exactly 40 %
    assert run(lambda n: 2 if n else 1, 200)[0] == 8  # 15 of 40, then 38 %


def test_the_window_rolls():
    """Full acceptance at first, none later: 40 % of 8 steps of 5 is 16 tokens, and 3 good steps have only 15."""
    assert run(lambda n: 5 if n < 20 else 0, 40)[0] == 25


def test_a_good_window_makes_the_next_pause_short_again():
    bad, good = (lambda n: 0), (lambda n: 5)
    plain = run(lambda n: bad(n) if n < 16 or n >= 24 else good(n), 90)
    # windows of drafted steps: 8 bad, pause 8; 8 bad, pause 16; 8 good; then bad until only 3 of 8 are good
    assert plain[:24] == [*range(8, 16), *range(24, 40)]
    assert plain[24:32] == list(range(53, 61))


def test_steps_without_drafts_are_no_evidence():
    assert run(lambda n: 0, 100, drafted=0) == []


class Scripted(Drafter):
    """Drafts three tokens a request and counts how often it is asked and told."""

    name, taps = "scripted", (1,)

    def __init__(self, tree=False):
        self.asked = self.told = 0
        self.tree = tree

    def start(self, prompts, capacity):
        self.rows = len(prompts)

    def observe(self, news):
        self.told += 1

    def propose(self, k, uniform_BN=None):
        self.asked += 1
        tokens = torch.full((self.rows, 3), 7)
        if self.tree:  # two children of the root, one grandchild: two deep
            return DraftTree(tokens, torch.tensor([-1, -1, 0]), torch.full((self.rows,), 3))
        return DraftTree.chain(tokens)

    def select(self, rows):
        self.rows = len(rows)


def news(*accepted):
    rows = [[7] * a + [8] for a in accepted]
    width = max(map(len, rows))
    tokens = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    return News(tokens, torch.tensor([len(r) for r in rows]), None, torch.zeros(len(rows), width, 4), rows)


def test_in_a_batch_the_others_go_on_and_when_all_pause_nobody_is_asked():
    inner = Scripted()
    drafter = AdaptiveDrafter(inner, 0.4)
    assert drafter.name == "scripted" and drafter.taps == (1,) and drafter.nodes(3) == 3
    drafter.start([[1], [1], [1]], 99)
    drafter.observe(news(0, 0, 0))  # the prompt
    for _ in range(8):
        assert drafter.propose(3).counts.tolist() == [3, 3, 3]
        drafter.observe(news(0, 3, 3))
    for _ in range(2):
        assert drafter.propose(3).counts.tolist() == [0, 3, 3]
        drafter.observe(news(0, 3, 0))
    drafter.select(torch.tensor([2, 0]))
    drafter.observe(news(0, 0))
    assert [row.plain for row in drafter._rows] == [0, 5]
    for _ in range(2):
        assert drafter.propose(3).counts.tolist() == [3, 0]
        drafter.observe(news(0, 0))
    asked, told = inner.asked, inner.told
    for _ in range(3):
        tree = drafter.propose(3)
        assert tree.tokens.shape == (2, 0) and tree.counts.tolist() == [0, 0]
        drafter.observe(news(0, 0))
    assert inner.asked == asked and inner.told == told + 3
    assert drafter.propose(3).counts.tolist() == [0, 3]  # the pause is over


def test_of_a_tree_its_depth_counts_as_drafted():
    drafter = AdaptiveDrafter(Scripted(tree=True), 0.5)
    drafter.start([[1], [1]], 99)
    drafter.observe(news(0, 0))
    for _ in range(8):
        drafter.propose(2)
        drafter.observe(news(1, 0))
    assert drafter.propose(2).counts.tolist() == [3, 0]  # 1 of 2 deep is 50 %


@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_output_stays_the_targets_own_with_pauses(batch, target, head, prompts):
    prompts = prompts[:5]
    plain = [a.ids for a in decode(target, make_drafter("none"), prompts, k=0, max_new_tokens=30)]
    for name in ("head", "layer_skip"):
        drafter = make_drafter(name, head, None, Drafting(plain_below=0.6, skip_from=1), target)
        answers = decode(target, drafter, prompts, k=3, max_new_tokens=30, batch=batch)
        assert [a.ids for a in answers] == plain
        assert any(step.drafted == 0 for answer in answers for step in answer.steps[8:12])


def test_only_what_drafts_is_wrapped_and_a_wrong_threshold_is_said():
    assert isinstance(make_drafter("ngram", drafting=Drafting(plain_below=0.4)), AdaptiveDrafter)
    assert isinstance(make_drafter("ngram"), NgramDrafter)
    assert make_drafter("none", drafting=Drafting(plain_below=0.4)).name == "none"
    with pytest.raises(ValueError, match=r"plain_below=1\.5"):
        AdaptiveDrafter(Scripted(), 1.5)
