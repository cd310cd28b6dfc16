"""Export to vLLM: a good head goes through bit for bit, a spoiled one is refused by the name of what is wrong."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from headtrain.export import ExportError, export, formats
from headtrain.files import sha256_file
from headtrain.heads.base import HeadConfig, load_head, save_head
from headtrain.heads.eagle3 import Eagle3Head

# A target of 8 blocks, hidden 64, 200 tokens; its own config would add a quantization_config and tied embeddings.
SIZES = dict(
    hidden_size=64,
    target_hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=200,
    draft_vocab_size=50,
    max_position_embeddings=4096,
    taps=[2, 4, 5],
    target_layers=8,
    unroll=5,
)

# Written down from vLLM's loader for these sizes, not computed: name -> shape.
EXPECTED = {
    "fc.weight": [64, 192],
    "midlayer.input_layernorm.weight": [64],
    "midlayer.hidden_norm.weight": [64],
    "midlayer.self_attn.q_proj.weight": [64, 128],
    "midlayer.self_attn.k_proj.weight": [32, 128],
    "midlayer.self_attn.v_proj.weight": [32, 128],
    "midlayer.self_attn.o_proj.weight": [64, 64],
    "midlayer.post_attention_layernorm.weight": [64],
    "midlayer.mlp.gate_proj.weight": [128, 64],
    "midlayer.mlp.up_proj.weight": [128, 64],
    "midlayer.mlp.down_proj.weight": [64, 128],
    "norm.weight": [64],
    "lm_head.weight": [50, 64],
    "d2t": [50],
    "t2d": [200],
}


def make_head(**changes) -> Eagle3Head:
    torch.manual_seed(0)
    head = Eagle3Head(HeadConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape) * 0.05 + (p.dim() == 1))
        if head.config.draft_vocab_size < head.config.vocab_size:
            ids = torch.randperm(head.config.vocab_size)[: head.config.draft_vocab_size].sort().values
            head.d2t.copy_(ids - torch.arange(len(ids)))
            head.t2d.zero_()[ids] = True
    return head.eval()


@pytest.fixture
def head_dir(tmp_path):
    save_head(make_head(), tmp_path / "run" / "head")
    return tmp_path / "run" / "head"


def spoil(head_dir, config=None, tensors=None):
    """Rewrites the folder after `config(dict)` / `tensors(dict)` changed its content in place."""
    if config:
        content = json.loads((head_dir / "config.json").read_text())
        config(content)
        (head_dir / "config.json").write_text(json.dumps(content))
    if tensors:
        content = load_file(head_dir / "model.safetensors")
        tensors(content)
        save_file({name: t.contiguous() for name, t in content.items()}, head_dir / "model.safetensors")


def refusal(head_dir, **options) -> ExportError:
    out = head_dir.parent / "export" / "vllm"
    with pytest.raises(ExportError) as caught:
        export(head_dir, "vllm", out, **options)
    assert not out.exists(), "a refused export must leave nothing behind"
    assert not out.parent.exists() or not list(out.parent.iterdir())
    return caught.value


# ------------------------------------------------------------------------------------------------- a good head


def test_an_export_has_exactly_the_tensors_vllm_reads(head_dir):
    out = export(head_dir, "vllm", head_dir.parent / "export" / "vllm")
    tensors = load_file(out / "model.safetensors")
    assert {name: list(t.shape) for name, t in tensors.items()} == EXPECTED
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert [p.name for p in out.parent.iterdir()] == ["vllm"], "no temporary folder is left"


def test_every_tensor_equals_the_trained_one_in_bf16_bit_for_bit(head_dir):
    trained = load_file(head_dir / "model.safetensors")
    written = load_file(export(head_dir, "vllm", head_dir.parent / "out") / "model.safetensors")
    for name, tensor in trained.items():
        wanted = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert torch.equal(written[name], wanted), name


def test_the_export_loads_as_a_head_again_and_equals_the_one_in_memory(head_dir):
    head = make_head()
    back = load_head(export(head_dir, "vllm", head_dir.parent / "out", dtype="float32"))
    for (name, ours), (_, theirs) in zip(head.state_dict().items(), back.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs), name
    assert back.config == head.config


def test_a_reloaded_export_drafts_the_same_tokens(head_dir):
    embedding = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    exported = load_head(export(head_dir, "vllm", head_dir.parent / "out"), embedding, torch.bfloat16)
    drafts = first_drafts(exported)
    assert drafts == first_drafts(load_head(head_dir, embedding, torch.bfloat16))
    assert len(set(map(tuple, drafts))) > 4, "a head that always drafts the same would prove nothing"


def first_drafts(head, rows: int = 8, count: int = 4) -> list[list[int]]:
    """`count` draft tokens after each of `rows` random prefixes."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(200, (rows, 6), generator=generator)
    taps, last = torch.randn(rows, 6, 3, 64, generator=generator), torch.randn(rows, 6, 64, generator=generator)
    state, drafts = head.start(rows, 6 + count), []
    logits, _ = head.extend(state, tokens, taps, last, torch.full((rows,), 6))
    for _ in range(count):
        drafts.append(head.to_target_ids(logits.argmax(-1)))
        logits = head.expand(state, drafts[-1][:, None])[0][:, 0]
    return torch.stack(drafts, 1).tolist()


