"""Targets with quantised weights: what runs here gives the states of the stored numbers; the rest is refused."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headtrain import quantised
from headtrain.config import ConfigError, RecipeConfig, TargetConfig
from headtrain.lean import speed_up
from headtrain.target import Target, TargetError, load_parts

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
}
INT8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": GROUP}, "ignore": ["lm_head"],
}  # fmt: skip
TOKENS = torch.arange(3, 43)[None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """make(name) -> a folder with a tiny random llama: plain, fp8, int8, or fp8 with a quantised lm_head."""
    import transformers

    from headtrain.smoke import byte_tokenizer

    root = tmp_path_factory.mktemp("quantised")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=384, head_dim=16, tie_word_embeddings=False, initializer_range=0.2, eos_token_id=258,
        bos_token_id=None, max_position_embeddings=512,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)

    def make(name: str) -> Path:
        folder = root / name
        if folder.is_dir():
            return folder
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        if name == "plain":
            return folder
        stored, found = load_file(folder / "model.safetensors"), {}
        for key, weight in stored.items():
            linear = "proj" in key or (key == "lm_head.weight" and name == "head")
            found |= (int8 if name == "int8" else fp8)(key, weight) if linear else {key: weight}
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
        own = json.loads((folder / "config.json").read_text())
        own["quantization_config"] = INT8 if name == "int8" else FP8
        (folder / "config.json").write_text(json.dumps(own))
        return folder

    return make


def fp8(key: str, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    """In tiles of 32 x 32."""
    tiles = weight_OI.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
    scales = tiles.abs().amax((1, 3)) / 448
    low = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return {key: low.flatten(2).flatten(0, 1), f"{key}_scale_inv": scales}


def int8(key: str, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = weight_OI.abs().amax(1, keepdim=True) / 127
    return {key: (weight_OI / scales).round().to(torch.int8), f"{key}_scale": scales}


def numbers(folder: Path, key: str) -> torch.Tensor:
    stored = load_file(folder / "model.safetensors")
    return quantised.plain(key, stored, stored.get, [32, 32])


def loaded(folder: Path, dtype: str = "float32") -> Target:
    return Target.load(TargetConfig(model=str(folder), dtype=dtype, device="cpu"))


@pytest.mark.parametrize(
    ("name", "words"), [("fp8", "fp8"), ("int8", "compressed-tensors int-quantized")], ids=lambda x: x.split()[0]
)
def test_a_quantised_target_gives_the_states_of_its_numbers(name, words, folders):
    if name == "int8":
        pytest.importorskip("compressed_tensors")
    own, target = loaded(folders("plain")), loaded(folders(name))
    assert (target.quantised, own.quantised) == (words, None)
    for key, parameter in own.model.named_parameters():
        if "proj" in key:
            parameter.data.copy_(numbers(folders(name), key))
    far = 1e-4 if name == "fp8" else 0.05  # int8 rounds what goes in, too
    ours, theirs = (x.forward(TOKENS, taps=(1, 3)) for x in (target, own))
    for a, b in ((ours.taps_BLAH, theirs.taps_BLAH), (ours.last_BLH, theirs.last_BLH)):
        assert float((a - b).norm() / b.norm()) < far
    before = target.forward(TOKENS, taps=(3,)).taps_BLAH
    speed_up(target)
    assert (target.lean is None) == (name == "int8")  # which would leave the rounding out
    torch.testing.assert_close(target.forward(TOKENS, taps=(3,)).taps_BLAH, before, atol=1e-4, rtol=1e-4)


def test_what_training_reads_is_plain_numbers_and_says_that_they_were_quantised(folders):
    parts, plain = load_parts(TargetConfig(model=str(folders("head")))), load_parts(_config(folders("plain")))
    assert parts.texts["quantised"] == "fp8" and "quantised" not in plain.texts
    assert parts.lm_head.dtype == torch.float32 and torch.equal(parts.embedding, plain.embedding)
    assert torch.equal(parts.lm_head, numbers(folders("head"), "lm_head.weight"))
    assert 0 < float((parts.lm_head - plain.lm_head).norm() / plain.lm_head.norm()) < 0.05


def _config(folder: Path) -> TargetConfig:
    return TargetConfig(model=str(folder))


def test_heads_are_lent_weights_as_numbers(folders):
    target = loaded(folders("head"))
    embedding, lm_head = target.lent()
    assert lm_head is target.lm_head.weight and embedding is target.embed.weight
    plain = lm_head.detach().clone()
    torch.testing.assert_close(plain, numbers(folders("head"), "lm_head.weight"), atol=1e-6, rtol=1e-6)
    target.lm_head.weight.data = plain.to(torch.float8_e4m3fn)
    target.lm_head.forward = lambda x: x @ plain.T  # as the kernel of a quantised one would
    torch.testing.assert_close(target.lent()[1], plain)


def test_scales_that_loading_leaves_aside_are_an_error(folders):
    model = loaded(folders("plain")).model
    for key in ("lm_head.weight_scale", "model.layers.0.mlp.up_proj.qweight", "model.layers.2.mlp.up_proj.qzeros"):
        with pytest.raises(ValueError, match=f"its files have {re.escape(key)}, which transformers does not use"):
            quantised.check_used(model, [key])
    quantised.check_used(model, ["model.layers.0.self_attn.k_scale", "model.layers.7.mlp.up_proj.weight_scale"])


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"qweight": torch.zeros(8, 384, dtype=torch.int32), "scales": torch.ones(1, 384)},
         r"lm_head is quantised \(lm_head.qweight, lm_head.scales\), which training cannot read"),
        ({"weight": torch.zeros(384, 32, dtype=torch.uint8)}, r"lm_head.weight is stored as uint8, which cannot be"),
        ({"weight": torch.zeros(384, 64, dtype=torch.int8)}, r"lm_head.weight is stored as int8, which cannot be"),
        ({"weight": torch.zeros(384, 64, dtype=torch.int8), "weight_scale": torch.ones(384, 1),
          "weight_zero_point": torch.ones(384, 1)}, r"lm_head.weight is stored as int8 with zero points"),
        ({"weight": torch.zeros(384, 64, dtype=torch.int8), "weight_scale": torch.ones(7, 1)},
         r"lm_head.weight_scale of shape \[7, 1\] does not fit lm_head.weight, \[384, 64\]"),
    ],
)  # fmt: skip
def test_an_lm_head_that_cannot_be_read_as_numbers_is_refused_by_name(stored, said, folders, tmp_path):
    tensors = load_file(folders("plain") / "model.safetensors")
    del tensors["lm_head.weight"]
    for file in folders("fp8").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors | {f"lm_head.{key}": value for key, value in stored.items()}, tmp_path / "model.safetensors")
    with pytest.raises(TargetError, match=said):
        load_parts(TargetConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("own", "words", "help_"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq 4 bits", "pip install optimum gptqmodel"),
        ({"quant_method": "quanto", "weights": "int4"}, "quanto", "pip install optimum-quanto"),
        ({"quant_method": "of-tomorrow"}, "of-tomorrow", "this transformers does not know"),
    ],
    ids=lambda x: x["quant_method"] if isinstance(x, dict) else "",
)
def test_a_kind_that_cannot_be_run_here_is_one_line_before_the_start(own, words, help_, folders, tmp_path):
    package = {"gptq": "gptqmodel", "quanto": "optimum"}.get(own["quant_method"])
    if package and importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    for file in folders("plain").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": own}
    (tmp_path / "config.json").write_text(json.dumps(config))
    from headtrain.checks import check_quantised, whole_config

    recipe = RecipeConfig(target=TargetConfig(model=str(tmp_path), device="cpu"))
    with pytest.raises(ConfigError, match=rf"its weights are quantised \({words}\), which.*{help_}"):
        check_quantised(recipe, whole_config(recipe.target))
    recipe.head.medusa2.rank = 4
    with pytest.raises(ConfigError, match=rf"head.medusa2.rank: a quantised target \({words}\)"):
        check_quantised(recipe, whole_config(recipe.target))
    with pytest.raises(TargetError, match=help_):
        loaded(tmp_path)


def test_a_weight_of_a_kind_of_its_own_is_not_packed():
    from headtrain.packed import can_pack

    class Own(torch.Tensor):
        pass

    weight = torch.nn.Parameter(torch.ones(16, 16), requires_grad=False)
    assert can_pack(weight)
    assert not can_pack(torch.nn.Parameter(weight.data.as_subclass(Own), requires_grad=False))


@pytest.mark.slow
def test_responses_captures_and_a_head_come_of_a_quantised_target(folders, headtrain, tmp_path):
    done = headtrain(
        "fit", "recipe=eagle3_llama8b", f"target.model={folders('fp8')}", "target.family=null", "target.device=cpu",
        "target.dtype=float32", "data.prompts=[package:headtrain.data_gen/smoke_prompts.jsonl]", "data.held_out=2",
        "data.valid=2", "data.max_length=256", "data.responses.max_new_tokens=20", "launch.workers=1",
        "head.draft_vocab=128",
        "head.taps=[1,2]", "head.unroll=2", "train.epochs=null", "train.steps=2", "train.precision=fp32",
        "train.batch_tokens=512", "eval.limit=2", "eval.k=[2]", "eval.max_new_tokens=8", "eval.speed_prompts=[1]",
        "eval.speed_tokens=8", "eval.cost_batches=[]", "run_dir=run",
        *(f"target.shape.{key}=null" for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        "target.shape.vocab=null",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its weights are quantised (fp8); on this device they are expanded to full width" in done.stdout
    index = json.loads((tmp_path / "run" / "captures" / "index.json").read_text())
    head = json.loads((tmp_path / "run" / "head" / "config.json").read_text())
    assert index["quantised"] == head["headtrain"]["made_for"]["quantised"] == "fp8"
