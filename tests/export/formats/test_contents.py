"""What stands in the exported files: tensor names, shapes and keys, written down from each loader and not computed."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn.functional import linear, silu
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headtrain.export import ExportError, export
from headtrain.heads.base import load_head

INFO = {"model": "org/Name-7B", "family": "llama"}
FIRST = {  # layer 0 of an EAGLE-3 head: hidden 64, 4 query and 2 key heads of 16, MLP 128
    "input_layernorm": [64], "hidden_norm": [64], "post_attention_layernorm": [64], "self_attn.q_proj": [64, 128],
    "self_attn.k_proj": [32, 128], "self_attn.v_proj": [32, 128], "self_attn.o_proj": [64, 64],
    "mlp.gate_proj": [128, 64], "mlp.up_proj": [128, 64], "mlp.down_proj": [64, 128],
}  # fmt: skip
LATER = FIRST | {"self_attn.q_proj": [64, 64], "self_attn.k_proj": [32, 64], "self_attn.v_proj": [32, 64]}
ENDS = {"fc.weight": [64, 192], "norm.weight": [64], "lm_head.weight": [50, 64], "d2t": [50], "t2d": [200]}


def named(prefix, layer, *without):
    return {f"{prefix}.{name}.weight": shape for name, shape in layer.items() if name not in without}


EAGLE3 = named("midlayer", FIRST) | ENDS
EAGLE = {"fc.weight": [64, 128]} | named("layers.0", LATER, "input_layernorm", "hidden_norm")
TENSORS = {
    ("eagle3", "vllm"): EAGLE3, ("eagle3", "sglang"): EAGLE3, ("eagle3", "trtllm"): EAGLE3, ("eagle3", "eagle"): EAGLE3,
    ("eagle3", "speculators"): named("layers.0", FIRST) | ENDS,
    ("eagle", "vllm"): EAGLE | {"fc.bias": [64]}, ("eagle", "sglang"): EAGLE | {"fc.bias": [64]},
    ("eagle", "eagle"): EAGLE,
    ("peagle", "vllm"): EAGLE3 | named("layers.1", LATER) | named("layers.2", LATER) | {"mask_hidden": [1, 192]},
    ("peagle", "speculators"): named("layers.0", FIRST) | ENDS | named("layers.1", LATER, "hidden_norm")
    | named("layers.2", LATER, "hidden_norm") | {"mask_hidden": [1, 1, 192]},
    ("medusa", "medusa"): {
        name: shape for n in range(3) for name, shape in
        ((f"{n}.0.linear.weight", [64, 64]), (f"{n}.0.linear.bias", [64]), (f"{n}.1.weight", [200, 64]))
    },
}  # fmt: skip
ROPE = {
    "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def written(head, format, tmp_path, **options):
    out = export(head, format, tmp_path / format, INFO, **options)
    (weights,) = out.glob("*.safetensors")
    return json.loads((out / "config.json").read_text()), load_file(weights)


@pytest.mark.parametrize(("kind", "format"), TENSORS)
def test_each_file_has_exactly_the_tensors_of_its_loader(kind, format, make_head, tmp_path):
    _, tensors = written(make_head(kind), format, tmp_path)
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == TENSORS[kind, format]


@pytest.mark.parametrize("format", ["vllm", "speculators"])
def test_a_trained_embedding_of_p_eagle_is_shipped(format, make_head, tmp_path):
    config, tensors = written(make_head("peagle", own_embedding=True), format, tmp_path)
    assert list(tensors["embed_tokens.weight"].shape) == [200, 64]
    assert config.get("embed_requires_grad", True) is True


def test_a_medusa_head_for_old_vllm_has_its_names(make_head, tmp_path):
    head = make_head("medusa", blocks=2, share_lm_head=True)
    config, tensors = written(head, "vllm", tmp_path, engine_version="0.32.0")
    wanted = {f"blocks.{n}.layers.{j}.{x}" for n in range(3) for j in range(2) for x in ("weight", "bias")}
    assert tensors.keys() == wanted | {"lm_heads.0.weight"}
    assert config["truncated_vocab_size"] == config["vocab_size"] and config["original_lm_head"] is True


def test_layers_above_the_first_have_their_norm_under_both_names(make_head, tmp_path):
    _, tensors = written(make_head("peagle"), "vllm", tmp_path)
    for layer in (1, 2):
        pair = [tensors[f"layers.{layer}.{name}.weight"] for name in ("input_layernorm", "hidden_norm")]
        assert torch.equal(*pair) and not torch.equal(pair[0], torch.ones_like(pair[0]))


def test_the_bias_that_sglang_would_fill_at_random_is_there_and_zero(make_head, tmp_path):
    config, tensors = written(make_head("eagle"), "sglang", tmp_path)
    assert config["architectures"] == ["LlamaForCausalLMEagle"] and not tensors["fc.bias"].any()
    assert written(make_head("eagle"), "vllm", tmp_path)[0]["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("format", ["vllm", "sglang", "trtllm", "speculators", "eagle"])
def test_the_maps_hold_offsets_and_a_mask_and_are_left_out_with_the_full_vocabulary(format, make_head, tmp_path):
    _, tensors = written(make_head("eagle3"), format, tmp_path)
    ids = torch.arange(50) + tensors["d2t"]
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist() and int(ids[-1]) > 50
    _, tensors = written(make_head("eagle3", "full", draft_vocab_size=200), format, tmp_path / "full")
    assert not {"d2t", "t2d"} & tensors.keys() and list(tensors["lm_head.weight"].shape) == [200, 64]


@pytest.mark.parametrize(("kind", "format"), [pair for pair in TENSORS if pair[1] not in ("eagle", "medusa")])
def test_a_head_size_of_its_own_is_written_out(kind, format, make_head, tmp_path):
    config, tensors = written(make_head(kind, head_dim=32), format, tmp_path)
    layer = config.get("transformer_layer_config", config)
    assert layer["head_dim"] == 32 and layer["num_attention_heads"] == 4 and layer["hidden_size"] == 64
    assert {t.shape[0] for name, t in tensors.items() if name.endswith("q_proj.weight")} == {128}
    assert {t.shape[0] for name, t in tensors.items() if name.endswith("k_proj.weight")} == {64}


@pytest.mark.parametrize(("kind", "format"), [pair for pair in TENSORS if pair[1] not in ("eagle", "medusa")])
def test_old_and_new_readers_find_the_same_scaled_rope(kind, format, make_head, tmp_path):
    config, _ = written(make_head(kind, rope=ROPE, max_position_embeddings=131072), format, tmp_path)
    layer = config.get("transformer_layer_config", config)
    assert layer["rope_parameters"] == ROPE and layer["max_position_embeddings"] == 131072
    assert layer["rope_theta"] == 500000.0 and layer["rope_scaling"] | {"rope_theta": 500000.0} == ROPE
    found = []
    for keys in ({"rope_theta", "rope_scaling"}, {"rope_parameters"}):
        kept = {key: value for key, value in layer.items() if not key.startswith("rope_") or key in keys}
        read = AutoConfig.for_model(kept.pop("model_type"), **kept)
        found.append(ROPE_INIT_FUNCTIONS["llama3"](read, device=None)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0)
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(found[0][[0, -1]], plain[[0, -1]] / torch.tensor([1.0, 8.0]))


def test_speculators_configs_say_what_the_two_readers_take_differently(make_head, tmp_path):
    config, _ = written(make_head("eagle3"), "speculators", tmp_path)
    assert config["norm_before_residual"] is False and config["tie_word_embeddings"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and "headtrain" not in config
    said = config["speculators_config"]
    assert said["algorithm"] == config["speculators_model_type"] == "eagle3"
    assert said["proposal_methods"] == [
        {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}
    ]
    assert said["verifier"] == {"name_or_path": "org/Name-7B", "architectures": ["LlamaForCausalLM"]}
    assert config["transformer_layer_config"]["model_type"] == "llama"
    config, _ = written(make_head("peagle"), "speculators", tmp_path)
    assert config["mask_token_id"] == 0 and config["transformer_layer_config"]["num_hidden_layers"] == 3


def test_a_target_of_this_machine_stands_in_no_config(make_head, tmp_path):
    info = {"model": str(tmp_path / "run"), "family": "qwen3"}
    out = export(make_head("eagle3"), "speculators", tmp_path / "out", info)
    verifier = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": None, "architectures": ["Qwen3ForCausalLM"]}
    assert str(tmp_path) not in (out / "README.md").read_text() + (out / "config.json").read_text()
    with pytest.raises(ExportError, match=r"target\.family"):
        export(make_head("eagle3"), "speculators", tmp_path / "other", {"model": "org/Name-7B"})


@pytest.mark.parametrize(("taps", "ids"), [([2, 4, 5], None), ([3, 6], [2, 5])])
def test_tensorrt_llm_is_told_taps_that_are_not_its_default_in_its_options(taps, ids, make_head, tmp_path):
    out = export(make_head("eagle3", taps=taps), "trtllm", tmp_path / "out", INFO)
    options = yaml.safe_load((out / "speculative.yaml").read_text())["speculative_config"]
    wanted = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "."}
    assert options == wanted | ({"eagle3_layers_to_capture": ids} if ids else {})
    assert "cd HEAD_FOLDER && trtllm-serve org/Name-7B --config speculative.yaml" in (out / "README.md").read_text()


@pytest.mark.parametrize("shared", [False, True])
def test_the_original_medusa_layout_computes_what_the_head_computes(shared, make_head, tmp_path):
    folder = make_head("medusa", share_lm_head=shared)
    config, tensors = written(folder, "medusa", tmp_path, dtype="float32")
    assert {key: config[key] for key in config if key.startswith(("medusa", "base"))} == {
        "medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "org/Name-7B"
    }  # fmt: skip
    x, head = torch.randn(4, 64), load_head(folder)
    for n in range(3):
        inner = x + silu(linear(x, tensors[f"{n}.0.linear.weight"], tensors[f"{n}.0.linear.bias"]))
        torch.testing.assert_close(head._at(x, n)[0], linear(inner, tensors[f"{n}.1.weight"]))


# ------------------------------------------------------------------------------------- the folder is a head again

@pytest.mark.parametrize(("kind", "format"), [
    ("eagle3", "vllm"), ("eagle3", "sglang"), ("eagle3", "trtllm"), ("eagle3", "eagle"), ("eagle", "vllm"),
    ("eagle", "sglang"), ("peagle", "vllm"), ("medusa", "vllm"),
])  # fmt: skip
def test_read_back_it_drafts_the_same_16_tokens(kind, format, make_head, tmp_path):
    version = {"engine_version": "0.32.0"} if kind == "medusa" else {}
    folder = make_head(kind, unroll=16)
    out = export(folder, format, tmp_path / "out", INFO, dtype="float32", **version)
    first, again = drafts(folder), drafts(out)
    assert torch.equal(first, again) and len({tuple(row) for row in first.tolist()}) > 4


def drafts(folder, rows: int = 8) -> torch.Tensor:
    """16 draft tokens after each of some random prefixes."""
    g = torch.Generator().manual_seed(1)
    embedding, lm_head = torch.randn(2, 200, 64, generator=g)
    head = load_head(folder, embedding, lm_head=lm_head)
    tokens = torch.randint(200, (rows, 6), generator=g)
    taps, last = torch.randn(rows, 6, 3, 64, generator=g), torch.randn(rows, 6, 64, generator=g)
    state, found = head.start(rows, 6 + 16), []
    logits, _ = head.extend(state, tokens, taps, last, torch.full((rows,), 6))
    for _ in range(16):
        found.append(head.to_target_ids(logits.argmax(-1)))
        if len(found) < 16:
            logits = head.expand(state, found[-1][:, None])[0][:, 0]
    return torch.stack(found, 1)