def test_the_config_says_what_engines_need(head_dir):
    config = json.loads((export(head_dir, "vllm", head_dir.parent / "out") / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": 200,
        "draft_vocab_size": 50,
        "hidden_size": 64,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }
    assert {key: config[key] for key in wanted} == wanted
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert not {"quantization_config", "text_config", "target_hidden_size"} & config.keys()
    assert str(head_dir.parent) not in json.dumps(config)


def test_a_head_with_the_full_vocabulary_ships_no_maps(tmp_path):
    save_head(make_head(draft_vocab_size=200), tmp_path / "head")
    out = export(tmp_path / "head", "vllm", tmp_path / "out")
    assert load_file(out / "model.safetensors").keys() == EXPECTED.keys() - {"d2t", "t2d"}
    load_head(out)


def test_other_taps_than_three_and_a_scaled_rope_go_through(tmp_path):
    rope = {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    save_head(make_head(taps=[3, 6], rope=rope), tmp_path / "head")
    config = json.loads((export(tmp_path / "head", "vllm", tmp_path / "out") / "config.json").read_text())
    assert config["num_aux_hidden_states"] == 2
    assert config["rope_scaling"]["factor"] == 8.0 and config["rope_theta"] == 500000.0
    assert "SGLang" in (tmp_path / "out" / "README.md").read_text()


def test_exporting_again_replaces_the_old_export_and_nothing_else(head_dir):
    out = head_dir.parent / "out"
    export(head_dir, "vllm", out)
    export(head_dir, "vllm", out, dtype="float32")
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"notes\.txt"):
        export(head_dir, "vllm", out)
    assert (out / "notes.txt").read_text() == "mine"


# ----------------------------------------------------------------------------------------------- spoiled heads

TENSOR_FAULTS = {
    "no lm_head": (lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight is missing"),
    "no d2t": (lambda t: t.pop("d2t"), "tensor d2t is missing"),
    "a bias": (lambda t: t.update({"fc.bias": torch.zeros(64)}), "tensor fc.bias is not one the engine knows"),
    "own embedding": (
        lambda t: t.update({"embed_tokens.weight": torch.randn(200, 64)}),
        "tensor embed_tokens.weight is not one the engine knows",
    ),
    "prefixed": (
        lambda t: t.update({"model.norm.weight": t.pop("norm.weight")}),
        "tensor model.norm.weight is not one the engine knows",
    ),
    "transposed": (
        lambda t: t.update({"fc.weight": t["fc.weight"].T}),
        "tensor fc.weight has shape [192, 64], expected [64, 192] (it is transposed)",
    ),
    "cut": (
        lambda t: t.update({"midlayer.mlp.up_proj.weight": t["midlayer.mlp.up_proj.weight"][:100]}),
        "tensor midlayer.mlp.up_proj.weight has shape [100, 64], expected [128, 64]",
    ),
    "nan": (
        lambda t: t["midlayer.self_attn.k_proj.weight"].view(-1)[7:9].fill_(float("nan")),
        "tensor midlayer.self_attn.k_proj.weight has 2 values that are NaN or infinite",
    ),
    "absolute d2t": (
        lambda t: t.update(d2t=t["d2t"] + torch.arange(50)),
        "tensor d2t holds absolute target ids; it must hold offsets, target_id - draft_id",
    ),
    "unsorted d2t": (
        lambda t: t["d2t"][:2].copy_(t["d2t"][:2].flip(0) + 90),
        "tensor d2t: draft_id + d2t[draft_id] must",
    ),
    "other t2d": (lambda t: t.update(t2d=t["t2d"].roll(1)), "tensor t2d does not mark exactly the target ids"),
    "int32 d2t": (lambda t: t.update(d2t=t["d2t"].int()), "tensor d2t has dtype int32, expected int64"),
    "uint8 t2d": (lambda t: t.update(t2d=t["t2d"].byte()), "tensor t2d has dtype uint8, expected bool"),
    "one tensor in half": (
        lambda t: t.update({"norm.weight": t["norm.weight"].half()}),
        "tensor norm.weight has dtype float16, but config.json says torch_dtype float32",
    ),
    "integer weights": (
        lambda t: t.update({"norm.weight": torch.ones(64, dtype=torch.int8)}),
        "tensor norm.weight has dtype int8, expected one of bfloat16, float16, float32",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_spoiled_tensor_is_refused_by_name(head_dir, fault):
    change, message = TENSOR_FAULTS[fault]
    spoil(head_dir, tensors=change)
    assert any(line.startswith(message) for line in refusal(head_dir).faults), refusal(head_dir).faults


def drop(key):
    return lambda c: c.pop(key)


def put(**values):
    return lambda c: c.update(values)


CONFIG_FAULTS = {
    "architecture": (put(architectures=["LlamaForCausalLM"]), "architectures"),
    "tied": (put(tie_word_embeddings=True), "tie_word_embeddings=True"),
    "number for a flag": (put(attention_bias=0), "attention_bias=0"),
    "null draft vocab": (put(draft_vocab_size=None), "draft_vocab_size=None"),
    "no draft vocab": (drop("draft_vocab_size"), "draft_vocab_size is missing"),
    "no head_dim": (drop("head_dim"), "head_dim is missing"),
    "null target width": (put(target_hidden_size=None), "target_hidden_size=None"),
    "quantized": (put(quantization_config={"quant_method": "fp8"}), "quantization_config must not be there"),
    "place of training": (put(_name_or_path="somewhere"), "_name_or_path must not be there"),
    "ids one off": (
        put(eagle_aux_hidden_state_layer_ids=[3, 5, 6]),
        "eagle_aux_hidden_state_layer_ids=[3, 5, 6] must be [2, 4, 5]",
    ),
    "nested ids copied": (
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 4, 5]),
        "eagle_config.eagle_aux_hidden_state_layer_ids=[2, 4, 5] must be [1, 3, 4]",
    ),
    "nested ids only": (drop("eagle_aux_hidden_state_layer_ids"), "eagle_aux_hidden_state_layer_ids is missing"),
    "rope": (put(rope_theta=500000.0), "rope_theta=500000.0, but the head was trained with 10000.0"),
    "new style rope": (
        lambda c: c["rope_parameters"].update(rope_theta=1.0),
        "rope_parameters.rope_theta=1.0, but the head was trained with 10000.0",
    ),
    "flag that changes drafts": (
        put(norm_before_residual=True),
        "norm_before_residual=True, but the head was trained with False",
    ),
    "context": (put(max_position_embeddings=2048), "max_position_embeddings=2048, but the head was trained with 4096"),
    "tap beyond": (lambda c: c["headtrain"].update(taps=[2, 4, 9]), "9 is not allowed"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_wrong_config_key_is_refused_by_name(head_dir, fault):
    change, message = CONFIG_FAULTS[fault]
    spoil(head_dir, config=change)
    assert any(line.startswith("config.json: ") and message in line for line in refusal(head_dir).faults), refusal(
        head_dir
    )


def test_all_faults_are_listed_at_once(head_dir):
    def tensors(content):
        del content["lm_head.weight"]
        content["fc.bias"] = torch.zeros(64)
        content["norm.weight"][0] = float("inf")

    spoil(head_dir, config=put(model_type="qwen3"), tensors=tensors)
    error = refusal(head_dir)
    assert len(error.faults) == 4
    assert all(name in str(error) for name in ("model_type", "lm_head.weight", "fc.bias", "norm.weight"))


def test_a_value_that_float16_cannot_hold_is_refused_only_for_float16(head_dir):
    spoil(head_dir, tensors=lambda t: t["fc.weight"].view(-1)[:1].fill_(1e5))
    assert "fc.weight" in str(refusal(head_dir, dtype="float16"))
    export(head_dir, "vllm", head_dir.parent / "out", dtype="bfloat16")


def test_a_head_for_another_target_is_refused(head_dir):
    info = {"vocab_size": 32000, "hidden_size": 64, "num_layers": 8}
    assert refusal(head_dir, target_info=info).faults == [
        "the target has vocab_size 32000, but the head was made for 200"
    ]


def test_broken_or_foreign_folders_are_refused_with_the_files_name(head_dir, tmp_path):
    with pytest.raises(ExportError, match=r"config\.json is missing"):
        export(tmp_path, "vllm", tmp_path / "out")
    (head_dir / "model.safetensors").write_bytes(b"\x10" + bytes(30))
    assert "cannot be read" in str(refusal(head_dir))
    (head_dir / "config.json").write_text("{")
    assert "config.json" in str(refusal(head_dir))


def test_an_unknown_format_or_dtype_lists_what_there_is(head_dir):
    with pytest.raises(ExportError, match=r"'vlm' is unknown; there is: .*vllm"):
        export(head_dir, "vlm", head_dir.parent / "out")
    assert "bfloat16, float16, float32" in str(refusal(head_dir, dtype="int4"))
    assert set(formats()) >= {"eagle", "medusa", "mtp", "sglang", "speculators", "trtllm", "vllm"}


# ------------------------------------------------------------------------------------------------------ README


def write_report(head_dir, sha=None, tau=1.62):
    row = {
        "suite": "heldout",
        "drafter": "head",
        "temperature": 0.0,
        "k": 5,
        "tree": "chain",
        "dtype": "float32",
        "tau": tau,
    }
    rows = [row, {**row, "drafter": "ngram", "tau": 3.0}, {**row, "temperature": 1.0, "tau": 2.5}]
    rows += [{**row, "kind": "speed", "prompts": 2, "tau": 2.0}]  # of few prompts
    folder = head_dir.parent / "report"
    folder.mkdir(exist_ok=True)
    sha = sha or sha256_file(head_dir / "model.safetensors")
    (folder / "report.json").write_text(json.dumps({"heads": [{"sha256": sha}], "results": rows}))
    return folder / "report.json"


def test_the_readme_has_the_command_and_quotes_the_heads_own_greedy_tau(head_dir):
    write_report(head_dir)
    text = (export(head_dir, "vllm", head_dir.parent / "out", {"model": "org/Name-7B"}) / "README.md").read_text()
    assert "vllm serve org/Name-7B --speculative-config" in text
    assert '"method": "eagle3"' in text and '"num_speculative_tokens": 5' in text
    assert "1.62" in text and not any(tau in text for tau in ("2.00", "2.50", "3.00"))
    assert "[2, 4, 5] of 8 blocks" in text


def test_a_report_about_other_weights_is_not_quoted(head_dir):
    report = write_report(head_dir, sha="0" * 64)
    assert "1.62" not in (export(head_dir, "vllm", head_dir.parent / "out") / "README.md").read_text()
    assert "other weights" in str(refusal(head_dir, report=report))


def test_a_target_on_this_machine_is_not_named(head_dir, tmp_path):
    shutil.copytree(head_dir, tmp_path / "my-model")
    text = (
        export(head_dir, "vllm", head_dir.parent / "out", {"model": str(tmp_path / "my-model")}) / "README.md"
    ).read_text()
    assert "vllm serve TARGET" in text and str(tmp_path) not in text


def test_listing_the_formats_imports_no_torch():
    code = "import sys, headtrain.export as e; e.formats(); e.check_format('vllm'); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_a_report_about_several_heads_is_quoted_for_this_ones_greedy_chain(head_dir):
    path = write_report(head_dir)
    content = json.loads(path.read_text())
    mine = content["results"][0] | {"head": "mine"}
    content["heads"] = [content["heads"][0] | {"id": "mine"}, {"id": "other", "sha256": "0" * 64}]
    content["results"] = [mine, mine | {"head": "other", "tau": 2.75}, mine | {"tree": "4x16", "tau": 3.25}]
    path.write_text(json.dumps(content))
    text = (export(head_dir, "vllm", head_dir.parent / "out", {"model": "org/Name-7B"}) / "README.md").read_text()
    assert "1.62" in text and "2.75" not in text and "3.25" not in text
