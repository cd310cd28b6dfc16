"""Formats as a run's last stage and as a command of their own."""

import json
from pathlib import Path

import pytest

from headtrain import cli, stages
from headtrain.config import ConfigError, RecipeConfig
from headtrain.export import export
from headtrain.files import Manifest, sha256_file


def test_a_run_exports_to_all_its_formats_and_each_readme_quotes_its_report(make_head):
    config, run = RecipeConfig(), make_head("eagle3", taps=[4, 5, 7]).parent
    config.target.model, config.target.family = "org/Name-7B", "qwen3"
    config.export.formats = ["vllm", "sglang", "trtllm", "speculators"]
    config.export.engine_version = "sglang=0.5.23,vllm=0.32.0"
    row = {"suite": "mine", "drafter": "head", "temperature": 0.0, "k": 4, "tree": "chain", "dtype": "float32"}
    heads = [{"sha256": sha256_file(run / "head" / "model.safetensors")}]
    (run / "report").mkdir()
    (run / "report" / "report.json").write_text(json.dumps({"heads": heads, "results": [row | {"tau": 2.4}]}))
    stages.export(config, run, {})
    assert Manifest(run / "export").data["complete"]
    assert sorted(path.name for path in (run / "export").iterdir() if path.is_dir()) == sorted(config.export.formats)
    commands = {
        "vllm": ("vllm serve org/Name-7B", '"num_speculative_tokens": 4', "for 0.32.0"),
        "sglang": ("--speculative-num-steps 4", "--model-path org/Name-7B", "layer ids are counted for SGLang 0.5.23"),
        "trtllm": ("trtllm-serve org/Name-7B --config speculative.yaml",),
        "speculators": ("vllm serve org/Name-7B", '"method": "eagle3"'),
    }
    for format, words in commands.items():
        text = (run / "export" / format / "README.md").read_text()
        assert all(word in text for word in (*words, "2.40 tokens per target forward on mine")), (format, text)
    options = (run / "export" / "trtllm" / "speculative.yaml").read_text()
    assert "max_draft_len: 4" in options and "eagle3_layers_to_capture: [3, 4, 6]" in options


def test_the_command_takes_a_release_a_target_and_a_type(headtrain, make_head, tmp_path):
    head = make_head("medusa")
    done = headtrain("export", f"head={head}", "format=vllm")
    assert done.returncode == 2 and "engine_version=0.32.0" in done.stderr and not (head.parent / "export").exists()
    more = ["engine_version=0.32.0", "target=org/Name-7B", "dtype=float32", "out=served"]
    done = headtrain("export", f"head={head}", "format=vllm", *more)
    assert done.stdout == "vllm: served\n", done.stderr
    assert json.loads((tmp_path / "served" / "config.json").read_text())["torch_dtype"] == "float32"
    assert "vllm serve org/Name-7B" in (tmp_path / "served" / "README.md").read_text()
    done = headtrain("export", f"head={head}", "format=vllm", "dtype=int4")
    assert done.returncode == 2 and "bfloat16, float16, float32" in done.stderr


def test_a_head_on_the_hub_is_exported_to_a_place_that_is_named(make_head, tmp_path, monkeypatch):
    from headtrain import hub_read, pipeline

    fetched = make_head("eagle3")
    monkeypatch.setattr(hub_read, "head_folder", lambda place: fetched)
    with pytest.raises(ConfigError, match=r"head=me/my-head is no folder here: say where .* with out="):
        pipeline.export_head(Path("me/my-head"), "vllm", None)
    assert pipeline.export_head(Path("me/my-head"), "vllm", str(tmp_path / "out")) == f"vllm: {tmp_path / 'out'}"
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("HEAD", "is the head itself"), (".", "is the folder that this command runs in"), ("..", "holds other files"),
        ("/proc/x", "out=/proc/x: cannot be written"), ("file/x", "out=file/x: cannot be written"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_one_line_and_nothing_changes(
    out, said, make_head, tmp_path, monkeypatch, capsys
):
    head, here = make_head("eagle3"), tmp_path / "here"
    here.mkdir()
    if out != ".":
        (here / "file").write_text("mine")
    monkeypatch.chdir(here)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert cli.main(["export", f"head={head}", "format=vllm", f"out={out.replace('HEAD', str(head))}"]) == 2
    assert said in (told := capsys.readouterr().err) and told.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_export_goes_where_a_link_leads(make_head, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for _ in range(2):
        export(make_head("eagle3"), "vllm", tmp_path / "link")
    assert (tmp_path / "disk" / "model.safetensors").is_file() and (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link", "run"]


def test_the_run_of_a_head_is_found_from_inside_its_folder(make_head, monkeypatch):
    head = make_head("eagle3")
    (head.parent / "config.yaml").write_text("target: {model: org/Name-7B}\n")
    monkeypatch.chdir(head)
    assert cli.main(["export", "head=.", "format=vllm"]) == 0
    assert "vllm serve org/Name-7B" in (head.parent / "export" / "vllm" / "README.md").read_text()


@pytest.mark.parametrize(("format", "version"), [("vllm", "0.32.0"), ("medusa", None)])
def test_an_adapter_that_a_head_brings_goes_into_the_export_and_the_plain_target_is_not_named(
    format, version, make_head, tmp_path
):
    adapter = make_head("medusa") / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/home/ann/Name-7B"}))
    (adapter / "adapter_model.safetensors").write_bytes(b"factors")
    for _ in range(2):  # also over an earlier one
        out = export(adapter.parent, format, tmp_path / "out", {"model": "org/Name-7B"}, engine_version=version)
    assert (out / "adapter" / "adapter_model.safetensors").read_bytes() == b"factors"
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/Name-7B"
    readme = (out / "README.md").read_text()
    assert "- TARGET is org/Name-7B with the adapter adapter merged into it; serve it so" in readme
    assert not any(f"{before}org/Name-7B" in readme for before in ("serve ", "--model ", "target: "))
    assert "org/Name-7B" not in (out / "config.json").read_text()
    merged = {"model": "org/merged", "adapter": False}
    text = (export(adapter.parent, format, tmp_path / "out", merged, engine_version=version) / "README.md").read_text()
    assert "org/merged" in text and "TARGET" not in text
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "Name-7B"
