"""The GGUF file for llama.cpp: every key and tensor, written down from its loader, and what is refused."""

import math

import numpy as np
import pytest
import torch

from headtrain.export import ExportError, audit, export
from headtrain.heads.base import load_head

gguf = pytest.importorskip("gguf")

TOKENS = [b"<unk>", b"<s>", b"</s>", "é\u2581".encode()] + [f"t{n}".encode() for n in range(196)]
TOKENIZER = {
    "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ messages }}\n",
    "tokenizer.ggml.tokens": [t.decode() for t in TOKENS], "tokenizer.ggml.scores": [-0.5 * n for n in range(200)],
    "tokenizer.ggml.token_type": [2, 3, 3] + [1] * 197,
}  # fmt: skip
KEYS = {
    "general.architecture": "eagle3", "general.type": "model", "general.name": "EAGLE-3 draft head",
    "general.quantization_version": 2, "general.file_type": 0, "eagle3.block_count": 1, "eagle3.context_length": 4096,
    "eagle3.embedding_length": 64, "eagle3.feed_forward_length": 128, "eagle3.attention.head_count": 4,
    "eagle3.attention.head_count_kv": 2, "eagle3.attention.key_length": 16, "eagle3.attention.value_length": 16,
    "eagle3.attention.layer_norm_rms_epsilon": 1e-5, "eagle3.vocab_size": 200, "eagle3.rope.dimension_count": 16,
    "eagle3.rope.freq_base": 10000.0, "eagle3.target_layers": [2, 4, 5], "eagle3.target_hidden_size": 64,
    "eagle3.norm_before_residual": False, "eagle3.norm_before_fc": False,
}  # fmt: skip
TENSORS = {  # as llama.cpp names them: [rows, columns]
    "fc.weight": [64, 192], "output_norm.weight": [64], "output.weight": [50, 64], "blk.0.attn_norm.weight": [64],
    "blk.0.attn_norm_2.weight": [64], "blk.0.ffn_norm.weight": [64], "blk.0.attn_q.weight": [64, 128],
    "blk.0.attn_k.weight": [32, 128], "blk.0.attn_v.weight": [32, 128], "blk.0.attn_output.weight": [64, 64],
    "blk.0.ffn_gate.weight": [128, 64], "blk.0.ffn_up.weight": [128, 64], "blk.0.ffn_down.weight": [64, 128],
    "d2t": [50],
}  # fmt: skip
LLAMA3 = {
    "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.fixture
def make_target(tmp_path):
    """make_target(architecture, **sizes) -> the vocabulary of a target as a GGUF file, as --vocab-only makes it."""

    def make(architecture="llama", blocks=8, hidden=64, tokens=200, nextn=0):
        path = tmp_path / f"{architecture}-{blocks}-{hidden}-{tokens}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(blocks)
        writer.add_embedding_length(hidden)
        if nextn:
            writer.add_uint32(f"{architecture}.nextn_predict_layers", nextn)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(TOKENS[:tokens])
        writer.add_token_scores(TOKENIZER["tokenizer.ggml.scores"][:tokens])
        writer.add_token_types(TOKENIZER["tokenizer.ggml.token_type"][:tokens])
        writer.add_bos_token_id(1)
        writer.add_add_bos_token(True)
        writer.add_chat_template("{{ messages }}\n")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return {"model": str(path)}

    return make


@pytest.fixture
def written(make_head, make_target, tmp_path):
    """written(dtype, **settings) -> (the head, the file's keys, its tensors as they are in it)."""

    def make(dtype="float32", **changes):
        head = make_head("eagle3", **changes)
        out = export(head, "gguf", tmp_path / "out", make_target(), dtype=dtype)
        assert {file.name for file in out.iterdir()} == {"draft.gguf", "README.md"}
        file = gguf.GGUFReader(out / "draft.gguf")
        keys = {key: field.contents() for key, field in file.fields.items() if not key.startswith("GGUF.")}
        return load_head(head), keys, {tensor.name: tensor for tensor in file.tensors}

    return make


def test_the_file_has_the_keys_that_llama_cpp_reads_and_the_targets_tokenizer(written):
    _, keys, _ = written()
    assert keys.keys() == KEYS.keys() | TOKENIZER.keys()
    for key, value in (KEYS | TOKENIZER).items():
        assert keys[key] == pytest.approx(value) if isinstance(value, float) else keys[key] == value, key


def test_the_file_has_the_heads_tensors_under_llama_cpps_names(written):
    head, _, tensors = written()
    assert {name: list(tensor.data.shape) for name, tensor in tensors.items()} == TENSORS
    assert list(tensors["fc.weight"].shape) == [192, 64]  # GGUF counts columns first
    ours = head.portable_tensors()
    for name, own in (
        ("fc", "fc"), ("output", "lm_head"), ("output_norm", "norm"), ("blk.0.attn_norm", "midlayer.input_layernorm"),
        ("blk.0.attn_norm_2", "midlayer.hidden_norm"), ("blk.0.ffn_norm", "midlayer.post_attention_layernorm"),
        ("blk.0.attn_v", "midlayer.self_attn.v_proj"), ("blk.0.ffn_down", "midlayer.mlp.down_proj"),
    ):  # fmt: skip
        np.testing.assert_array_equal(tensors[f"{name}.weight"].data, ours[f"{own}.weight"].detach().numpy())
    assert tensors["d2t"].data.tolist() == head.t2d.nonzero().flatten().tolist()


def test_rows_of_queries_and_keys_stand_where_llama_cpps_rope_turns_them(written):
    """Its rope turns rows 2i and 2i + 1 of a head by position times theta^(-2i/D); ours rows i and D/2 + i."""
    head, _, tensors = written()
    x, position = np.random.default_rng(0).normal(size=128), 7
    for name, heads in (("q", 4), ("k", 2)):
        theirs = (tensors[f"blk.0.attn_{name}.weight"].data @ x).reshape(heads, 8, 2)
        weight = head.portable_tensors()[f"midlayer.self_attn.{name}_proj.weight"].detach().numpy()
        ours = (weight @ x).reshape(heads, 2, 8)
        turns = np.exp(1j * position / 10000.0 ** (np.arange(8) / 8))
        np.testing.assert_allclose(
            (theirs[..., 0] + 1j * theirs[..., 1]) * turns, (ours[:, 0] + 1j * ours[:, 1]) * turns, rtol=1e-5
        )


@pytest.mark.parametrize(
    ("dtype", "kind", "number"), [("bfloat16", "BF16", 32), ("float16", "F16", 1), ("float32", "F32", 0)]
)
def test_matrices_have_the_type_that_is_asked_for_and_norms_are_float32(dtype, kind, number, written):
    head, keys, tensors = written(dtype)
    assert keys["general.file_type"] == number
    for name, tensor in tensors.items():
        wanted = "I64" if name == "d2t" else kind if tensor.data.ndim > 1 else "F32"
        assert tensor.tensor_type.name == wanted, name
    rounded = head.lm_head.weight.detach().to(getattr(torch, dtype)).float().numpy()
    lm_head = tensors["output.weight"]
    np.testing.assert_array_equal(gguf.dequantize(lm_head.data, lm_head.tensor_type), rounded)


def test_a_full_vocabulary_has_no_map(written):
    _, _, tensors = written(draft_vocab_size=200)
    assert "d2t" not in tensors and list(tensors["output.weight"].data.shape) == [200, 64]


def test_rope_of_llama3_is_divided_as_its_rule_says(written):
    _, keys, tensors = written(rope=LLAMA3)
    assert keys["eagle3.rope.freq_base"] == 500000.0 and "eagle3.rope.scaling.attn_factor" not in keys
    for n, factor in enumerate(tensors["rope_freqs.weight"].data):
        turns = 256 * 500000.0 ** (-n / 8) / (2 * math.pi)  # of this frequency within the original context
        smooth = min(1.0, max(0.0, (turns - 1) / 3))
        assert factor == pytest.approx(1 / ((1 - smooth) / 8 + smooth), rel=1e-5)


def test_rope_of_yarn_has_its_factors_and_its_scale(written):
    _, keys, tensors = written(rope=YARN)
    assert keys["eagle3.rope.scaling.attn_factor"] == pytest.approx(0.1 * math.log(4) + 1)
    factors = tensors["rope_freqs.weight"].data
    assert factors[0] == 1 and factors[-1] == pytest.approx(4) and (np.diff(factors) >= 0).all()
    assert not any(key.startswith("eagle3.rope.scaling.type") for key in keys)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"norm_output": True}, ["norm_output", "head.norm_output=false", "format=vllm"]),
        ({"taps": [2, 5]}, ["2 taps ([2, 5])", "exactly three", "format=vllm"]),
        ({"taps": [1, 2, 4, 5]}, ["4 taps", "exactly three"]),
        ({"taps": [2, 4, 8]}, ["after the last block (8)", "format=vllm"]),
    ],
)
def test_a_head_that_llama_cpp_cannot_run_is_refused_with_what_works(changes, names, make_head, make_target, tmp_path):
    head = make_head("eagle3", **changes)
    with pytest.raises(ExportError) as error:
        export(head, "gguf", tmp_path / "out", make_target())
    assert all(name in str(error.value) for name in names) and not (tmp_path / "out").exists()
    assert audit(head, "gguf", target_info=make_target()) == error.value.faults


