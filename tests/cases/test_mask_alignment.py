"""Which positions are supervised at each depth: tokens, rope positions, labels and teachers, by hand, for head types
that draft from a slot's features. One row of 9 tokens, prompt 0–3, answer 4–8; three depths."""

import pytest
import torch

from headtrain.heads import unrolled
from headtrain.heads.base import Batch
from headtrain.heads.peagle import PEagleConfig, PEagleHead
from headtrain.heads.vocab import trained_pairs

IDS, LOSS_MASK, DEPTHS, VOCAB, MASK = [10, 11, 12, 13, 14, 15, 16, 17, 2], [0, 0, 0, 0, 1, 1, 1, 1, 1], 3, 20, 19
SLOTS = {0: [3, 4, 5, 6], 1: [3, 4, 5], 2: [3, 4]}
LABELS = {0: [5, 6, 7, 8], 1: [6, 7, 8], 2: [7, 8]}  # token indices


def row(supervised=LOSS_MASK):
    """`argmax` says of each position which one it is, so that a label names its teacher."""
    n, g = len(IDS), torch.Generator().manual_seed(0)
    return Batch(
        ids_N=torch.tensor(IDS), positions_N=torch.arange(n), cu_R1=torch.tensor([0, n]),
        supervised_N=torch.tensor(supervised).bool(), taps_NAT=torch.randn(n, 3, 16, generator=g),
        last_NT=torch.randn(n, 16, generator=g), argmax_N=torch.arange(n), logsumexp_N=torch.zeros(n),
    )  # fmt: skip


@pytest.fixture
def peagle(parts):
    torch.manual_seed(0)
    head = PEagleHead(PEagleConfig(
        type="peagle", hidden_size=16, target_hidden_size=16, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=VOCAB, draft_vocab_size=VOCAB, taps=[1, 2, 3], target_layers=8,
        unroll=DEPTHS, layers=2, mask_token=MASK,
    ))  # fmt: skip
    head.attach(parts.embedding, parts.lm_head)
    return head


@pytest.fixture
def eagle3(make_head):
    return make_head(list(range(VOCAB)), unroll=DEPTHS)


@pytest.fixture(params=["eagle3", "peagle"])
def head(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def seen(monkeypatch):
    """What the head's forward looks at: `pairs`, `read` (token ids) and `positions`, in the order of its calls."""
    seen = {"read": [], "positions": []}
    plain = unrolled.fused_loss

    def loss(objective, weights, scale_D, x_MH, weight, pairs, *more):
        seen["pairs"], seen["scale"] = pairs, scale_D
        return plain(objective, weights, scale_D, x_MH, weight, pairs, *more)

    def watch(head, name, key, argument):
        own = getattr(head, name)

        def call(*args, **more):
            seen[key].append(args[argument].tolist())
            return own(*args, **more)

        monkeypatch.setattr(head, name, call)

    monkeypatch.setattr(unrolled, "fused_loss", loss)
    seen["watch"] = watch
    return seen


def by_depth(pairs):
    return {d: pairs.slot_M[pairs.depth_M == d].tolist() for d in range(DEPTHS)}


def test_the_supervised_pairs_are_those_whose_chain_lies_in_the_answer():
    batch = row()
    trained, _ = trained_pairs(batch.supervised_N, batch.argmax_N, None, batch.cu_R1, DEPTHS)
    assert {d: trained[d].nonzero()[:, 0].tolist() for d in range(DEPTHS)} == SLOTS


def test_a_head_is_trained_on_these_slots_each_with_the_choice_of_the_position_before_its_label(head, seen):
    output = head(row())
    assert by_depth(seen["pairs"]) == SLOTS and output.count_D.tolist() == [4, 3, 2]
    pairs = seen["pairs"]
    for d, labels in LABELS.items():
        assert pairs.label_M[pairs.depth_M == d].tolist() == [label - 1 for label in labels]
    assert torch.allclose(seen["scale"], 1 / torch.tensor([4.0, 3.0, 2.0])), "each depth is a mean over its pairs"


def test_two_answers_in_a_row_do_not_cross_into_each_other(head, seen):
    head(row([0, 0, 1, 1, 1, 0, 1, 1, 1]))  # answers 2–4 and 6–8
    assert by_depth(seen["pairs"]) == {0: [1, 2, 5, 6], 1: [1, 5], 2: []}


def test_eagle3_reads_the_token_after_the_last_known_one_at_rope_position_slot_plus_depth(eagle3, seen):
    seen["watch"](eagle3, "_split", "positions", 1)
    eagle3(row())
    assert seen["positions"] == [list(range(9)), [4, 5, 6], [5, 6]]  # depth 0 covers the text, for its keys


def test_peagle_reads_the_text_then_nothing_but_mask_tokens_at_rope_position_slot_plus_depth(peagle, seen):
    seen["watch"](peagle, "_split", "positions", 1)
    seen["watch"](peagle, "_read", "read", 0)
    peagle(row())
    layers = 2
    assert seen["positions"] == [list(range(9))] * layers + [[4, 5, 6, 5, 6]] * layers  # depths 1 and 2 in one pass
    assert seen["read"] == [IDS, [MASK]]
