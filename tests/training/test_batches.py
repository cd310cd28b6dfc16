"""Packing, dealing and counting of micro-batches."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headtrain.heads.vocab import trained_pairs
from headtrain.training.batches import Plan, Reader, collate, count_pairs, pack

LENGTHS = [5 + (7 * n) % 23 for n in range(40)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=200), st.integers(0, 5), st.integers(0, 3))
def test_packing_uses_every_row_once_within_the_budget(lengths, seed, epoch):
    packed = pack(lengths, 30, seed, epoch)
    assert sorted(row for rows in packed for row in rows) == list(range(len(lengths)))
    assert all(0 < sum(lengths[row] for row in rows) <= 30 for rows in packed)


def test_packing_wastes_little():
    lengths = [3 + (11 * n) % 29 for n in range(500)]
    assert len(pack(lengths, 128, 0, 0)) <= 1.1 * sum(lengths) / 128


def test_epochs_have_different_orders_and_seeds_too():
    assert pack(LENGTHS, 64, 1, 0) == pack(LENGTHS, 64, 1, 0)
    assert pack(LENGTHS, 64, 1, 0) != pack(LENGTHS, 64, 1, 1)
    assert pack(LENGTHS, 64, 1, 0) != pack(LENGTHS, 64, 2, 0)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_each_row_is_used_once_per_epoch_whatever_the_number_of_processes(parts):
    plan, epochs = Plan(LENGTHS, 64, seed=3, parts=parts), 3
    micros = sum(len(pack(LENGTHS, 64, 3, e)) for e in range(epochs))
    assert plan.steps_of(epochs) == micros // parts
    seen = [row for step in range(-(-micros // parts)) for rows in plan.step(step) for row in rows]
    for epoch in range(epochs):
        assert sorted(seen[40 * epoch : 40 * (epoch + 1)]) == list(range(40))


def test_a_global_step_is_the_same_for_two_processes_and_for_two_accumulated_batches():
    one, two = Plan(LENGTHS, 64, 0, parts=2), Plan(LENGTHS, 64, 0, parts=2)
    assert [one.step(s) for s in range(20)] == [two.step(s) for s in (range(20))]
    assert two.step(50) == one.step(50)  # also when jumped to


def test_fewer_rows_than_processes_still_make_a_step():
    plan = Plan([5, 6], 64, 0, parts=4)
    assert plan.steps_of(1) == 1
    assert all(rows for rows in plan.step(0))


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="no row to train on"):
        Plan([], 64, 0, 1)


def test_the_rows_of_the_worked_example_are_supervised_at_each_depth(toy):
    """One row, prompt 0-3, answer 4-8: slots 3-6, 3-5, 3-4 at depths 0, 1, 2; nine pairs."""
    made = SimpleNamespace(supervised=torch.arange(9) >= 4, argmax=torch.zeros(9, dtype=torch.int32))
    trained, _ = trained_pairs(made.supervised, made.argmax, None, torch.tensor([0, 9]), 3)
    assert [row.nonzero().flatten().tolist() for row in trained] == [[3, 4, 5, 6], [3, 4, 5], [3, 4]]
    counts = count_pairs(SimpleNamespace(read=lambda row: row), [made], None, 3, limit=100)
    assert counts.tolist() == [[4, 3, 2]]
    assert count_pairs(SimpleNamespace(read=lambda row: row), [made], None, 3, limit=7).tolist() == [[2, 1, 0]]


def test_counts_of_a_step_are_those_of_all_its_batches(toy):
    """count_D against a literal reading of the rule, over both processes' batches."""
    rows = [SimpleNamespace(id=str(n), read=toy.row(n, 3 + n % 4, 8 + n % 9)) for n in range(12)]
    store = SimpleNamespace(read=lambda row: row.read)
    t2d = torch.arange(toy.VOCAB) < 40
    counts = count_pairs(store, rows, t2d, 3, limit=64)
    plan = Plan([len(row.read.ids) for row in rows], 64, 0, parts=2)
    readers = [Reader(store, rows, counts, plan, rank, 2) for rank in range(2)]
    try:
        for _ in range(6):
            batches = [reader.next() for reader in readers]
            literal = [0.0, 0.0, 0.0]
            for batch in batches:
                cu = batch.cu_R1.tolist()
                for start, end in pairwise(cu):
                    for p in range(start, end):
                        for d in range(3):
                            inside = p + 2 + d < end and batch.supervised_N[p + 1 : p + 3 + d].all()
                            literal[d] += bool(inside and t2d[batch.argmax_N[p + 1 + d]])
            assert batches[0].count_D.tolist() == batches[1].count_D.tolist() == literal
            assert batches[0].parts == 2
            assert not set(batches[0].rows) & set(batches[1].rows)
    finally:
        for reader in readers:
            reader.close()


def test_collate_puts_rows_end_to_end_and_cuts_them(toy):
    rows = [toy.row(0, 3, 8), toy.row(1, 4, 20)]
    batch = collate(rows, ["a", "b"], limit=15)
    assert batch.cu_R1.tolist() == [0, 11, 26]
    assert batch.positions_N.tolist() == [*range(11), *range(15)]
    assert batch.ids_N.tolist() == rows[0].ids.tolist() + rows[1].ids[:15].tolist()
    assert torch.equal(batch.taps_NAT[11:], rows[1].taps[:15])
    assert batch.ids_N.dtype == batch.argmax_N.dtype == torch.int64
    assert batch.rows == ["a", "b"]


def test_a_reader_started_later_goes_on_where_the_other_was(toy):
    rows = [SimpleNamespace(id=str(n), read=toy.row(n, 3, 8)) for n in range(10)]
    store, counts = SimpleNamespace(read=lambda row: row.read), torch.ones(10, 3)
    whole, later = (Reader(store, rows, counts, Plan([11] * 10, 30, 5, 1), 0, 1, first=first) for first in (0, 7))
    try:
        names = [whole.next().rows for _ in range(12)]
        assert [later.next().rows for _ in range(5)] == names[7:]
    finally:
        whole.close()
        later.close()


def test_an_error_while_reading_reaches_the_training_loop(toy):
    def read(row):
        raise OSError("the disk is gone")

    rows = [SimpleNamespace(id="a")]
    reader = Reader(SimpleNamespace(read=read), rows, torch.ones(1, 3), Plan([11], 30, 5, 1), 0, 1)
    with pytest.raises(OSError, match="the disk is gone"):
        reader.next()
    reader.close()
