"""Changed settings never reuse prepared data, unchanged ones always do; keys that came later cost old runs nothing."""

import copy

import pytest

from headtrain.config import DataConfig, PromptSource, RecipeConfig
from headtrain.files import Manifest, fingerprint
from headtrain.identity import IdentityError, source_identities, stage_marks

CHANGES = ["max_length", "template text", "template kwargs", "tokenizer revision", "data content"]


def changed(what: str | None, folder) -> str:
    """The mark of the responses of a run in which one thing differs."""
    data, template = folder / "chats.jsonl", folder / "served.jinja"
    data.write_text('{"prompt": "b"}' if what == "data content" else '{"prompt": "a"}')
    template.write_text("B" if what == "template text" else "A")
    config = RecipeConfig(data=DataConfig(prompts=[PromptSource(str(data))]))
    config.target.chat_template = str(template)
    config.data.max_length = 4096 if what == "max_length" else 2048
    config.target.template_kwargs = {"enable_thinking": False} if what == "template kwargs" else {}
    target = {"model": "me/model", "commit": "r2" if what == "tokenizer revision" else "r1"}
    return stage_marks(config, target, source_identities(config, folder / "run"))["responses"][0]


def test_six_runs_are_five_computations_and_one_hit(tmp_path):
    computed = []
    for what in (None, *CHANGES, None):
        folder = Manifest(tmp_path / "responses")
        if not folder.open(changed(what, tmp_path), {}):
            computed.append(what)
            (tmp_path / "responses" / "made").write_text(str(what))
            folder.finish({})
        assert (tmp_path / "responses" / "made").read_text() == str(what)
    assert computed == [None, *CHANGES]


def test_prepared_data_without_recorded_settings_is_moved_aside_not_reused(tmp_path):
    (tmp_path / "responses").mkdir()
    (tmp_path / "responses" / "index.json").write_text("{}")
    assert not Manifest(tmp_path / "responses").open("mark", {})
    assert not (tmp_path / "responses" / "index.json").exists()


def test_keys_that_came_later_change_no_mark_until_they_are_set():
    config = RecipeConfig(data=DataConfig(prompts=[PromptSource("a.jsonl", 5)]))
    marks = stage_marks(config, {"model": "m"}, ["content"])
    data = config.data
    prompts = {  # as it was when a source had two keys
        "prompts": [{"source": "a.jsonl", "limit": 5}], "filter": vars(data.filter), "held_out": data.held_out,
        "valid": data.valid, "answers": False, "content": ["content"], "parents": {},
    }  # fmt: skip
    assert marks["prompts"][0] == fingerprint({"stage": "prompts", **prompts})
    for change in ({"turns": 2}, {"keep_truncated": True}, {"prompts": [PromptSource("a.jsonl", 5, weight=2.0)]}):
        other = copy.deepcopy(config)
        for key, value in change.items():
            setattr(other.data, key, value)
        assert stage_marks(other, {"model": "m"}, ["content"])["prompts"][0] != marks["prompts"][0]
    other = copy.deepcopy(config)
    other.target.chat_template = "nowhere.jinja"
    with pytest.raises(IdentityError, match=r"target\.chat_template=nowhere\.jinja: no such file"):
        stage_marks(other, {"model": "m"}, ["content"])


def test_a_hub_data_set_is_pinned_to_the_commit_of_its_first_start(tmp_path, monkeypatch):
    import huggingface_hub

    commits = iter(["a" * 40, "b" * 40])
    asked = []

    def repo_info(self, name, *, repo_type, revision, timeout):
        asked.append((name, repo_type, revision))
        return type("Info", (), {"sha": next(commits)})

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    for _ in range(2):
        config = RecipeConfig(data=DataConfig(prompts=[PromptSource("me/chats")]))
        assert source_identities(config, tmp_path) == [{"source": "me/chats", "commit": "a" * 40}]
        assert config.data.prompts[0].revision == "a" * 40
    assert asked == [("me/chats", "dataset", "main")]
