"""Case 48: an exported head has nothing random, nothing missing, nothing extra; a spoiled one is refused by name."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headtrain.export import ExportError, audit, export
from headtrain.heads.base import save_head
from headtrain.training.trainer import build_head

TRAIN = [([1, 2], [3, 7, 3, 8, 12, 3, 7]), ([4, 6], [3, 8, 3, 7, 8, 3, 12])]
INFO = {"model": "org/Name-7B", "family": "llama"}
NORMS = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
MATRICES = [*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))]
GOOD = {f"midlayer.{name}.weight" for name in [*NORMS, *MATRICES]} | {
    "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
}  # fmt: skip


@pytest.fixture
def run(recipe, make_run, train, tmp_path):
    """A run folder with a head of three training steps."""
    recipe.train.steps, recipe.train.lr, recipe.train.warmup = 3, 3e-3, 0.0
    folder = make_run(tmp_path / "run", TRAIN, TRAIN[:1])
    train(recipe, folder)
    return folder


def last_head(run):
    """The head after the last step; the best one may be the start."""
    return sorted((run / "training" / "checkpoints").glob("step-*"))[-1] / "head"


def test_the_good_copy_goes_through_bit_for_bit(run, tmp_path):
    head = last_head(run)
    out = export(head, "vllm", tmp_path / "out", INFO)
    trained, written = load_file(head / "model.safetensors"), load_file(out / "model.safetensors")
    assert written.keys() == GOOD
    for name, tensor in trained.items():
        assert torch.equal(written[name], tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor), name
    config = json.loads((out / "config.json").read_text())
    assert not {"quantization_config", "text_config", "_name_or_path"} & config.keys()
    assert config["tie_word_embeddings"] is False and config["rope_parameters"]["rope_theta"] == config["rope_theta"]


def test_a_matrix_that_training_never_reached_is_refused_by_name(run, recipe, tmp_path):
    head = last_head(run)
    with safe_open(head / "model.safetensors", "pt") as handle:
        marks = handle.metadata()
    wanted = {"fc.weight", "lm_head.weight", *(f"midlayer.{name}.weight" for name in MATRICES)}
    assert set(json.loads(marks["start"])) == wanted
    tensors, start = load_file(head / "model.safetensors"), build_head(recipe, run, torch.device("cpu"))
    tensors["midlayer.mlp.up_proj.weight"] = start.portable_tensors()["midlayer.mlp.up_proj.weight"].detach().clone()
    save_file(tensors, head / "model.safetensors", metadata=marks)
    name = "tensor midlayer.mlp.up_proj.weight is what it was when the head was made: it was never trained"
    assert audit(head, "vllm", target_info=INFO) == [name]
    with pytest.raises(ExportError, match="never trained"):
        export(head, "vllm", tmp_path / "out", INFO)


def test_a_head_that_was_not_trained_at_all_is_refused_unless_validation_kept_the_start(run, recipe, tmp_path):
    start = build_head(recipe, run, torch.device("cpu"))
    save_head(start, tmp_path / "other" / "head")
    (fault,) = audit(tmp_path / "other" / "head", "vllm", target_info=INFO)
    assert fault.startswith("no matrix has changed since the head was made (fc.weight, ")
    (tmp_path / "other" / "training").mkdir()
    (tmp_path / "other" / "training" / "best.json").write_text(json.dumps({"step": 0, "tau": 1.5}))
    out = export(tmp_path / "other" / "head", "vllm", tmp_path / "out", INFO)
    assert "no step of training better" in (out / "README.md").read_text()
    trained = export(last_head(run), "vllm", tmp_path / "trained", INFO)
    assert "no step of training better" not in (trained / "README.md").read_text()
