"""Fingerprints: what changes a stage, what does not, and what happens to the old folder."""

from __future__ import annotations

import copy
import os

import pytest

from headtrain import configload, identity
from headtrain.config import PromptSource, RecipeConfig
from headtrain.files import Manifest, write_json
from headtrain.hub_read import HubError

TARGET = {"model": "tiny", "content": "r1"}


@pytest.fixture
def config() -> RecipeConfig:
    made = RecipeConfig()
    made.target.model, made.data.prompts, made.train.steps = "tiny", [PromptSource("d.jsonl")], 10
    return made


def marks(config, target=TARGET, sources=("d1",)) -> dict[str, str]:
    return {stage: mark for stage, (mark, _) in identity.stage_marks(config, target, list(sources)).items()}


def changed(config, *overrides: str, **more) -> set[str]:
    """The stages whose fingerprint an override changes."""
    other = copy.deepcopy(config)
    for text in overrides:
        path, value = configload.parse_override(text)
        *parents, last = path.split(".")
        node = other
        for part in parents:
            node = getattr(node, part)
        setattr(node, last, value)
    before, after = marks(config), marks(other, **more)
    return {stage for stage in before if before[stage] != after[stage]}


ALL = {"prompts", "responses", "captures", "training", "report", "export"}


@pytest.mark.parametrize(
    ("override", "stages"),
    [
        ("data.filter.min_chars=3", ALL),
        ("data.held_out=3", ALL),
        ("data.responses.backend=given", ALL),
        ("data.max_length=4096", ALL - {"prompts"}),
        ("data.responses.max_new_tokens=7", ALL - {"prompts"}),
        ("target.dtype=float32", ALL - {"prompts"}),
        ("target.template_kwargs={enable_thinking:false}", ALL - {"prompts"}),
        ("data.captures.dtype=float32", ALL - {"prompts", "responses"}),
        ("data.captures.mode=online", ALL - {"prompts", "responses"}),
        ("head.taps=[1,2,3]", ALL - {"prompts", "responses"}),
        ("head.draft_vocab=full", {"training", "report", "export"}),
        ("train.lr=0.5", {"training", "report", "export"}),
        ("train.eval_every=3", {"training", "report", "export"}),
        ("seed=5", {"training", "report", "export"}),
        ("eval.k=[3]", {"report"}),
        ("eval.tree=[4x16]", {"report"}),
        ("eval.rule=block", {"report"}),
        ("eval.draft_model=me/small", {"report"}),
        ("export.formats=[vllm]", {"export"}),
        ("launch.gpus=2", set()),
        ("launch.workers=2", set()),
        ("launch.master_port=1234", set()),
        ("train.threads=3", set()),
        ("train.zero_stage=3", set()),
        ("train.save_every=3", set()),
        ("train.keep=9", set()),
        ("train.log_every=9", set()),
        ("logger=wandb", set()),
        ("push.repo=ann/mine", set()),
        ("run_dir=elsewhere", set()),
        ("description=words", set()),
        ("target.device=cpu", set()),
        ("data.captures.allow_low_disk=true", set()),
    ],
)
def test_a_key_changes_the_stages_that_depend_on_it_and_those_after_them(override, stages, config):
    assert changed(config, override) == stages


def test_the_seed_changes_responses_only_where_they_are_sampled(config):
    config.data.responses.temperature = 0.8
    assert changed(config, "seed=5") == ALL - {"prompts"}


def test_a_changed_head_draft_model_or_file_of_a_suite_changes_the_report_alone(config, tmp_path):
    def report(**more):
        found = identity.stage_marks(config, TARGET, ["d1"], **more)
        return found["report"][0]

    assert len({report(), report(draft_model="s1"), report(draft_model="s2")}) == 3
    assert report(head={"a": "1", "b": "2"}) != report(head={"a": "1", "b": "3"})
    copy = tmp_path / "copy"
    copy.mkdir()
    config.eval.suites = ["heldout", f"gsm8k={copy}"]
    before = report()
    (copy / "rows.jsonl").write_text("{}")
    assert report() != before
    config.eval.suites = ["heldout", f"gsm8k={copy / 'rows.jsonl'}"]
    before = report()
    (copy / "rows.jsonl").write_text("{} ")
    assert report() != before


def test_another_target_or_other_data_changes_what_is_made_from_them(config):
    assert changed(config, target={"model": "tiny", "content": "r2"}) == ALL - {"prompts"}
    assert changed(config, sources=("d2",)) == ALL


