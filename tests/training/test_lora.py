"""LoRA on a head: against peft's own layers, the chain rule, and full training; what is saved is merged."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from headtrain.config import ConfigError, RecipeConfig
from headtrain.configcheck import validate
from headtrain.heads.base import new_head
from headtrain.target import TargetParts
from headtrain.training.batches import Plan, collate, count_pairs
from headtrain.training.lora import Factors
from headtrain.training.optim import lr_at

RANK = 4


def by_peft(toy, run, steps: int, lr: float):
    """The same training by torch and peft alone, whose layers compute x W + s (x A) B."""
    from peft import LoraConfig, inject_adapter_in_model

    from headtrain.data_gen.store import CaptureStore

    store = CaptureStore(run / "captures")
    rows = sorted((row for row in store.rows if row.split == "train"), key=lambda row: row.id)
    head = toy.toy_head()
    pairs = count_pairs(store, rows, head.t2d, toy.DEPTHS, 64)
    rows = [row for row, count in zip(rows, pairs[:, 0], strict=True) if count]
    plan = Plan([row.tokens for row in rows], 64, seed=7, parts=1)
    torch.manual_seed(7)
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["fc", "mix"]), head)
    factors = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(factors, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        chosen = [rows[row] for micro in plan.step(step) for row in micro]
        batch = collate([store.read(row) for row in chosen], [row.id for row in chosen])
        batch.count_D = torch.ones(toy.DEPTHS)
        with torch.no_grad():
            batch.count_D = head(batch).count_D
        optimizer.zero_grad()
        head(batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(factors, 0.5)
        optimizer.param_groups[0]["lr"] = lr * lr_at(step + 1, steps, round(0.1 * steps), "cosine")
        optimizer.step()
    return {name: p.detach() for name, p in head.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_factors_train_as_pefts_own_layers_do_at_every_zero_stage(toy, train, weights, tmp_path, stage):
    train(tmp_path, steps=6, clip=0.5, lora=RANK, zero_stage=stage)
    expected, found = by_peft(toy, tmp_path, 6, lr=5e-3), weights(tmp_path)
    trained = {name: tensor for name, tensor in expected.items() if "lora_" in name}
    assert len(trained) == 4
    for name, tensor in trained.items():
        torch.testing.assert_close(found[f"lora.layers.{name}"], tensor, rtol=0, atol=2e-5)
    assert bool(trained["mix.lora_B.default.weight"].any())
    for name, tensor in toy.toy_head().state_dict().items():
        assert torch.equal(found[name], tensor), f"{name} stays the parent's"


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"zero_stage": 3}, {"ema": 0.5}], ids=str)
def test_every_saved_head_has_the_factors_merged(toy, train, tmp_path, options):
    train(tmp_path, steps=6, save_every=3, eval_every=3, lora=RANK, lr=2e-2, **options)
    for place in (tmp_path / "training" / "checkpoints").iterdir():
        held = load_file(place / ("ema.safetensors" if "ema" in options else "weights.safetensors"))
        head, parent = toy.read_head(place / "head"), toy.toy_head()
        for name in ("fc", "mix"):
            a, b = (held[f"lora.layers.{name}.lora_{x}.default.weight"] for x in "AB")
            base = parent.get_submodule(name).weight * (parent.feature_scale if name == "fc" else 1)
            added = 2 * (b @ a) * (parent.feature_scale if name == "fc" else 1)
            tolerance = 0.02 if options.get("precision") == "bf16" else 1e-6
            torch.testing.assert_close(head.get_submodule(name).weight, base + added, rtol=tolerance, atol=tolerance)
            assert float(added.abs().max()) > 0.01
    config = (tmp_path / "head" / "config.json").read_text()
    assert "lora" not in config and not any("lora" in name for name in load_file(tmp_path / "head/model.safetensors"))


def test_before_the_first_step_the_head_is_its_parent_to_the_bit(toy, train, tmp_path):
    with_lora = train(tmp_path / "a", steps=1, lora=RANK)[0]
    without = train(tmp_path / "b", steps=1)[0]
    assert with_lora["step"] == 0 and with_lora["tau"] == without["tau"]
    factors = Factors(head := toy.toy_head(), toy.recipe(lora=RANK).head.lora, 0)
    for name, weight in factors.merged().items():
        assert torch.equal(weight, head.state_dict()[name])


def test_a_head_learns_by_its_factors(train, tmp_path):
    losses = [line["loss"] for line in train(tmp_path, steps=60, lora=8, targets=["fc", "mix", "lm_head"], lr=2e-2)
              if "loss" in line]  # fmt: skip
    assert losses[-1] < losses[0] - 0.5


# ------------------------------------------------------------------------------------------------- every head type

KINDS = {
    "eagle3": {}, "eagle": {"draft_vocab": "full"}, "medusa": {}, "mtp": {"init_from": "scratch"},
    "peagle": {"layers": 2},
}  # fmt: skip


@pytest.fixture
def made(toy):
    """made(kind): (a head of that type, a batch)."""

    class Config:
        hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim = toy.HIDDEN, 48, 4, 2, 8
        rms_norm_eps, max_position_embeddings, num_hidden_layers = 1e-5, 512, 4

    embedding, lm_head, _ = toy.language()
    rope = {"rope_theta": 1e4, "rope_type": "default"}
    parts = TargetParts(embedding, lm_head, torch.ones(toy.HIDDEN), Config, rope, set())

    def make(kind, **train):
        recipe = toy.recipe(**train)
        head = recipe.head
        head.type, head.unroll, head.draft_vocab, head.taps = kind, 3, 40, [1, 2]
        for key, value in KINDS[kind].items():
            setattr(head, key, value)
        batch = collate([toy.row(n, 5, 20) for n in range(8)], list("abcdefgh"))
        counts = torch.bincount(batch.ids_N, minlength=toy.VOCAB)
        made = new_head(recipe, parts, counts, counts, batch)
        generator = torch.Generator().manual_seed(1)
        for p in made.parameters():  # a calibrated start has zeros, whose gradients are zeros too
            p.data += 0.05 * torch.randn(p.shape, generator=generator)
        return made.train(), batch

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_factors_get_the_gradients_of_the_weights_they_change(made, kind, checkpointing, monkeypatch):
    """d/dA = s Bᵀ dW, d/dB = s dW Aᵀ: through every place where the head uses the weight, recomputed ones too."""
    from headtrain.heads import peagle

    if checkpointing:
        if kind == "medusa":
            pytest.skip("has no such setting")
        monkeypatch.setattr(peagle, "PIECE", 40)
    head, batch = made(kind, checkpointing=checkpointing)
    section = RecipeConfig().head.lora
    section.rank = RANK
    factors = Factors(head, section, 0)
    layers = {name: factors.layers.get_submodule(name) for name in factors.names}
    assert len(layers) >= 3 and not any("lm_head" in name for name in layers)
    for layer in layers.values():
        torch.nn.init.normal_(layer.lora_B.default.weight, std=0.1)
    factors.lend()
    loss = head(batch).loss
    loss.backward()
    assert all(p.grad is None for p in head.parameters())

    plain, _ = made(kind, checkpointing=checkpointing)
    plain.load_state_dict({**head.state_dict(), **{name: w.detach() for name, w in factors.merged().items()}})
    expected = plain(batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, layer in layers.items():
        a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
        full = plain.get_submodule(name).weight.grad
        assert bool(full.any()), name
        torch.testing.assert_close(a.grad, 2 * b.detach().T @ full, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(b.grad, 2 * full @ a.detach().T, rtol=1e-4, atol=1e-6)


def test_a_target_that_is_no_layer_of_the_head_is_refused_with_those_there_are(made):
    head, _ = made("eagle3")
    section = RecipeConfig().head.lora
    section.rank, section.targets = 2, ["q_proj", "w_proj"]
    with pytest.raises(ValueError, match=r"head\.lora\.targets: w_proj is none of .* fc, midlayer\.self_attn\.q_proj"):
        Factors(head, section, 0)
    section.targets = ["q_proj", "mlp.up_proj"]
    assert Factors(head, section, 0).names == ["midlayer.self_attn.q_proj", "midlayer.mlp.up_proj"]


@pytest.mark.parametrize(("keys", "words"), [
    ({"head.init_from": None}, r"head\.lora\.rank=4: factors change a head that exists; give one as head\.init_from"),
    ({"head.type": "mtp", "head.init_from": "scratch"}, "give one as head.init_from"),
    ({"train.optimizer": "muon"}, r"head\.lora\.rank=4 with train\.optimizer=muon"),
    ({"head.type": "peagle", "head.train_embedding": True}, r"with head\.train_embedding=true"),
    ({"head.freeze_lm_head": True, "head.lora.targets": ["fc", "lm_head"]}, r"with head\.freeze_lm_head=true"),
    ({"head.lora.rank": None, "head.lora.alpha": 2.0}, r"head\.lora\.alpha=2\.0 without head\.lora\.rank"),
    ({"head.lora.rank": 0}, r"head\.lora\.rank=0: not allowed"),
])  # fmt: skip
def test_what_lora_cannot_go_with_is_refused(keys, words):
    recipe = RecipeConfig()
    recipe.head.init_from, recipe.head.lora.rank = "runs/a/head", 4
    validate(recipe)
    for key, value in keys.items():
        *way, last = key.split(".")
        node = recipe
        for part in way:
            node = getattr(node, part)
        setattr(node, last, value)
    with pytest.raises(ConfigError, match=words):
        validate(recipe)
