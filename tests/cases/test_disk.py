"""How much disk the captures need is known, refused and watched: hidden 2880, 3 taps, 30,000 rows of 65,536 tokens."""

import re

import pytest

from headtrain import configload, plan, smoke
from headtrain.config import RecipeConfig
from headtrain.data_gen import capture, prompts, respond
from headtrain.data_gen.store import CaptureStore
from headtrain.target import Target

BATCHES = {"batches": [[["row", 65_000, 536]]] * 30_000}
FREE = 2_000_000_000_000
TAPS = [2, 4, 5]


def estimate(monkeypatch, free=FREE, backend="local", **captures) -> str:
    config = RecipeConfig()
    config.data.responses.backend = backend
    for key, value in captures.items():
        setattr(config.data.captures, key, value)
    monkeypatch.setattr(respond, "free_bytes", lambda folder: free)
    return respond.estimate_disk(config, 2880, 3, BATCHES, ".")


def test_the_capture_is_refused_with_its_numbers_and_with_keys_that_exist(monkeypatch):
    with pytest.raises(capture.DiskError) as error:
        estimate(monkeypatch)
    said = str(error.value)
    for number in ("23,040 B per token", "1,509,949,440 B per row", "45.3 TB in all", "free: 2.0 TB"):
        assert number in said
    ways = said.partition("What helps: ")[2]
    assert re.findall(r"(?:data|head)\.[a-z_.]*[a-z]", ways) == [
        "data.prompts", "data.max_length", "data.responses.max_new_tokens", "head.taps", "data.captures.dtype",
        "data.captures.mode", "data.captures.allow_low_disk",
    ]  # fmt: skip
    named = {name for name in re.findall(r"[a-z]+[._][a-z_.]*[a-z]", ways) if name != "data.prompts"}
    assert named <= set(configload.keys())
    helps, _, missing = ways.partition("Not in this version: ")
    assert "8-bit captures: data.captures.dtype=float8 (22.6 TB and 4 B of scale per state)" in helps
    assert "online training, which stores little (data.captures.mode=online)" in helps
    assert "ring buffer" not in helps and "a ring buffer" in missing  # named, as the case wants, but as not to be had


def test_half_the_bytes_are_named_where_captures_are_float32(monkeypatch):
    with pytest.raises(capture.DiskError, match=r"data\.captures\.dtype=bfloat16"):
        estimate(monkeypatch, dtype="float32")


def test_given_answers_are_not_told_to_be_generated_shorter(monkeypatch):
    with pytest.raises(capture.DiskError) as error:
        estimate(monkeypatch, backend="given")
    assert "data.max_length" in str(error.value) and "max_new_tokens" not in str(error.value)


def test_an_explicit_override_starts_all_the_same(monkeypatch):
    assert "45.3 TB in all" in estimate(monkeypatch, allow_low_disk=True)
    assert "45.3 TB in all" in estimate(monkeypatch, free=46 * 10**12)


def test_eight_bits_take_half_and_have_nothing_smaller_to_name(monkeypatch):
    said = estimate(monkeypatch, dtype="float8", free=23 * 10**12)
    assert "11,536 B per token" in said and "22.7 TB in all" in said and "last hidden, float8" in said
    with pytest.raises(capture.DiskError) as error:
        estimate(monkeypatch, dtype="float8")
    assert "dtype=float8" not in str(error.value)
    text = plan.text(configload.load("eagle3_llama8b", ["target.model=me/model", "data.captures.dtype=float8"]))
    assert "captures   16,400 B per token (3 taps + last hidden, float8)" in text


