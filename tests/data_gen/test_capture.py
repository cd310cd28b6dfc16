import pytest
import torch

from headtrain.data_gen import capture, passes, prompts, respond
from headtrain.data_gen.store import CaptureStore
from headtrain.files import Manifest

CASE = {"rows": 30_000, "tokens_per_row": 65_536, "hidden": 2880, "taps": 3, "dtype": "bfloat16"}


def test_the_disk_estimate_has_the_known_numbers_and_refuses(recwarn):  # case 42
    assert capture.bytes_per_token(2880, 3, "bfloat16") == 23_040
    assert capture.bytes_per_token(2880, 3, "float8") == 11_536
    with pytest.raises(capture.DiskError) as error:
        capture.check_disk(**CASE, free=2_000_000_000_000)
    text = str(error.value)
    for part in ("23,040 B per token", "1,509,949,440 B per row", "45.3 TB in all", "free: 2.0 TB"):
        assert part in text
    ways = "fewer rows", "shorter rows", "allow_low_disk=true", "8-bit captures", "float8 (22.6 TB", "online", "ring"
    for way_out in ways:
        assert way_out in text


def test_the_estimate_is_only_told_when_it_fits_or_is_overridden():  # case 42
    assert "45.3 TB in all" in capture.check_disk(**CASE, free=46_000_000_000_000)
    assert "started all the same" in capture.check_disk(**CASE, free=0, allow_low_disk=True)


def test_float32_captures_name_bfloat16_as_a_way_out():
    with pytest.raises(capture.DiskError, match=r"dtype=bfloat16 \(45\.3 TB\)"):
        capture.check_disk(**{**CASE, "dtype": "float32"}, free=0)


@pytest.fixture
def answered(recipe, tiny_target, tmp_path):
    folders = [tmp_path / name for name in ("prompts", "responses", "captures")]
    prompts.gather(recipe, folders[0])
    respond.work(recipe, tiny_target, *folders, (1, 2, 4))
    respond.finish(recipe, folders[1], folders[2])
    return folders


