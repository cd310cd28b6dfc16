"""A teacher whose best token is not in the draft vocabulary: four supervised positions, worked by hand."""

import math
from functools import partial

import pytest
import torch

from headtrain.config import TrainConfig
from headtrain.heads import unrolled
from headtrain.heads.base import Batch
from headtrain.heads.layers import fused_loss, rms_norm
from headtrain.heads.vocab import trained_pairs
from headtrain.training.log import Tally
from headtrain.training.ranks import Ranks

SELECTED = [0, 3, 5, 7, 11, 19]
TEACHER = [{3: 0.6, 7: 0.2, 8: 0.2}, {4: 0.7, 3: 0.3}, {19: 0.9, 11: 0.1}, {8: 1.0}]
RENORMALISED = {0: [0, 0.75, 0, 0.25, 0, 0], 2: [0, 0, 0, 0, 0.1, 0.9]}  # of the positions that count
# The head below gives its logits as 5 to the label and 0 to the five others; log(e^5 + 5) = 5.0331347.
LOSS = {0: 5.0331347 - 5 * 0.75, 2: 5.0331347 - 5 * 0.9}


@pytest.fixture
def batch():
    """Slots 0 … 3 are taught by positions 1 … 4. The target's hidden state is its log-probabilities (lm_head = 1)."""
    last = torch.full((6, 20), -1e4)
    for position, row in enumerate(TEACHER, 1):
        for token, p in row.items():
            last[position, token] = math.log(p)
    return Batch(
        ids_N=torch.tensor([1, 2, 6, 9, 10, 12]), positions_N=torch.arange(6), cu_R1=torch.tensor([0, 6]),
        supervised_N=torch.tensor([False, True, True, True, True, True]),
        taps_NAT=torch.randn(6, 3, 20, generator=torch.Generator().manual_seed(0)), last_NT=last,
        argmax_N=last.argmax(-1), logsumexp_N=last.logsumexp(-1),
    )  # fmt: skip


@pytest.fixture
def head(make_head, batch):
    """One whose lm_head is solved for the logits of LOSS at slots 0 and 2, by what its drafting path gives there."""
    made = make_head(SELECTED, hidden_size=20, target_hidden_size=20, unroll=1)
    made.attach(torch.randn(20, 20, generator=torch.Generator().manual_seed(1)), torch.eye(20))
    state = made.start(4, 8)
    tokens, taps, last = (x[None].expand(4, *x.shape) for x in (batch.ids_N.roll(-1), batch.taps_NAT, batch.last_NT))
    _, hidden = made.extend(state, tokens, taps, last, torch.tensor([1, 2, 3, 4]))
    normed = rms_norm(hidden, made.norm.weight, 1e-5)[[0, 2]]
    wanted = torch.zeros(2, 6)
    wanted[0, 1] = wanted[1, 5] = 5
    made.lm_head.weight.data.copy_((torch.linalg.pinv(normed) @ wanted).T)
    return made


def test_a_position_counts_only_when_the_full_vocabularys_best_token_is_selected(head, batch):
    assert batch.argmax_N[1:5].tolist() == [3, 4, 19, 8]
    trained, reach = trained_pairs(batch.supervised_N, batch.argmax_N, head.t2d, batch.cu_R1, 1)
    assert reach.nonzero()[:, 1].tolist() == [0, 1, 2, 3]
    assert trained.nonzero()[:, 1].tolist() == [0, 2]


def test_the_loss_is_the_mean_over_the_counted_positions_of_the_renormalised_targets(head, batch):
    output = head(batch)
    assert float(output.loss.detach()) == pytest.approx((LOSS[0] + LOSS[2]) / 2, abs=1e-5)
    assert float(output.loss_D) == pytest.approx(LOSS[0] + LOSS[2], abs=1e-5)
    output.loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in head.parameters())


def test_the_gradient_at_the_logits_is_the_softmax_minus_the_renormalised_target(head, batch):
    """(q − p) / 2 at each of the two positions: their hidden states times lm_head's two solved rows are 5 or 0."""
    head(batch).loss.backward()
    high, low = math.exp(5) / (math.exp(5) + 5), 1 / (math.exp(5) + 5)
    seen = head.lm_head.weight.grad @ head.lm_head.weight.T / 5
    for slot, label in ((0, 1), (2, 5)):
        expected = [((high if v == label else low) - p) / 2 for v, p in enumerate(RENORMALISED[slot])]
        assert seen[:, label].tolist() == pytest.approx(expected, abs=1e-5)


def test_accuracy_is_told_over_the_reachable_and_over_all_supervised_positions(head, batch):
    output = head(batch)
    assert (output.count_D.tolist(), output.reach_D.tolist()) == ([2], [4])
    tally = Tally(head.config, TrainConfig(), torch.device("cpu"))
    tally.add(output, batch)
    said = tally.read(Ranks(0, 1, torch.device("cpu")))
    assert (said["accuracy"], said["accuracy_all"]) == ([1.0], [0.5])


@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_chunks_of_any_size_give_the_loss_and_gradients_of_the_full_vocabularys_softmax(
    head, batch, chunk, monkeypatch
):
    monkeypatch.setattr(unrolled, "fused_loss", partial(fused_loss, chunk=chunk))
    output = head(batch)
    output.loss.backward()
    found = head.lm_head.weight.grad

    full = torch.softmax(batch.last_NT @ torch.eye(20).T, -1)[[1, 3]][:, SELECTED]
    target = full / full.sum(-1, keepdim=True)
    weight = head.lm_head.weight.detach().requires_grad_()
    normed = torch.linalg.pinv(weight.detach()[[1, 5]] / 5).T  # back from the solved lm_head to its inputs
    loss = -(target * torch.log_softmax(normed @ weight.T, -1)).sum(-1).mean()
    loss.backward()
    assert float(output.loss.detach()) == pytest.approx(float(loss.detach()), abs=1e-5)
    torch.testing.assert_close(found, weight.grad, rtol=1e-4, atol=1e-5)


def test_a_batch_in_which_nothing_counts_has_loss_zero_and_no_nan(head, batch):
    batch.argmax_N = torch.full_like(batch.argmax_N, 8)
    output = head(batch)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0 and output.reach_D.tolist() == [4] and output.count_D.tolist() == [0]
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in head.parameters())
