"""Medusa-2 on a tiny random target: what is taught, what is kept, when the target moves, and what is saved."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from headtrain import configload, pipeline, stages
from headtrain.config import ConfigError, TargetConfig
from headtrain.configcheck import validate
from headtrain.data_gen.store import CaptureStore
from headtrain.target import Target
from headtrain.training import trainer
from headtrain.training.batches import collate
from headtrain.training.medusa2 import Student
from headtrain.training.weights import Answer

MORE = ["smoke=true", "head.draft_vocab=full", "head.medusa2.rank=4", "train.zero_stage=0"]


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """(config, run folder) of a Medusa-2 run whose captures are made."""
    run = tmp_path_factory.mktemp("medusa2") / "run"
    config = pipeline.prepared(configload.load("medusa2_llama8b", [f"run_dir={run}", *MORE]))
    job = pipeline.Job(config)
    for stage in ("prompts", "responses", "captures"):
        job.open(stage)
    for stage in ("smoke_target", "check", "prompts", "responses", "captures"):
        stages.STAGES[stage](config, run, {"coming": "prompts,responses,captures,training"})
    return config, run


@pytest.fixture
def batch(captured):
    _, run = captured
    store = CaptureStore(run / "captures")
    rows = store.rows[:5]
    return collate([store.read(row) for row in rows], [row.id for row in rows])


@pytest.fixture
def student(captured):
    config, _ = captured
    student = Student.load(config)
    student.joint = True
    return student


def moved(student) -> None:
    """Gives the factors that start at zero other values."""
    made = torch.Generator().manual_seed(3)
    for name, p in student.weights().items():
        if "lora_B" in name:
            p.data = 0.1 * torch.randn(p.shape, generator=made)


def test_packed_documents_go_through_the_target_each_for_itself(student, batch):
    moved(student)
    target, _ = student.outside
    found = student.last_states(batch)
    for start, stop in zip(batch.cu_R1, batch.cu_R1[1:], strict=False):
        alone = target.forward(batch.ids_N[None, start:stop]).last_BLH[0]
        torch.testing.assert_close(found[start:stop], alone, rtol=1e-4, atol=1e-4)


def test_untouched_factors_give_what_was_captured(student, batch):
    followed = student.followed(batch)
    real = torch.ones(len(batch.ids_N), dtype=torch.bool).index_fill(0, batch.cu_R1[1:].long() - 1, False)
    torch.testing.assert_close(followed.last_NT[real], batch.last_NT[real], rtol=0.01, atol=0.01)  # both in bfloat16
    torch.testing.assert_close(followed.logsumexp_N[real], batch.logsumexp_N[real], rtol=1e-4, atol=1e-4)
    assert torch.equal(followed.argmax_N[real], batch.argmax_N[real])


def test_the_saved_adapter_is_the_trained_target_wherever_it_is_loaded(captured, student, batch, tmp_path):
    config, _ = captured
    moved(student)
    student.save(tmp_path / "adapter", student.weights())
    target = Target.load(TargetConfig(model=config.target.model, adapter=str(tmp_path / "adapter"), dtype="float32",
                                      device="cpu"))  # fmt: skip
    start, stop = batch.cu_R1[1], batch.cu_R1[2]
    merged = target.forward(batch.ids_N[None, start:stop]).last_BLH[0]
    torch.testing.assert_close(student.followed(batch).last_NT[start:stop].float(), merged, rtol=1e-2, atol=1e-2)
    plain = Target.load(TargetConfig(model=config.target.model, dtype="float32", device="cpu"))
    assert not torch.allclose(plain.forward(batch.ids_N[None, start:stop]).last_BLH[0], merged, atol=0.1)


def heads(captured) -> torch.nn.Module:
    config, run = captured
    head = trainer.build_head(config, run, torch.device("cpu"))
    for p in head.blocks.parameters():
        torch.nn.init.normal_(p, std=0.05)
    return head


def test_the_loss_of_staying_is_the_cross_entropy_with_the_captured_distribution(captured, student, batch):
    """Worked out in full over [positions, vocabulary]; its gradient too."""
    moved(student)
    head, target = heads(captured), student.outside[0]
    batch = batch.to("cpu", torch.float32)
    last_NT = student.last_states(batch).detach().requires_grad_()
    loss = student.loss(head, batch, last_NT)
    loss.backward()
    again = last_NT.detach().clone().requires_grad_()
    total = count = 0
    for start, stop in zip(batch.cu_R1.tolist(), batch.cu_R1.tolist()[1:], strict=False):
        for p in range(start, stop - 2):
            if batch.supervised_N[p + 1] and batch.supervised_N[p + 2]:
                teacher = (batch.last_NT[p + 1] @ target.lm_head.weight.T).softmax(-1)
                total = total - (teacher * (again[p + 1] @ target.lm_head.weight.T).log_softmax(-1)).sum()
                count += 1
    assert count > 20
    (total / count).backward()
    torch.testing.assert_close(loss, total / count, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last_NT.grad, again.grad, rtol=1e-3, atol=1e-5)


def test_before_the_target_has_moved_only_the_heads_pull_at_it(captured, student, batch):
    """Staying costs nothing at the start (the gradient of a Kullback-Leibler divergence is zero where it is)."""
    head, grads = heads(captured), []
    student.last_states(batch)
    batch = student.followed(batch.to("cpu", torch.float32))  # captures without the rounding to bfloat16
    for student.distill in (0.0, 5.0):
        student.zero_grad()
        Answer(head, None, student)(batch, torch.zeros(()))[0].backward()
        grads.append({name: p.grad.clone() for name, p in student.weights().items() if "lora_B" in name})
    assert all(bool(grad.any()) for grad in grads[0].values())
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-2, atol=1e-4 * float(grad.abs().max()) + 1e-6)


@pytest.fixture
def train(captured, tmp_path, monkeypatch):
    """train(*overrides, name): trains a copy of the captured run; returns (run, log lines)."""
    _, source = captured
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)
    monkeypatch.setattr(trainer, "leave", lambda: None)

    def run_it(*overrides, name="a"):
        run = tmp_path / name
        if not run.is_dir():
            shutil.copytree(source, run)
        config = pipeline.prepared(configload.load("medusa2_llama8b", [f"run_dir={run}", *MORE]))
        for text in ("train.log_every=1", *overrides):
            key, value = text.split("=")
            section = config.train if key.startswith("train.") else config.head.medusa2
            setattr(section, key.rpartition(".")[2], json.loads(value) if value != "bf16" else value)
        config.target.model = str(source / "target" / "tiny-random-llama")
        trainer.train(config, run)
        return run, [json.loads(line) for line in (run / "training" / "log.jsonl").read_text().splitlines()]

    return run_it


def held(run, step, kind="weights"):
    return load_file(run / "training" / "checkpoints" / f"step-{step:08d}" / f"{kind}.safetensors")


@pytest.mark.parametrize("options", [(), ("train.zero_stage=2", 'train.precision="bf16"', "train.accumulate=2")])
def test_the_heads_go_first_then_the_target_and_a_resumed_run_ends_alike(train, options):
    options = (*options, "train.steps=10", "train.save_every=4", "train.keep=9", "heads_first=0.4", "train.lr=0.003")
    run, lines = train(*options)
    before, after = held(run, 4), held(run, 10)
    factors = [name for name in after if name.startswith("target.") and "lora_B" in name]
    assert len(factors) == 8 * 7
    assert not any(bool(before[name].any()) for name in factors) and all(bool(after[name].any()) for name in factors)
    assert not torch.equal(before["blocks.0.layers.0.weight"], after["blocks.0.layers.0.weight"])
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 10 and losses[4] > losses[3] + 1, "that of staying with the target's distribution is added"

    other = run.with_name("b")
    shutil.copytree(run, other)
    for step in (8, 10):
        shutil.rmtree(other / "training" / "checkpoints" / f"step-{step:08d}")
    train(*options, name="b")
    for kind in ("weights", "exp_avg"):
        one, two = held(run, 10, kind), held(other, 10, kind)
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_the_head_and_the_adapter_that_belong_together_are_saved_together(train):
    run, _ = train("train.steps=6", "train.save_every=6", "heads_first=0.0", "train.eval_every=6", "train.lr=0.003")
    best = json.loads((run / "training" / "best.json").read_text())
    names = {"adapter_config.json", "adapter_model.safetensors"}
    places = [run / "head", run / "training" / best["folder"], run / "training/checkpoints/step-00000006/head"]
    for place in places:
        assert names <= {path.name for path in (place / "adapter").iterdir()}
        assert not any("lora" in name for name in load_file(place / "model.safetensors"))
    last = load_file(places[2] / "adapter" / "adapter_model.safetensors")
    trained = {name: tensor for name, tensor in held(run, 6).items() if name.startswith("target.")}
    assert len(last) == len(trained)
    for name, tensor in trained.items():
        assert torch.equal(last[name.removeprefix("target.").replace(".default.", ".")], tensor)


def test_a_head_that_brings_an_adapter_is_measured_with_it_alone(tmp_path):
    config = configload.load("medusa_llama8b", [])
    assert stages.served_target(config, tmp_path) == config.target
    (tmp_path / "head" / "adapter").mkdir(parents=True)
    assert stages.served_target(config, tmp_path).adapter == str(tmp_path / "head" / "adapter")
    assert config.target.adapter is None
    config.target.adapter = "me/other"
    with pytest.raises(ConfigError, match=r"target\.adapter=me/other: the head brings an adapter"):
        stages.served_target(config, tmp_path)
    config.target.adapter = None
    for name in "ab":
        (tmp_path / "heads" / name).mkdir(parents=True)
    (tmp_path / "heads" / "b" / "adapter").mkdir()
    with pytest.raises(ConfigError, match="head b: made for a target with its own adapter, unlike the others"):
        stages.served_target(config, tmp_path)


def test_checkpointing_changes_no_gradient(captured, batch):
    config, _ = captured
    head, grads, calls = heads(captured), [], []
    for checkpointing in (False, True):
        target = Target.load(config.target, "float32")
        student = Student(target, config.head.medusa2, 0, checkpointing)
        target.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
        moved(student)
        student.joint = True
        Answer(head, None, student)(batch.to("cpu", torch.float32), torch.zeros(()))[0].backward()
        grads.append([p.grad for p in student.parameters()])
        assert len(calls) == (3 if checkpointing else 1), "computed again in the backward pass"
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(("override", "words"), [
    ("head.type=eagle", "only heads of type medusa are trained along with the target"),
    ("target.adapter=a/b", r"head\.medusa2\.rank=4 with target\.adapter=a/b"),
    ("train.zero_stage=3", r"with train\.zero_stage=3"), ("train.ema=0.9", r"with train\.ema=0\.9"),
    ("train.optimizer=muon", r"with train\.optimizer=muon"),
    ("train.decode_prompts=2", r"with train\.decode_prompts=2"),
    ("head.medusa2.rank=null", r"head\.medusa2\.alpha=16\.0 without head\.medusa2\.rank"),
    ("head.medusa2.heads_first=2", r"head\.medusa2\.heads_first=2"),
])  # fmt: skip
def test_what_does_not_go_with_a_target_in_training_is_refused(override, words):
    rest = [text for text in MORE[2:] if text.split("=")[0] != override.split("=")[0]]
    more = ["train.checkpointing=false"] if "null" in override else []
    more += ["head.draft_vocab=full"] if "eagle" in override else []
    with pytest.raises(ConfigError, match=words):
        validate(configload.load("medusa2_llama8b", [*rest, *more, override]))


def test_targets_that_are_no_layers_of_the_blocks_are_refused(captured):
    config, _ = captured
    config.head.medusa2.targets = ["q_proj", "lm_head"]
    try:
        with pytest.raises(ValueError, match=r"head\.medusa2\.targets: lm_head is no linear .* q_proj"):
            Student.load(config)
    finally:
        config.head.medusa2.targets = None
