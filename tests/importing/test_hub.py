"""Heads by their Hub id, from a local Hub cache: only the needed files are asked for, and offline it says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import importing_checkpoints as made
import pytest
import torch
from huggingface_hub import constants, errors

from headtrain import evaluation, identity
from headtrain.config import RecipeConfig
from headtrain.heads.base import load_head
from headtrain.hub_read import HubError, head_folder, hub_id
from headtrain.importing import HeadImportError, import_head


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An offline machine whose Hub cache is this folder."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for module in (huggingface_hub.file_download, huggingface_hub._snapshot_download):
        if hasattr(module, "HF_HUB_CACHE"):
            monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def cached(cache):
    """cached(name, folder, revision): puts a folder's files into the cache as the Hub client does, blobs and links."""

    def put(name: str, folder: Path, revision: str = "main") -> None:
        repository, commit = cache / f"models--{name.replace('/', '--')}", "a" * 40
        for place in ("blobs", "refs", f"snapshots/{commit}"):
            (repository / place).mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
        for number, file in enumerate(sorted(folder.iterdir())):
            shutil.copy(file, repository / "blobs" / str(number))
            (repository / "snapshots" / commit / file.name).unlink(missing_ok=True)
            (repository / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{number}")

    return put


@pytest.fixture
def ours(tmp_path, target):
    """A head folder of ours."""
    place = made.write(tmp_path / "theirs", *made.sglang())
    return import_head(str(place), tmp_path / "ours", target=str(target)).folder


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("me/head", ("me/head", None)), ("me/head@v1.2", ("me/head", "v1.2")),
        ("me/head@refs/pr/3", ("me/head", "refs/pr/3")),
        ("./me/head", None), ("/me/head", None), ("head", None), ("a/b/c", None), ("me/head@", None), ("~/head", None),
    ],
)  # fmt: skip
def test_what_is_written_like_a_hub_id(place, found):
    assert hub_id(place) == found


def test_a_folder_that_is_there_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "me" / "head").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked"))
    assert head_folder("me/head") == Path("me/head")


def test_a_head_of_the_hub_is_loaded_started_from_and_measured(cached, ours):
    cached("me/head", ours)
    cached("me/head", ours, "v1")
    for place in ("me/head", "me/head@v1"):
        assert load_head(place).config == load_head(ours).config
        assert (evaluation.found_head(place) / "config.json").is_file()
    config = RecipeConfig()
    marks = []
    for start in ("me/head", str(ours), None):
        config.head.init_from = start
        marks.append(identity.stage_marks(config, {}, [])["training"][0])
    assert marks[0] != marks[2]  # and the head's content counts


def test_a_foreign_head_of_the_hub_is_imported_through_the_caches_links(cached, tmp_path, target):
    cached("me/theirs", made.write(tmp_path / "theirs", *made.sglang()))
    found = import_head("me/theirs", tmp_path / "out", target=str(target))
    assert found.format == "sglang" and '"head": "me/theirs"' in (found.folder / "import.json").read_text()


def test_only_the_needed_files_are_asked_for(tmp_path, monkeypatch, target):
    place, asked = made.write(tmp_path / "theirs", *made.sglang()), []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **more: asked.append((*a, *more.values())) or str(place)
    )
    import_head("me/theirs@v2", tmp_path / "out", target=str(target))
    index = "model.safetensors.index.json"
    assert asked[0] == ("me/theirs", "v2", ["config.json", index])
    assert all(call == ("me/theirs", "v2", ["config.json", index, "*.safetensors"]) for call in asked[1:])
    asked.clear()
    with pytest.raises(ValueError, match="import the head first"):
        load_head("me/theirs")
    assert asked == [("me/theirs", None, ["config.json", "model.safetensors", "adapter/*"])]


@pytest.mark.parametrize("read", [load_head, evaluation.found_head, lambda place: import_head(place, "never")])
def test_offline_a_head_that_is_not_in_the_cache_is_one_line(read, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HubError, match=r"head=me/other@v1: neither the Hub nor the local Hub cache has it") as caught:
        read("me/other@v1")
    assert "\n" not in str(caught.value) and not Path("never").exists()


def test_offline_a_start_that_is_not_in_the_cache_is_named_by_its_key(cache):
    config = RecipeConfig()
    config.head.init_from = "me/other"
    with pytest.raises(HubError, match=r"head\.init_from=me/other: neither"):
        identity.stage_marks(config, {}, [])


@pytest.mark.parametrize("error", [
    errors.OfflineModeIsEnabled("offline"), ConnectionError("no route"), errors.HFValidationError("bad name"),
])  # fmt: skip
def test_whatever_the_hub_client_raises_is_one_line(error, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(HubError, match="neither the Hub nor the local Hub cache"):
        head_folder("me/other")


def test_weights_that_the_cache_lacks_are_asked_for(cached, tmp_path, target):
    place = made.write(tmp_path / "theirs", *made.sglang())
    torch.save({}, place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()
    (place / "pytorch_model.bin").rename(tmp_path / "elsewhere.bin")
    cached("me/theirs", place)
    with pytest.raises(HeadImportError, match=r"no \.safetensors file; if its weights are \.bin .* \(hf download\)"):
        import_head("me/theirs", tmp_path / "out", target=str(target))
