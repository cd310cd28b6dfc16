"""Case 51: a target's MTP module is taken out, trained, and put back; everything else of the checkpoint stays."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from headtrain.config import RecipeConfig, TargetConfig
from headtrain.configload import to_yaml
from headtrain.export import ExportError, audit, export
from headtrain.files import sha256_file
from headtrain.heads import mtp_checkpoint
from headtrain.heads.base import load_head, new_head, save_head
from headtrain.heads.mtp_checkpoint import read_native, write_back
from headtrain.target import TargetError

TRAIN = [([1, 2], [3, 7, 3, 8, 12, 3, 7]), ([4, 6], [3, 8, 3, 7, 8, 3, 12])]
LAYERS = 2  # of the targets; the module is layer number 2 where it counts as one
DIALECTS = {"glm4_moe": "model.layers.2.", "deepseek_v3": "model.layers.2.", "qwen3_next": "mtp.",
            "qwen2": "model.mtp_layers.0."}  # fmt: skip


@pytest.fixture
def checkpoint(mtp_targets, tmp_path):
    """checkpoint(family): a folder with two shards, the module's tensors (experts one by one) alone in the second."""

    def make(family, dtype=torch.bfloat16):
        mtp_targets.make(tmp_path / "target", family, dtype)
        return tmp_path / "target"

    return make


@pytest.fixture
def toy_parts(parts):
    """toy_parts(folder): the toy target of this folder's tests, whose module is that of a checkpoint."""

    def make(folder):
        config = type("Config", (parts.config,), {"num_hidden_layers": LAYERS})
        return replace(parts, config=config, source=TargetConfig(model=str(folder)))

    return make


@pytest.fixture
def mtp() -> RecipeConfig:
    made = RecipeConfig()
    made.head.type, made.head.draft_vocab, made.head.unroll = "mtp", "full", 2
    made.train.precision, made.train.threads, made.train.steps, made.train.decay = "fp32", 1, 1, 0.6
    made.target.device, made.eval.k = "cpu", [3]
    return made


def module_of(folder, toy_parts, mtp):
    return new_head(mtp, toy_parts(folder), torch.ones(20, dtype=torch.long), torch.ones(20, dtype=torch.long), None)


def everything(folder):
    return {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}


def files(folder):
    return {file.name: sha256_file(file) for file in folder.iterdir()}


@pytest.mark.parametrize("family", DIALECTS)
def test_put_back_untrained_the_checkpoint_is_byte_identical(family, checkpoint, toy_parts, mtp, tmp_path):
    folder = checkpoint(family)
    save_head(module_of(folder, toy_parts, mtp), tmp_path / "head")
    written = write_back(load_head(tmp_path / "head"), folder, tmp_path / "out")
    assert files(folder) == files(tmp_path / "out")
    assert written and all(name.startswith(DIALECTS[family]) for name in written)
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in written)


@pytest.mark.parametrize("family", DIALECTS)
def test_after_training_only_the_modules_tensors_differ_and_other_shards_are_linked(
    family, checkpoint, toy_parts, mtp, make_run, monkeypatch, train, tmp_path
):
    from headtrain.training import trainer

    folder, run = checkpoint(family), make_run(tmp_path / "run", TRAIN, TRAIN[:1], taps=[])
    monkeypatch.setattr(trainer, "load_parts", lambda target: toy_parts(folder))
    mtp.train.lr, mtp.train.steps, mtp.train.warmup, mtp.train.log_every = 3e-3, 3, 0.0, 1
    log = train(mtp, run)
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[-1] < losses[0]
    head = load_head(run / "head")
    if log[-1]["tau"] <= log[0]["tau"]:  # the best head may be the untrained one: take the last
        head = load_head(sorted((run / "training" / "checkpoints").glob("step-*"))[-1] / "head")
    write_back(head, folder, tmp_path / "out")
    before, after = everything(folder), everything(tmp_path / "out")
    assert before.keys() == after.keys()
    for file, tensors in before.items():
        assert tensors.keys() == after[file].keys()
        for name, tensor in tensors.items():
            new = after[file][name]
            assert (new.dtype, new.shape) == (tensor.dtype, tensor.shape), name
            if name not in head.trained_tensors():
                assert torch.equal(new, tensor), name
    module = [name for name in head.trained_tensors() if name.endswith("proj.weight")]
    first, second = before
    changed = [name for name in module if not torch.equal(after[second][name], before[second][name])]
    assert len(changed) > len(module) / 2
    assert os.path.samefile(folder / first, tmp_path / "out" / first)
    again = read_native(TargetConfig(model=str(tmp_path / "out")), LAYERS)  # and it is a target again
    for name, tensor in head.trained_tensors().items():
        assert torch.equal(again.tensors[name], tensor.to(again.tensors[name].dtype)), name
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert written == json.loads((folder / "model.safetensors.index.json").read_text())


