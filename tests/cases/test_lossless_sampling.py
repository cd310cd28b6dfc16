"""A vocabulary of three, p = (0.5, 0.3, 0.2), q = (0.2, 0.5, 0.3): drafts drawn from q, and q's argmax as a draft."""

import pytest
import torch

from headtrain.eval.decoder.sampling import Sampling, draw, probabilities
from headtrain.eval.decoder.verify import (
    block_chain,
    greedy_chain,
    ratio,
    residual,
    sampled_chain,
    sampled_tree,
)

P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
DRAWS = 200_000


def as_tree(p, drafts, counts, q, accept, bonus):
    return sampled_tree(p, drafts, torch.tensor([-1]), counts, q, accept, bonus)


def test_a_draft_drawn_from_q_is_kept_with_the_shared_mass_and_else_replaced_by_token_0():
    kept = ratio(P.expand(3, 3), torch.arange(3), Q.expand(3, 3)).clamp_max(1)
    assert float((kept * Q).sum()) == pytest.approx(0.7)  # = sum of min(p, q)
    for token in (1, 2):  # token 0 is never rejected
        assert residual(P[None], torch.tensor([token]), Q[None])[0].tolist() == [1, 0, 0]


def test_an_argmax_is_kept_with_its_probability_and_else_replaced_by_the_others():
    draft = torch.tensor([1])
    assert float(ratio(P[None], draft, None)) == pytest.approx(0.3)
    assert float(ratio(P[None], draft, Q[None])) == pytest.approx(0.6)  # what soft q would wrongly give
    assert residual(P[None], draft, None)[0].tolist() == pytest.approx([5 / 7, 0, 2 / 7])


@pytest.mark.parametrize("rule", [sampled_chain, block_chain, as_tree])
@pytest.mark.parametrize("argmax", [False, True])
def test_two_hundred_thousand_draws_follow_the_target(rule, argmax):
    uniform = torch.rand(3, DRAWS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    drafts = torch.ones(DRAWS, dtype=torch.long) if argmax else draw(Q.expand(DRAWS, -1), uniform[0])
    p, q = P.expand(DRAWS, 2, 3), None if argmax else Q.expand(DRAWS, 1, 3)
    verdict = rule(p, drafts[:, None], torch.ones_like(drafts), q, uniform[1][:, None], uniform[2])
    first = torch.where(verdict.accepted_B > 0, drafts, verdict.bonus_B)
    assert (torch.bincount(first, minlength=3) / DRAWS - P).abs().max() < 0.005
    assert float(verdict.accepted_B.float().mean()) == pytest.approx(0.3 if argmax else 0.7, abs=0.005)


def test_at_temperature_0_a_draft_stays_exactly_where_it_is_the_argmax():
    verdict = greedy_chain(P.argmax().expand(3, 2), torch.arange(3)[:, None], torch.ones(3, dtype=torch.long))
    assert verdict.accepted_B.tolist() == [1, 0, 0]
    assert verdict.bonus_B.tolist() == [0, 0, 0]  # as plain decoding goes on


@pytest.mark.parametrize("sampling", [Sampling(0.5), Sampling(2.0), Sampling(1.0, top_p=0.7), Sampling(1.0, top_k=2)])
def test_settings_act_on_both_sides_before_the_test_and_a_draft_vocab_has_q_0_elsewhere(make_head, sampling):
    """The first token's exact distribution: kept drafts, and what rejected ones leave."""
    head = make_head([0, 3, 5, 7])  # of 20 target tokens
    p = probabilities(torch.randn(20, generator=torch.Generator().manual_seed(0)), sampling)
    drafted = probabilities(torch.tensor([2.0, 1.5, 0.2, -0.5]), sampling)
    q = torch.zeros(20).index_copy(0, head.to_target_ids(torch.arange(4)), drafted)
    assert float(q.sum()) == pytest.approx(1) and q.nonzero()[:, 0].tolist()[:2] == [0, 3]
    out = torch.zeros(20)
    for token in q.nonzero()[:, 0]:
        kept = ratio(p[None], token[None], q[None])[0].clamp_max(1)
        out[token] += q[token] * kept
        out += q[token] * (1 - kept) * residual(p[None], token[None], q[None])[0]
    torch.testing.assert_close(out, p, atol=1e-6, rtol=0)
