"""The draft vocabulary, its mapping, and which (slot, depth) pairs are trained, against tables worked by hand."""

import pytest
import torch

from headtrain.heads.vocab import choose_draft_vocab, coverage, draft_size, mapping, trained_pairs


def counts(of: dict[int, int], size: int) -> torch.Tensor:
    out = torch.zeros(size, dtype=torch.long)
    for token, number in of.items():
        out[token] = number
    return out


SEEN = counts({3: 50, 7: 40, 11: 30, 0: 25, 5: 10, 8: 9, 12: 9}, 20)


def test_the_most_frequent_tokens_and_the_end_token_are_chosen_and_mapped_by_offsets():
    selected = choose_draft_vocab(SEEN, 6, {19})
    d2t, t2d = mapping(selected, 20)
    assert selected.tolist() == [0, 3, 5, 7, 11, 19]
    assert d2t.tolist() == [0, 2, 3, 4, 7, 14] and d2t.dtype == torch.int64
    assert t2d.nonzero()[:, 0].tolist() == [0, 3, 5, 7, 11, 19] and t2d.dtype == torch.bool
    assert (torch.arange(6) + d2t)[[4, 5]].tolist() == [11, 19]
    assert coverage(SEEN, t2d) == (155, 173)


def test_equal_counts_go_to_the_lower_id():
    assert choose_draft_vocab(SEEN, 7, {19}).tolist() == [0, 3, 5, 7, 8, 11, 19]


def test_too_few_seen_tokens_are_filled_with_the_lowest_unused_ids():
    selected = choose_draft_vocab(counts({2: 1, 9: 1, 17: 1}, 20), 8)
    assert selected.tolist() == [0, 1, 2, 3, 4, 5, 9, 17]
    assert mapping(selected, 20)[0].tolist() == [0, 0, 0, 0, 0, 0, 3, 10]


def test_prompt_tokens_come_before_unseen_ones():
    assert choose_draft_vocab(counts({2: 1}, 20), 3, backup_V=counts({2: 1, 15: 4, 9: 2}, 20)).tolist() == [2, 9, 15]


@pytest.mark.parametrize("size", [0, -1, 4.5, 21, True])
def test_a_silly_size_is_refused_with_the_allowed_range(size):
    with pytest.raises(ValueError, match=r"draft_vocab_size=.*1\.\.20"):
        draft_size(size, 20)


def test_the_whole_vocabulary_needs_no_mapping():
    assert draft_size("full", 20) == draft_size(20, 20) == 20


def pairs(supervised, argmax=None, t2d=None, cu=None, depths=3):
    supervised = torch.tensor(supervised, dtype=torch.bool)
    argmax = torch.zeros(len(supervised), dtype=torch.long) if argmax is None else torch.tensor(argmax)
    cu = torch.tensor([0, len(supervised)] if cu is None else cu)
    trained, reach = trained_pairs(supervised, argmax, t2d, cu, depths)
    return [row.nonzero()[:, 0].tolist() for row in trained], [row.nonzero()[:, 0].tolist() for row in reach]


def test_supervised_slots_per_depth_start_at_the_last_prompt_token_and_end_with_the_last_label():
    trained, _ = pairs([0, 0, 0, 0, 1, 1, 1, 1, 1])
    assert trained == [[3, 4, 5, 6], [3, 4, 5], [3, 4]]
    labels = [[p + 2 + d for p in slots] for d, slots in enumerate(trained)]
    assert labels == [[5, 6, 7, 8], [6, 7, 8], [7, 8]]


def test_a_second_span_follows_the_same_rule_inside_itself():
    #        0  1  2  3  4  5  6  7  8  9
    trained, _ = pairs([0, 1, 1, 1, 0, 0, 1, 1, 1, 1])
    assert trained == [[0, 1, 5, 6, 7], [0, 5, 6], [5]]


def test_spans_of_neighbouring_documents_do_not_run_into_each_other():
    together, _ = pairs([0, 1, 1, 1, 1, 1, 1, 1], cu=[0, 4, 8])  # the second document is supervised from its start
    assert together == [[0, 1, 4, 5], [0, 4], []]


def test_a_pair_counts_only_when_the_teachers_choice_is_in_the_draft_vocabulary():
    _, t2d = mapping(torch.tensor([0, 3, 5, 7, 11, 19]), 20)
    # slot p is taught by position p+1: slots 0 … 3 by the choices 3, 4, 19, 8
    trained, reach = pairs([0, 1, 1, 1, 1, 1], [0, 3, 4, 19, 8, 0], t2d, depths=1)
    assert reach == [[0, 1, 2, 3]]
    assert trained == [[0, 2]]


def test_random_rows_agree_with_a_literal_reading_of_the_rule():
    g = torch.Generator().manual_seed(3)
    for _ in range(50):
        lengths = torch.randint(1, 9, (3,), generator=g).tolist()
        n = sum(lengths)
        supervised = torch.rand(n, generator=g) < 0.7
        argmax = torch.randint(0, 6, (n,), generator=g)
        t2d = torch.rand(6, generator=g) < 0.6
        cu = torch.tensor([0, *lengths]).cumsum(0)
        trained, reach = trained_pairs(supervised, argmax, t2d, cu, 4)
        for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
            for p in range(a, b):
                for d in range(4):
                    tokens = range(p + 1, p + 3 + d)
                    wanted = tokens[-1] < b and all(supervised[t] for t in tokens)
                    assert bool(reach[d, p]) == wanted
                    assert bool(trained[d, p]) == (wanted and bool(t2d[argmax[p + 1 + d]]))