def test_a_target_without_mtp_layers_is_an_error_and_no_random_start(checkpoint, toy_parts, mtp):
    folder = checkpoint("qwen2")
    os.remove(folder / "model-00002-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    kept = {n: f for n, f in json.loads(index.read_text())["weight_map"].items() if "00001" in f}
    index.write_text(json.dumps({"weight_map": kept}))
    with pytest.raises(TargetError, match=r"has no MTP layers \(no model\.layers\.2\.eh_proj.*head\.init_from=scratch"):
        module_of(folder, toy_parts, mtp)


def test_a_quantised_module_is_refused_with_the_tensors_name(checkpoint, toy_parts, mtp):
    folder = checkpoint("glm4_moe")
    shard = folder / "model-00002-of-00002.safetensors"
    tensors, name = load_file(shard), "model.layers.2.eh_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, shard)
    with pytest.raises(TargetError, match=rf"{name} is stored as F8_E4M3: a quantised MTP module cannot be trained"):
        module_of(folder, toy_parts, mtp)


def test_tensors_that_are_missing_or_unknown_are_named(checkpoint, toy_parts, mtp):
    folder = checkpoint("glm4_moe")
    shard, index = folder / "model-00002-of-00002.safetensors", folder / "model.safetensors.index.json"
    tensors = load_file(shard)
    tensors["model.layers.2.unheard.weight"] = tensors.pop("model.layers.2.enorm.weight")
    save_file(tensors, shard)
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {n: f for n, f in names.items() if "00001" in f}
                                 | dict.fromkeys(tensors, shard.name)}))  # fmt: skip
    with pytest.raises(ValueError, match=r"layers\.2\.enorm\.weight is missing; .*unheard\.weight is not a tensor"):
        module_of(folder, toy_parts, mtp)


def test_a_module_goes_back_only_into_its_own_checkpoint_and_never_over_a_folder(checkpoint, toy_parts, mtp, tmp_path):
    folder = checkpoint("qwen2")
    head = module_of(folder, toy_parts, mtp)
    with pytest.raises(ValueError, match="exists; write to a new folder"):
        write_back(head, folder, folder)
    shard = folder / "model-00002-of-00002.safetensors"
    shutil.copy(shard, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"is in {shard.name} and in model\.safetensors: remove one"):
        write_back(head, folder, tmp_path / "out")
    (folder / "model.safetensors").unlink()
    tensors = load_file(shard)
    del tensors["model.mtp_layers.0.input_proj.weight"]
    save_file(tensors, shard)
    with pytest.raises(ValueError, match=r"not the checkpoint.*model\.mtp_layers\.0\.input_proj\.weight is missing"):
        write_back(head, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_module_from_scratch_is_trained_but_not_exported(toy_parts, mtp, make_run, train, tmp_path):
    run = make_run(tmp_path / "run", TRAIN, TRAIN[:1], taps=[])
    mtp.head.init_from, mtp.train.steps, mtp.train.log_every, mtp.train.lr = "scratch", 3, 1, 3e-3
    mtp.train.warmup = 0.0
    log = train(mtp, run)
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match=r"trained from scratch.*no engine serves one on this target"):
        write_back(load_head(run / "head"), tmp_path, tmp_path / "out")