@pytest.mark.parametrize(
    ("kind", "works"), [("eagle", "format=sglang"), ("peagle", "format=vllm"), ("medusa", "0.32.0")]
)
def test_other_heads_are_refused_with_what_works(kind, works, make_head, make_target, tmp_path):
    with pytest.raises(ExportError, match=r"format=gguf takes no .* heads: llama\.cpp") as error:
        export(make_head(kind), "gguf", tmp_path / "out", make_target())
    assert works in str(error.value) and "head.type=eagle3" in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"blocks": 9}, "the target has num_layers 9, but the head was made for 8"),
        ({"hidden": 32}, "the target has hidden_size 32, but the head was made for 64"),
        ({"tokens": 150}, "the target has vocab_size 150, but the head was made for 200"),
        ({"architecture": "qwen2"}, "architecture qwen2"),
    ],
)
def test_a_file_of_another_target_is_refused(sizes, says, make_head, make_target, tmp_path):
    with pytest.raises(ExportError, match=says):
        export(make_head("eagle3"), "gguf", tmp_path / "out", make_target(**sizes))


def test_mtp_modules_of_the_target_are_not_counted_as_its_blocks(make_head, make_target, tmp_path):
    export(make_head("eagle3"), "gguf", tmp_path / "out", make_target("qwen35", blocks=9, nextn=1))


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({}, r"target=TARGET\.gguf"),
        ({"model": "org/Name-7B"}, "the target known is org/Name-7B"),
        ({"model": "/none/there.gguf"}, r"target=/none/there\.gguf: no GGUF file"),
        ({"model": "{here}/text.gguf"}, "no GGUF file of a model can be read"),
        ({"model": "{here}/text.gguf", "adapter": "mine"}, "adapter mine"),
    ],
)
def test_without_the_targets_file_it_says_what_to_name(info, says, make_head, tmp_path):
    (tmp_path / "text.gguf").write_text("this is no such file, only its name is like one")
    info = {key: value.format(here=tmp_path) for key, value in info.items()}
    with pytest.raises(ExportError, match=says):
        export(make_head("eagle3"), "gguf", tmp_path / "out", info)


def test_the_command_line_takes_the_targets_file_and_the_readme_says_how_to_serve(make_head, make_target, headtrain):
    head, target = make_head("eagle3"), make_target()["model"]
    done = headtrain("export", f"head={head}", "format=gguf", f"target={target}")
    assert done.returncode == 0, done.stderr
    text = (head.parent / "export" / "gguf" / "README.md").read_text()
    assert "llama-server -m TARGET -md HEAD_FOLDER/draft.gguf --spec-type draft-eagle3 --spec-draft-n-max 3" in text
    assert "TARGET is the target's GGUF file" in text


def test_a_run_whose_target_is_no_gguf_file_is_not_begun_with_this_format(recipe, headtrain):
    done = headtrain("fit", f"recipe={recipe}", "export.formats=[gguf]")
    assert done.returncode == 2 and "target=TARGET.gguf" in done.stderr and len(done.stderr.splitlines()) == 1


def test_without_the_package_it_says_which_to_install(make_head, make_target, tmp_path, monkeypatch):
    head, info = make_head("eagle3"), make_target()
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ExportError, match=r"pip install 'headtrain\[gguf\]'"):
        export(head, "gguf", tmp_path / "out", info)