def test_captures_made_afterwards_equal_those_of_the_decode_pass(recipe, tiny_target, answered, tmp_path):
    _, responses, captures = answered
    again = tmp_path / "again"
    batches = capture.missing(responses, again)
    assert capture.work(recipe, tiny_target, responses, again, (1, 2, 4)) == batches > 1
    assert capture.work(recipe, tiny_target, responses, again, (1, 2, 4)) == 0
    counts = capture.finish(recipe, responses, again)
    one, other = CaptureStore(captures), CaptureStore(again)
    assert counts["rows"] == len(other.rows) == 21
    for a, b in zip(one.rows, other.rows, strict=True):
        assert a == b
        ours, theirs = one.read(a), other.read(b)
        for name in ("ids", "supervised", "argmax"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
        for name in ("taps", "last", "logsumexp"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=1e-4, rtol=1e-4)
    progress = capture.status(responses, again)
    assert progress["tokens"] == progress["estimate"] == counts["tokens"]


def test_other_taps_are_captured_from_the_same_responses(recipe, tiny_target, answered, tmp_path):
    recipe.data.captures.dtype = "bfloat16"
    capture.work(recipe, tiny_target, answered[1], tmp_path / "other", [3])
    capture.finish(recipe, answered[1], tmp_path / "other")
    store = CaptureStore(tmp_path / "other")
    read = store.read(store.rows[0])
    assert store.taps == [3] and read.taps.shape[1:] == (1, 64) and read.taps.dtype == torch.bfloat16
    states = tiny_target.forward(read.ids[None].long(), taps=(3,))
    torch.testing.assert_close(read.taps[:-1, 0], states.taps_BLAH[0, :-1, 0].bfloat16(), atol=2e-2, rtol=2e-2)


def test_a_disk_that_fills_up_stops_the_work_which_then_goes_on(recipe, tiny_target, tmp_path, monkeypatch):  # case 42
    folders = [tmp_path / name for name in ("prompts", "responses", "captures")]
    prompts.gather(recipe, folders[0])
    free = iter([10**12] * 3 + [0] * 100)
    with monkeypatch.context() as patch:
        patch.setattr(capture, "free_bytes", lambda folder: next(free))
        with pytest.raises(capture.DiskError, match=r"stopped before the disk is full.*run the same command again"):
            respond.work(recipe, tiny_target, *folders, (1, 2, 4))
    done = len(list(folders[1].glob("*.safetensors")))
    batches = respond.status(folders[1])["batches"]
    assert done == 3 and not list(tmp_path.rglob("*.part"))
    assert respond.work(recipe, tiny_target, *folders, (1, 2, 4)) == batches - 3


def test_too_little_space_is_an_error_before_the_first_token(recipe, tiny_target, tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("prompts", "responses", "captures")]
    prompts.gather(recipe, folders[0])
    monkeypatch.setattr(respond, "free_bytes", lambda folder: 1000)
    with pytest.raises(capture.DiskError, match="Too little space"):
        respond.work(recipe, tiny_target, *folders, (1, 2, 4))
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.fixture
def spoiled(monkeypatch):
    """spoiled(token, times, name): a row with the token has a NaN in the tensor `name` the first `times` times."""

    def spoil(token, times, name):
        seen, real = {}, passes.StateBuffers.flat

        def flat(self):
            tensors, start = {key: tensor.clone() for key, tensor in real(self).items()}, 0
            for length in self.lengths_B.tolist():
                ids = tuple(tensors["ids"][start : start + length].tolist())
                seen[ids] = seen.get(ids, 0) + 1
                if token in ids and seen[ids] <= times:
                    tensors[name][start + length - 2] = float("nan")
                start += length
            return tensors

        monkeypatch.setattr(passes.StateBuffers, "flat", flat)

    return spoil


@pytest.mark.parametrize("name", ["taps", "last", "logsumexp"])
@pytest.mark.parametrize("stage", ["responses", "captures"])
@pytest.mark.parametrize("times", [1, 9])
def test_a_row_that_is_not_finite_is_captured_again_and_else_left_out(
    stage, name, times, recipe, tiny_target, answered, spoiled, tmp_path, caplog
):
    prompt_folder, responses, captures = answered
    whole = CaptureStore(captures)
    ids = {row.id: whole.read(row).ids for row in whole.rows}
    token = next(t for t in range(100) if 0 < sum(t in row.tolist() for row in ids.values()) < 4)
    bad = {row for row, own in ids.items() if token in own.tolist()} if times > 1 else set()
    spoiled(token, times, name)
    if stage == "captures":
        again = tmp_path / "again"
        capture.work(recipe, tiny_target, responses, again, (1, 2, 4))
        counts = capture.finish(recipe, responses, again)
    else:
        responses, again = tmp_path / "other", tmp_path / "again"
        respond.work(recipe, tiny_target, prompt_folder, responses, again, (1, 2, 4))
        assert respond.finish(recipe, responses, again)["rows"] == 21
        counts = capture.finish(recipe, responses, again)
    opened = CaptureStore(again)
    assert {row.id for row in opened.rows} == ids.keys() - bad and counts["rows"] == 21 - len(bad)
    known = {row.id: row for row in whole.rows}
    for row in opened.rows:
        torch.testing.assert_close(vars(opened.read(row)), vars(whole.read(known[row.id])), atol=1e-4, rtol=1e-4)
    assert Manifest(again).data["left_out"] == ({"non_finite": len(bad)} if bad else {})
    said = " ".join(record.getMessage() for record in caplog.records if "non_finite" in record.getMessage())
    assert all(row in said for row in bad) and bool(said) == bool(bad)


def test_where_no_row_is_finite_the_run_ends_and_says_what_to_look_at(
    recipe, tiny_target, answered, tmp_path, monkeypatch
):
    real = passes.StateBuffers.flat
    monkeypatch.setattr(passes.StateBuffers, "flat", lambda self: real(self) | {"last": real(self)["last"] / 0})
    capture.work(recipe, tiny_target, answered[1], tmp_path / "again", (1, 2, 4))
    with pytest.raises(capture.CaptureError, match=r"no row is left, 21 have states that are not finite.*float16 ends"):
        capture.finish(recipe, answered[1], tmp_path / "again")