def test_the_export_writes_the_target_of_the_run(checkpoint, toy_parts, mtp, tmp_path):
    folder = checkpoint("glm4_moe")
    save_head(module_of(folder, toy_parts, mtp), tmp_path / "run" / "head")
    with pytest.raises(ExportError, match="lies in no run folder"):
        export(tmp_path / "run" / "head", "mtp", tmp_path / "out")
    mtp.target.model = str(folder)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(mtp))
    assert export(tmp_path / "run" / "head", "mtp", tmp_path / "out") == tmp_path / "out"
    written = files(tmp_path / "out")
    assert written.pop("README.md") and files(folder) == written
    mtp.target.adapter = "me/lora"
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(mtp))
    with pytest.raises(ExportError, match=r"target\.adapter=me/lora.*merge it into the target first"):
        export(tmp_path / "run" / "head", "mtp", tmp_path / "again")


ENGINES = {"vllm": "vllm serve FOLDER", "sglang": "--speculative-algorithm NEXTN", "trtllm": "decoding_type: MTP"}
NOT_RUN = {
    ("qwen2", "vllm"): "architectures=['Qwen2ForCausalLM'] must be ['MiMoForCausalLM']",
    ("qwen2", "sglang"): "architectures=['Qwen2ForCausalLM'] must be ['MiMoForCausalLM']",
    ("qwen2", "trtllm"): "not of qwen2; use format=vllm",
}


@pytest.mark.parametrize("family", DIALECTS)
def test_every_engine_gets_the_checkpoint_and_its_command_or_a_reason(family, checkpoint, toy_parts, mtp, tmp_path):
    folder, head = checkpoint(family), tmp_path / "run" / "head"
    (folder / "README.md").write_text("---\nlicense: mit\n---\nThe target.\n")
    save_head(module_of(folder, toy_parts, mtp), head)
    mtp.target.model = str(folder)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(mtp))
    for format, command in ENGINES.items():
        faults = audit(head, format)
        if reason := NOT_RUN.get((family, format)):
            assert len(faults) == 1 and reason in faults[0]
            with pytest.raises(ExportError):
                export(head, format, tmp_path / format)
            assert not (tmp_path / format).exists()
            continue
        assert faults == []
        written = files(export(head, format, tmp_path / format))
        text = (tmp_path / format / "README.md").read_text()
        assert text.startswith("---\nlicense: mit\n---\nThe target.\n") and command in text
        assert {name: mark for name, mark in files(folder).items() if name != "README.md"} == {
            name: mark for name, mark in written.items() if name != "README.md"
        }


def test_a_module_is_checked_before_it_goes_back(checkpoint, toy_parts, mtp, tmp_path):
    folder, head = checkpoint("qwen3_next"), tmp_path / "run" / "head"
    module = module_of(folder, toy_parts, mtp)
    module.fc.weight.data[0, :3] = float("nan")
    save_head(module, head)
    mtp.target.model = str(folder)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(mtp))
    for format in ("mtp", *ENGINES):
        assert audit(head, format) == ["tensor mtp.fc.weight has 3 values that are NaN or infinite"]
        with pytest.raises(ExportError, match=r"mtp\.fc\.weight"):
            export(head, format, tmp_path / "out")
    with pytest.raises(ExportError, match="number format of its target"):
        export(head, "mtp", tmp_path / "out", dtype="float16")
    shard = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    save_file({name: t for name, t in tensors.items() if name != "mtp.norm.weight"}, shard)
    assert any("mtp.norm.weight is missing" in line for line in audit(head, "vllm"))


def test_an_export_that_fails_half_way_leaves_nothing_behind(checkpoint, toy_parts, mtp, tmp_path, monkeypatch):
    folder = checkpoint("qwen2")
    head, before = module_of(folder, toy_parts, mtp), set(tmp_path.iterdir())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mtp_checkpoint.shutil, "copy2", full)
    with pytest.raises(OSError, match="No space"):
        write_back(head, folder, tmp_path / "out")
    assert set(tmp_path.iterdir()) == before
