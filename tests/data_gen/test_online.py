"""The target's states just in time, and the few captures that online training stores."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headtrain.data_gen import capture, online, passes, prompts, respond, store
from headtrain.data_gen.online import States, groups


def cost(cut: list[list[int]], lengths: list[int], start: int) -> int:
    return sum(len(rows) * max(lengths[n] for n in rows) + start for rows in cut)


def cuts(count: int):
    """All ways to cut a sequence of `count` rows."""
    for bits in range(1 << max(count - 1, 0)):
        cut, part = [], [0]
        for n in range(1, count):
            if bits >> (n - 1) & 1:
                cut.append(part)
                part = []
            part.append(n)
        yield [*cut, part]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([0, 3, 16, 256]))
def test_rows_are_grouped_at_the_least_cost_in_tokens(lengths, start):
    found = groups(lengths, start)
    assert sorted(n for rows in found for n in rows) == list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    assert cost(found, lengths, start) == min(
        cost([[order[n] for n in rows] for rows in cut], lengths, start) for cut in cuts(len(lengths))
    )


def test_a_micro_batch_of_many_short_rows_and_a_long_one_is_hardly_padded():
    lengths = [2000, *[20 + n % 50 for n in range(60)]]
    assert sum(lengths) <= cost(groups(lengths, 16), lengths, 0) < 1.15 * sum(lengths)


def test_states_are_those_of_each_row_alone_in_the_order_asked(recipe, tiny_target):
    made = torch.Generator().manual_seed(2)
    rows = [torch.randint(1, 90, (n,), generator=made, dtype=torch.int32) for n in (9, 33, 2, 12, 70)]
    found = States(recipe, (1, 3))(rows)
    for row, states in zip(rows, found, strict=True):
        alone = passes.read_rows(tiny_target, [row], (1, 3), torch.float32).flat()
        for name in online.STATES:
            torch.testing.assert_close(states[name], alone[name], rtol=1e-4, atol=1e-4)
            assert states[name].dtype == alone[name].dtype and not states[name][-1].any()
    again = States(recipe, (1, 3))(rows)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(found, again, strict=True) for name in online.STATES)


@pytest.fixture
def answered(recipe, tiny_target, tmp_path):
    """The folders of a run whose responses were made online."""
    recipe.data.captures.mode = "online"
    folders = [tmp_path / name for name in ("prompts", "responses", "captures")]
    prompts.gather(recipe, folders[0])
    respond.plan_batches(recipe, tiny_target.tokenizer, *folders[:2])
    respond.work(recipe, tiny_target, *folders, [1, 3])
    respond.finish(recipe, *folders[1:])
    return folders


def test_only_validation_rows_and_those_of_the_start_are_captured(recipe, tiny_target, answered, monkeypatch, caplog):
    monkeypatch.setattr(store, "tokens_of_start", lambda taps, hidden: 60)
    _, responses, captures = answered
    assert not list(captures.glob("*.safetensors"))  # none along with the responses
    caplog.set_level("INFO")
    files = len(list(responses.glob("*.safetensors")))
    assert capture.missing(responses, captures) == files
    done = capture.work(recipe, tiny_target, responses, captures, [1, 3])
    capture.finish(recipe, responses, captures)
    assert capture.missing(responses, captures) == 0 < done < files
    kept, rows = store.CaptureStore(captures), store.ResponseStore(responses)
    train = sorted((row for row in rows.rows if row.split == "train"), key=lambda row: row.id)
    first, tokens = [], 0
    for row in train:
        if tokens < 60:
            first.append(row.id)
            tokens += row.tokens
    assert 0 < len(first) < len(train)
    assert {row.id for row in kept.rows} == {row.id for row in rows.rows if row.split == "valid"} | set(first)
    assert [row.id for row in store.rows_of_start(kept.rows, 2, 64)] == first  # what a fresh head is fitted to
    found = capture.status(responses, captures)
    assert (found["batches"], found["done_batches"]) == (done, done)
    assert found["estimate"] == found["tokens"] == sum(row.tokens for row in kept.rows)
    assert f"({len(kept.rows)} rows of" in caplog.text and "online training: validation rows" in caplog.text


def test_the_responses_are_the_same_ids_and_their_disk_is_not_watched_for_captures(
    recipe, tiny_target, answered, tmp_path, monkeypatch
):
    recipe.data.captures.mode = "offline"
    folders = [answered[0], tmp_path / "again" / "responses", tmp_path / "again" / "captures"]
    respond.work(recipe, tiny_target, *folders, [1, 3])
    respond.finish(recipe, *folders[1:])
    both = map(store.ResponseStore, (answered[1], folders[1]))
    ids = [{row.id: made.read(row).ids.tolist() for row in made.rows} for made in both]
    assert ids[0] == ids[1]
    recipe.data.captures.mode = "online"
    monkeypatch.setattr(capture, "MARGIN", 0)
    monkeypatch.setattr(capture, "free_bytes", lambda _folder: 10)
    folders = [answered[0], tmp_path / "third" / "responses", tmp_path / "third" / "captures"]
    assert respond.work(recipe, tiny_target, *folders, [1, 3])
    respond.finish(recipe, *folders[1:])
    with pytest.raises(capture.DiskError, match="Too little space") as error:
        capture.work(recipe, tiny_target, *folders[1:], [1, 3])
    assert "data.captures.mode=online" not in str(error.value)


def test_the_estimate_of_a_large_run_is_that_of_the_few_rows(recipe, monkeypatch):
    recipe.data.captures.mode, recipe.data.valid = "online", 64
    plan = {"batches": [[["row", 3000, 1000]] * 20] * 50_000}
    monkeypatch.setattr(respond, "free_bytes", lambda _folder: 5 * 10**10)
    said = respond.estimate_disk(recipe, 4096, 3, plan, ".")
    assert f"({64 + math.ceil(40_000 / 4000)} rows of 4,000 tokens" in said
    recipe.data.captures.mode = "offline"
    way_out = r"online training, which stores little \(data\.captures\.mode=online\)"
    with pytest.raises(capture.DiskError, match=way_out):
        respond.estimate_disk(recipe, 4096, 3, plan, ".")


def test_the_index_lists_the_files_of_the_batches_given(tmp_path):
    for batch in (1, 4):
        row = store.RowInfo(f"r{batch}", "valid", "made", 3, "stop", 1, 2)
        tensors = {"ids": torch.arange(3, dtype=torch.int32), "supervised": torch.arange(3) > 0}
        store.write_unit(tmp_path, "responses", batch, [row], tensors, on_policy=True)
    store.write_index(tmp_path, "responses", [1, 4])
    assert [row.id for row in store.ResponseStore(tmp_path).rows] == ["r1", "r4"]
    index = json.loads((tmp_path / "index.json").read_text())
    assert [file["file"] for file in index["files"]] == ["responses-00001.safetensors", "responses-00004.safetensors"]