@pytest.mark.parametrize(("override", "said"), [("false", "does not start"), ("true", "starts all the same")])
def test_the_plan_says_beforehand_whether_the_run_would_start_and_what_helps(monkeypatch, override, said):
    monkeypatch.setattr(plan, "free_bytes", lambda folder: FREE)
    config = configload.load("eagle3_llama8b", [
        "target.model=me/model", "target.shape.hidden=2880", "data.max_length=65536",
        "data.responses.max_new_tokens=70000", "data.prompts=[{source:x.jsonl,limit:30000}]",
        f"data.captures.allow_low_disk={override}",
    ])  # fmt: skip
    text = plan.text(config)
    assert f"TOO LITTLE SPACE: a run {said}. What helps: {capture.what_helps('bfloat16', total=45.3e12)}" in text


# ------------------------------------------------------------------------------------------------- the watch

@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """(config, target, responses folder, bytes of each batch's captures) of a smoke run that was answered."""
    run = tmp_path_factory.mktemp("run")
    config = smoke.shrink(configload.load("eagle3_llama8b", ["smoke=true", f"run_dir={run}"]))
    config.data.responses.batch_tokens, config.data.responses.max_new_tokens = 600, 4
    smoke.build_target(config, smoke.target_folder(config))
    target = Target.load(config.target)
    folders = [run / name for name in ("prompts", "responses", "captures")]
    prompts.gather(config, folders[0])
    respond.work(config, target, *folders, TAPS)
    respond.finish(config, *folders[1:])
    each = capture.bytes_per_token(64, 3, config.data.captures.dtype)
    needs = [file["tokens"] * each for file in CaptureStore(folders[2]).index["files"]]
    assert len(needs) >= 4
    return config, target, folders[1], needs


def test_a_capture_stops_before_the_disk_is_full_and_the_same_call_goes_on(answered, tmp_path, monkeypatch):
    config, target, responses, needs = answered
    free = iter([needs[0] + capture.MARGIN, needs[1] + capture.MARGIN, needs[2] + capture.MARGIN - 1])
    with monkeypatch.context() as patch:
        patch.setattr(capture, "free_bytes", lambda folder: next(free))
        with pytest.raises(capture.DiskError, match=r"stopped before the disk is full.*run the same command again"):
            capture.work(config, target, responses, tmp_path, TAPS)
    assert [path.name for path in sorted(tmp_path.glob("*.safetensors"))] == [
        "captures-00000.safetensors", "captures-00001.safetensors"
    ]  # fmt: skip
    assert not list(tmp_path.rglob("*.part"))
    assert capture.work(config, target, responses, tmp_path, TAPS) == len(needs) - 2
    assert capture.finish(config, responses, tmp_path)["rows"] == len(CaptureStore(tmp_path).rows)


@pytest.mark.parametrize("stage", ["captures", "responses"])
def test_what_other_processes_are_about_to_write_is_counted(answered, stage, tmp_path, monkeypatch):
    """Batch 1 is under way in another process, which has said so and holds its claim; batch 0 comes next here."""
    from headtrain.files import claimed

    config, target, responses, needs = answered
    folders = [responses.with_name("prompts"), tmp_path / "responses", tmp_path / "captures"]
    if stage == "captures":
        needs_of = needs

        def work():
            return capture.work(config, target, responses, folders[2], TAPS)
    else:
        batches = respond.plan_batches(config, target.tokenizer, *folders[:2])["batches"]
        each = capture.bytes_per_token(64, 3, config.data.captures.dtype)
        needs_of = [sum(row[1] + row[2] for row in batch) * each for batch in batches]

        def work():
            return respond.work(config, target, *folders, TAPS)

    place = tmp_path / stage
    free = [needs_of[0] + needs_of[1] + capture.MARGIN]
    monkeypatch.setattr(capture, "free_bytes", lambda folder: free[0])
    with claimed(place / "claims" / "1.lock"):
        (place / "claims" / "1.json").write_text('{"pid": 1, "tokens": 0, "seconds": 0}')
        free[0] -= 1
        with pytest.raises(capture.DiskError, match="stopped before the disk is full: batches under way need"):
            work()
        assert not list(place.glob("*.safetensors"))
        free[0] = 10**15
        assert work() == len(needs_of) - 1  # all but the one that is held
    assert work() == 1
