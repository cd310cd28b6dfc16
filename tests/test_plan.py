"""`headtrain plan`: its numbers against models that are built for real, and against figures worked by hand."""

from __future__ import annotations

import json

import pytest

from headtrain import configload, plan
from headtrain.config import ConfigError, RecipeConfig


def load(name, *overrides) -> RecipeConfig:
    return configload.load(name, list(overrides))


@pytest.mark.parametrize(
    ("name", "billions"), [("eagle3_llama8b", 8.030), ("eagle3_llama70b", 70.554), ("eagle3_qwen3_8b", 8.191),
                           ("eagle3_qwen3_32b", 32.8), ("eagle3_mistral7b", 7.25), ("eagle3_mistral_small", 23.6)]
)  # fmt: skip
def test_the_targets_size_is_what_its_makers_publish(name, billions):
    assert plan.model_of(load(name)).target / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(("name", "billions"), [  # latent attention and biases are not told apart
    ("eagle3_qwen3_30b_a3b", 30.5), ("eagle3_gpt_oss_20b", 20.9), ("eagle3_gpt_oss_120b", 116.8),
    ("eagle3_glm45_air", 106.8), ("eagle3_deepseek_v3", 671),
])  # fmt: skip
def test_experts_are_counted_all_in_memory_and_few_for_each_token(name, billions):
    model = plan.model_of(load(name))
    assert model.target / 1e9 == pytest.approx(billions, rel=5e-3)
    assert 0.04 < model.active / model.target < 0.21


def test_an_mtp_module_with_experts_is_counted_as_the_familys_layer_is_built():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = load("mtp_glm45_air")
    shape = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96, "experts": 8,
             "experts_per_token": 2, "expert_intermediate": 32}  # fmt: skip
    vars(config.target.shape).update(shape)
    model = plan.model_of(config)
    settings = {
        "num_hidden_layers": 1, "first_k_dense_replace": 0, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "attention_bias": False,
    }  # fmt: skip
    layer = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **settings)).model.layers[0]
    fc_and_norms = 2 * 64 * 64 + 3 * 64
    assert model.head == sum(p.numel() for p in layer.parameters()) + fc_and_norms
    assert model.head_active == model.head - 6 * 3 * 64 * 32


def test_target_and_head_are_counted_as_they_are_built():
    from headtrain.heads.base import HeadConfig
    from headtrain.heads.eagle3 import Eagle3Head
    from headtrain.smoke import SHAPE, model_config

    config = load("eagle3_llama8b", "head.draft_vocab=128", "head.taps=[1,2]", "head.intermediate=96")
    config.target.shape = SHAPE
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_config(model_config("llama", SHAPE))
    head = Eagle3Head(HeadConfig(
        hidden_size=64, target_hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=384, draft_vocab_size=128, taps=[1, 2], target_layers=8,
    ))  # fmt: skip
    model = plan.model_of(config)
    assert model.target == sum(p.numel() for p in target.parameters())
    assert model.head == sum(p.numel() for p in head.parameters())


def test_disk_for_captures_is_known_before_the_start(monkeypatch):
    """hidden 2880, 3 taps + last hidden, bf16, 30,000 rows of 65,536 tokens, 2 TB free."""
    monkeypatch.setattr(plan, "free_bytes", lambda _: 2_000_000_000_000)
    config = load(
        "eagle3_llama8b", "target.model=me/model", "target.shape.hidden=2880", "data.max_length=65536",
        "data.responses.max_new_tokens=70000", "data.prompts=[{source:x.jsonl,limit:30000}]",
    )  # fmt: skip
    said = plan.text(config)
    assert "23,040 B per token" in said
    assert "1,509,949,440 B per row of 65,536 tokens" in said
    assert "45.3 TB at most for all 30,000 rows; free 2.0 TB" in said
    assert "TOO LITTLE SPACE" in said


def test_zero_stages_share_optimizer_gradients_and_weights_in_that_order():
    config = load("eagle3_llama70b")
    model = plan.model_of(config)
    parts = [plan.training_bytes(model, config, 8, zero) for zero in range(4)]
    assert [p["optimizer"] for p in parts] == [model.head * n for n in (12, 12 / 8, 12 / 8, 12 / 8)]
    assert [p["gradients"] for p in parts] == [model.head * n for n in (2, 2, 2 / 8, 2 / 8)]
    assert [p["weights"] for p in parts] == [model.head * n for n in (2, 2, 2, 2 / 8)]
    assert len({p["activations"] for p in parts}) == 1


def test_offload_checkpointing_and_an_average_change_what_they_are_said_to():
    plain, model = load("eagle3_llama70b"), plan.model_of(load("eagle3_llama70b"))
    usual = plan.training_bytes(model, plain, 8, 2)
    for overrides, part, smaller in (
        (["train.offload=true", "train.zero_stage=2"], "optimizer", True),
        (["train.checkpointing=true"], "activations", True), (["train.ema=0.99"], "optimizer", False),
    ):  # fmt: skip
        found = plan.training_bytes(model, load("eagle3_llama70b", *overrides), 8, 2)
        assert (found[part] < usual[part]) is smaller and found[part] != usual[part]
        assert {name: size for name, size in found.items() if name != part}.items() <= usual.items()