def test_five_settings_are_five_preparations_and_the_first_again_is_none(config, tmp_path):
    """Changed settings never reuse prepared data; settings that come back find theirs."""
    variants = [
        {"max_length": 2048, "template": "A", "kwargs": {}, "tokenizer": "r1", "data": "d1"},
        {"max_length": 4096, "template": "A", "kwargs": {}, "tokenizer": "r1", "data": "d1"},
        {"max_length": 2048, "template": "B", "kwargs": {}, "tokenizer": "r1", "data": "d1"},
        {"max_length": 2048, "template": "A", "kwargs": {"enable_thinking": False}, "tokenizer": "r1", "data": "d1"},
        {"max_length": 2048, "template": "A", "kwargs": {}, "tokenizer": "r1", "data": "d2"},
    ]
    computed = []
    for n, variant in enumerate([*variants, variants[0]]):
        model, run = tmp_path / f"model{n}", tmp_path / "run"
        model.mkdir()
        (model / "chat_template.jinja").write_text(variant["template"])
        (model / "tokenizer.json").write_text(variant["tokenizer"])
        data = tmp_path / "d.jsonl"
        data.write_text(variant["data"])
        os.utime(data, ns=(n, n))
        config.data.max_length, config.target.template_kwargs = variant["max_length"], variant["kwargs"]
        config.target.model, config.data.prompts = str(model), [PromptSource(str(data))]
        target = identity.folder_identity(str(model))
        found = identity.stage_marks(config, target, identity.source_identities(config, run))
        manifest = Manifest(run / "responses")
        if not manifest.open(*found["responses"]):
            assert [path.name for path in (run / "responses").iterdir()] == ["manifest.json"], "old data in the folder"
            (run / "responses" / "rows").write_text(str(n))
            manifest.finish({"rows": 1})
            computed.append(n)
    assert computed == [0, 1, 2, 3, 4]
    assert (run / "responses" / "rows").read_text() == "0"


def test_a_folder_without_recorded_settings_is_set_aside(tmp_path):
    folder = tmp_path / "captures"
    folder.mkdir()
    (folder / "captures-00000.safetensors").write_bytes(b"of yesterday")
    assert not Manifest(folder).open("mark", {})
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    aside = [path for path in tmp_path.iterdir() if path != folder]
    assert len(aside) == 1 and (aside[0] / "captures-00000.safetensors").read_bytes() == b"of yesterday"


def test_an_unfinished_folder_of_the_same_settings_goes_on(tmp_path):
    folder = tmp_path / "responses"
    assert not Manifest(folder).open("mark", {})
    (folder / "part").write_text("half")
    assert not Manifest(folder).open("mark", {})
    assert (folder / "part").read_text() == "half"


def test_one_changed_weight_of_a_large_file_changes_the_folders_identity(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "WHOLE_FILE", 1 << 12)
    monkeypatch.setattr(identity, "SAMPLE", 1 << 10)
    weights = tmp_path / "model.safetensors"
    content = bytearray(os.urandom(1 << 17))
    weights.write_bytes(content)
    before = identity.folder_identity(str(tmp_path))
    for place in (0, len(content) - 1):
        other = bytearray(content)
        other[place] ^= 1
        weights.write_bytes(other)
        assert identity.folder_identity(str(tmp_path)) != before
    weights.write_bytes(content)
    os.utime(weights, ns=(5, 5))
    assert identity.folder_identity(str(tmp_path)) == before, "copying a folder does not change what it is"


def test_a_hub_models_commit_is_pinned_at_the_first_start(config, tmp_path, monkeypatch):
    commits = iter(["a" * 40, "b" * 40])
    monkeypatch.setattr(identity, "hub_commit", lambda _: next(commits))
    for _ in range(2):
        config.target.model, config.target.revision = "someone/model", None
        assert identity.target_identity(config.target, tmp_path)["commit"] == "a" * 40
        assert config.target.revision == "a" * 40
    config.target.model, config.target.revision = "someone/model", "v2"
    assert identity.target_identity(config.target, tmp_path)["commit"] == "b" * 40


def test_without_a_network_a_hub_model_is_found_in_the_local_hub_cache(config, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    config.target.model = "someone/model"
    with pytest.raises(HubError, match="neither the Hub nor the local Hub cache"):
        identity.hub_commit(config.target)
    ref = tmp_path / "models--someone--model" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text("c" * 40)
    assert identity.hub_commit(config.target) == "c" * 40


@pytest.mark.parametrize("model", ["nowhere/x.gguf", "./nowhere", "/no/such/folder", "a/b/c"])
def test_a_place_that_does_not_exist_is_not_taken_for_a_hub_id(model, config, tmp_path):
    config.target.model = model
    with pytest.raises(identity.IdentityError, match="no such file or folder"):
        identity.target_identity(config.target, tmp_path)


def test_a_file_is_not_read_again_while_its_size_and_time_stay(tmp_path, monkeypatch):
    path, run = tmp_path / "big.jsonl", tmp_path / "run"
    path.write_text("one")
    first = identity.known_sha256(path, run)
    monkeypatch.setattr(identity, "sha256_file", lambda _: pytest.fail("read again"))
    assert identity.known_sha256(path, run) == first
    monkeypatch.undo()
    path.write_text("two!")
    assert identity.known_sha256(path, run) != first


def test_the_manifest_says_what_a_stage_was_made_from(config, tmp_path):
    found = identity.stage_marks(config, TARGET, ["d1"])
    Manifest(tmp_path / "training").open(*found["training"])
    made_from = Manifest(tmp_path / "training").data["made_from"]
    assert made_from["parents"] == {"prompts": found["prompts"][0], "captures": found["captures"][0]}
    write_json(tmp_path / "readable.json", made_from)
