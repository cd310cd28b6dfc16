"""Every objective against its formula by autograd, and position weights against worked numbers."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from headtrain.heads.layers import Pairs, Teacher, fused_loss, pairs_at_once
from headtrain.heads.objectives import LK_SHARPNESS, OBJECTIVES, Rows, dpace, fixed, smooth_l1, vat

M, U, V, H = 23, 9, 14, 6


def formula(name, z, t, lse, label, hard):
    """Loss per row from draft logits z, teacher logits t (both [m, V]), full-vocabulary lse [m] and labels [m]."""
    log_q, p_inside, p = torch.log_softmax(z, -1), torch.softmax(t, -1), (t - lse[:, None]).exp()
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    soft = -(p_inside * log_q).sum(-1)
    share = (-LK_SHARPNESS * alpha).exp().detach()
    kl = F.kl_div(log_q, p_inside, reduction="none").sum(-1)
    loss = {
        "soft_ce": soft,
        "tv": 1 - alpha,
        "lk_alpha": -alpha.log(),
        "lk_hybrid": share * kl + (1 - share) * (1 - alpha),
    }[name]
    return (1 - hard) * loss + hard * F.cross_entropy(z, label, reduction="none")


@pytest.mark.parametrize("hard", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_an_objective_has_the_loss_and_gradients_of_its_formula(name, hard):
    torch.manual_seed(3)
    x, w = (2 * torch.randn(M, H)).requires_grad_(), torch.randn(V, H, requires_grad=True)
    teacher, which, weight = 2 * torch.randn(U, V), torch.randint(U, (M,)), torch.rand(M)
    lse = torch.logaddexp(teacher.logsumexp(-1), torch.randn(U))  # some probability lies outside the draft vocabulary
    label = torch.randint(V, (U,))[which]
    rows = Rows(x.detach(), which, label, lse, lambda chosen, hit: weight)
    graded = OBJECTIVES[name](rows, w.detach(), teacher, hard)
    z = x @ w.T
    expected = formula(name, z, teacher[which], lse[which], label, hard)
    (expected * weight).sum().backward()
    assert torch.allclose(graded.loss, expected, atol=1e-5)
    assert torch.allclose(graded.dx, x.grad, atol=1e-5)
    assert torch.allclose(graded.dw, w.grad, atol=1e-5)
    assert torch.equal(graded.hit, z.argmax(-1) == label)
    bare = OBJECTIVES[name](rows, w.detach(), teacher, hard, needs_x=False, needs_w=False)
    assert bare.dx is None and bare.dw is None and torch.equal(bare.loss, graded.loss)


@pytest.mark.parametrize("name", ["tv", "lk_alpha", "lk_hybrid"])
def test_acceptance_counts_probability_outside_the_draft_vocabulary_as_lost(name):
    t = torch.zeros(1, 2)  # the draft vocabulary's two tokens; the teacher has half of its mass elsewhere
    zero = torch.zeros(1).long()
    rows = Rows(torch.zeros(1, 1), zero, zero, torch.tensor([4.0]).log(), lambda chosen, hit: chosen)
    loss = OBJECTIVES[name](rows, torch.ones(2, 1), t).loss.item()  # q = 1/2, 1/2; p = 1/4, 1/4: α = 1/2
    share = torch.tensor(-LK_SHARPNESS * 0.5).exp().item()
    expected = {"tv": 0.5, "lk_alpha": 0.6931472, "lk_hybrid": (1 - share) * 0.5}[name]
    assert loss == pytest.approx(expected, abs=1e-5)


def test_smooth_l1_is_hubers_loss_averaged_over_the_hidden_size():
    x, teacher = torch.tensor([[0.5, 3.0], [0.0, 0.0]]), torch.zeros(2, 2)
    assert smooth_l1(x, teacher).tolist() == pytest.approx([(0.125 + 2.5) / 2, 0.0])


CHOSEN = torch.tensor([[1.0, 0.5, 0.0], [0.2, 0.0, 0.0]])
HIT = torch.tensor([[True, False, True], [False, False, False]])


def test_fixed_weights_fall_with_the_depth():
    assert torch.allclose(fixed(CHOSEN, HIT, 0.8), torch.tensor([[1.0, 0.8, 0.64]] * 2))


def test_dpace_weights_are_the_remaining_expected_length():
    # p̃ = 1, .75, .5 and .6, .5, .5; prefix products 1, .75, .375 and .6, .3, .15; then sums from the right
    expected = torch.tensor([[2.125, 1.125, 0.375], [1.05, 0.45, 0.15]])
    assert torch.allclose(dpace(CHOSEN, HIT, 0.8), expected)


def test_vat_weights_start_to_fall_after_the_first_rejection():
    assert torch.allclose(vat(CHOSEN, HIT, 0.5), torch.tensor([[1.0, 1.0, 0.5], [1.0, 0.5, 0.25]]))


def test_the_logits_held_at_a_time_do_not_grow_with_the_vocabulary_on_a_cpu():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    held = [pairs_at_once(vocab, cpu) * vocab for vocab in (8192, 32768, 131072, 262144)]
    assert held[0] < held[1] == held[2] == held[3]
    assert pairs_at_once(262144, gpu) == 1024


@pytest.mark.parametrize("chunk", [1, 10, 1000, None])
def test_dynamic_weights_see_whole_chains_whatever_the_chunk(chunk):
    torch.manual_seed(0)
    depths, slots = 3, 12
    slot, depth = torch.arange(slots).repeat(depths), torch.arange(depths).repeat_interleave(slots)
    there = (torch.rand(len(slot)) < 0.8) & (slot % 5 != 2)  # missing pairs, and slots without any
    slot, depth = slot[there], depth[there]
    x, w, head = torch.randn(len(slot), H), torch.randn(V, H), torch.randn(V, H)
    last = torch.randn(slots + depths + 1, H)
    label_N = torch.randint(V, (len(last),))
    at = slot + 1 + depth
    seen = {}

    def weights(chosen_CD, hit_CD):
        for c, d in hit_CD.nonzero().tolist():
            seen.setdefault(d, set()).add(round(chosen_CD[c, d].item(), 6))
        return vat(chosen_CD, hit_CD, 0.5)

    scale = torch.tensor([1.0, 0.5, 0.25])
    loss, loss_M, hit_M = fused_loss(
        partial(OBJECTIVES["soft_ce"], hard=0.0), weights, scale, x, w, Pairs(slot, depth, label_N[at]),
        Teacher(last, torch.zeros(len(last)), head), chunk,
    )  # fmt: skip
    hits = torch.zeros(slots, depths, dtype=torch.bool)
    hits[slot, depth] = hit_M
    by_hand = vat(hits.float(), hits, 0.5) * scale
    assert loss.item() == pytest.approx((by_hand[slot, depth] * loss_M).sum().item(), rel=1e-5)
    log_q = torch.log_softmax(x @ w.T, -1)
    assert torch.allclose(loss_M, -(torch.softmax(last @ head.T, -1)[at] * log_q).sum(-1), atol=1e-5)
    assert seen