def test_lora_spares_the_optimizers_state_and_holds_the_weights_twice():
    usual, lora = load("eagle3_llama70b"), load("eagle3_llama70b", "head.init_from=a", "head.lora.rank=16")
    parts = [plan.training_bytes(plan.model_of(c), c, 8, 0) for c in (usual, lora)]
    assert parts[1]["optimizer"] == 0 and parts[1]["weights"] == 2 * parts[0]["weights"]
    assert parts[1]["gradients"] == parts[0]["gradients"]


def test_medusa2_has_the_target_in_memory_too():
    usual, joint = load("medusa_llama8b", "train.batch_tokens=4096"), load("medusa2_llama8b")
    model = plan.model_of(joint)
    parts = [plan.training_bytes(model, c, 8, 0) for c in (usual, joint)]
    assert parts[1]["frozen"] - parts[0]["frozen"] == 2 * model.target
    more = parts[1]["activations"] - parts[0]["activations"]
    assert more == 2 * 4096 * (32 * 4096 + 14 * 4096 + 4 * 14336)


def test_a_target_that_does_not_fit_one_gpu_takes_several(monkeypatch):
    monkeypatch.setattr(plan, "gpu_bytes", lambda: [80e9] * 8)
    said = "too much for one GPU of 80.0 GB: set target.gpus=3, as many GPUs together"
    assert said in plan.text(load("eagle3_llama70b", "target.gpus=1"))
    together = load("eagle3_llama70b")
    assert "fits 4 GPUs of 80.0 GB together (target.gpus): 2 such processes" in plan.text(together)
    assert "fits one GPU of 80.0 GB: one process per GPU" in plan.text(load("eagle3_llama8b"))
    monkeypatch.setattr(plan, "gpu_bytes", lambda: [24e9] * 8)
    assert "lower data.responses.batch_tokens to" in (text := plan.text(load("eagle3_llama8b")))
    assert ", or set target.gpus=2, as many GPUs together" in text
    assert "set target.gpus=10," in plan.text(together) and "lower data" not in plan.text(together)
    most = load("eagle3_llama70b", "target.gpu_memory=10")  # the rest waits in the CPU's memory
    assert "fits 4 GPUs of 24.0 GB together" in plan.text(most)


@pytest.mark.parametrize(("keys", "weights"), [
    ([], 16.06e9), (["target.gpu_memory=6"], 6e9), (["target.gpu_memory=20"], 16.06e9),
    (["launch.target=apart", "target.gpus=2", "target.gpu_memory=6"], 12e9), (["target.cpu_memory=6"], 16.06e9),
])  # fmt: skip
def test_a_target_of_online_training_counts_by_what_of_it_lies_on_gpus(keys, weights):
    config = load("eagle3_llama8b", "data.captures.mode=online", "train.batch_tokens=8", *keys)
    assert plan.target_bytes(plan.model_of(config), config) - plan.LOGITS == pytest.approx(weights, rel=1e-3)


def test_gpus_that_hold_one_target_together_answer_as_one():
    four, one = load("eagle3_llama70b"), load("eagle3_llama70b", "target.gpus=1")
    devices, model = plan.Devices(8, 80e9, True, 2), plan.model_of(four)
    slow, fast = (plan.seconds(model, config, devices, 1000)["answering"] for config in (four, one))
    assert slow == pytest.approx(4 * fast)


def test_a_config_within_reach_that_disagrees_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 31, "hidden_size": 4096}))
    with pytest.raises(ConfigError, match=r"target.shape.layers=32: .* has 31; correct the recipe"):
        plan.text(load("eagle3_llama8b", f"target.model={tmp_path}"))
    (tmp_path / "config.json").write_text("{cut")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON .*copy the model again"):
        plan.text(load("eagle3_llama8b", f"target.model={tmp_path}"))


@pytest.mark.parametrize("place", ["/tmp", "./nowhere", "~/nowhere", "-x/y", "a b/c", "me/model", "/no/where"])
def test_a_target_that_is_not_within_reach_yet_is_planned_by_its_shape(place):
    assert "32 blocks" in plan.text(load("eagle3_llama8b", f"target.model={place}"))


def test_a_shape_left_out_is_read_from_the_models_config_or_asked_for(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"target: {{model: {tmp_path}, family: llama}}\nhead: {{draft_vocab: full}}\n")
    with pytest.raises(ConfigError, match=r"plan needs target.shape.layers"):
        plan.text(load(str(recipe)))
    own = {
        "num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 384,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"text_config": own}))
    model = plan.model_of(load(str(recipe)))
    assert (model.shape.kv_heads, model.shape.head_dim, model.draft_vocab) == (4, 16, 384)
    with pytest.raises(ConfigError, match=r"head\.draft_vocab=385 exceeds the target's 384 tokens"):
        plan.text(load(str(recipe), "head.draft_vocab=385"))


def test_twice_the_rows_take_twice_the_time_and_disk():
    one = load("eagle3_qwen3_8b", "data.prompts=[{source:x,limit:1000}]")
    devices = plan.Devices(8, 80e9, True, 2)
    model = plan.model_of(one)
    first, second = (plan.seconds(model, one, devices, rows) for rows in (1000, 2000))
    assert second["answering"] == pytest.approx(2 * first["answering"])
    assert second["training"] == pytest.approx(2 * first["training"])
