"""Export to llama.cpp: one GGUF file with an EAGLE-3 head and its target's tokenizer, which llama-server loads beside
the target's own GGUF file.

The tokenizer is copied from that file, so that both models agree about every token. Rope is written as one factor per
frequency and a scale, which says exactly what the head was trained with, whatever its type.
Source of names and shapes: llama.cpp's src/models/eagle3.cpp, of the release in the contract.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headtrain.export import ExportError
from headtrain.export.build import contract_for, head_faults
from headtrain.export.folder import HeadFolder, Layout
from headtrain.export.vllm import native
from headtrain.heads.layers import rope_inverse_frequencies

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter

ARCHITECTURE, WEIGHTS = "eagle3", "draft.gguf"
OTHERS = "serve with vLLM or SGLang (format=vllm, format=sglang)"
NAMES = {  # in the file: in the head's folder
    "fc": "fc", "output_norm": "norm", "output": "lm_head", "blk.0.attn_norm": "midlayer.input_layernorm",
    "blk.0.attn_norm_2": "midlayer.hidden_norm", "blk.0.ffn_norm": "midlayer.post_attention_layernorm",
    "blk.0.attn_q": "midlayer.self_attn.q_proj", "blk.0.attn_k": "midlayer.self_attn.k_proj",
    "blk.0.attn_v": "midlayer.self_attn.v_proj", "blk.0.attn_output": "midlayer.self_attn.o_proj",
    "blk.0.ffn_gate": "midlayer.mlp.gate_proj", "blk.0.ffn_up": "midlayer.mlp.up_proj",
    "blk.0.ffn_down": "midlayer.mlp.down_proj",
}  # fmt: skip
TYPES = {"bfloat16": ("BF16", "MOSTLY_BF16"), "float16": ("F16", "MOSTLY_F16"), "float32": ("F32", "ALL_F32")}


def layout(head: HeadFolder, info: dict[str, Any], version: str | None) -> Layout:
    """info: its `model` is the target's GGUF file; ExportError where that is none."""
    made = native(head)
    made.contract, made.version = contract_for("llama_cpp", str(head.kind), version)
    target = read_target(info)
    made.faults = head_faults(head, sizes(target)) + _tap_faults(head)
    architecture = str(_value(target, "general.architecture"))
    if version is None and architecture not in made.contract["targets"]:
        made.faults.append(
            f"the target is of architecture {architecture}, and llama.cpp {made.version} hands features to heads from "
            f"{', '.join(made.contract['targets'])} only; {OTHERS}"
        )
    made.command = _command
    made.weights, made.write = WEIGHTS, partial(write, tokenizer=target)
    made.notes = ["TARGET is the target's GGUF file, of any quantization"]
    return made


def _command(target: str, folder: str, k: int) -> str:
    return f"llama-server -m {target} -md {folder}/{WEIGHTS} --spec-type draft-eagle3 --spec-draft-n-max {k}"


def _tap_faults(head: HeadFolder) -> list[str]:
    taps, blocks = head.ours.get("taps") or [], head.ours.get("target_layers")
    if len(taps) != 3:
        return [
            f"the head has {len(taps)} taps ({taps}), and llama.cpp takes exactly three: train with three (head.taps), "
            f"or {OTHERS}"
        ]
    if taps[-1] == blocks:
        return [
            f"taps {taps}: llama.cpp hands no head the stream after the last block ({blocks}); train with other taps "
            "(head.taps), or serve with vLLM (format=vllm)"
        ]
    return []


# ------------------------------------------------------------------------------------------------- the target


def read_target(info: dict[str, Any]) -> GGUFReader:
    """The target's GGUF file, opened. ExportError where the target that is known is none."""
    from headtrain.files import locate

    model = info.get("model") or ""
    if not model.endswith(".gguf"):
        known = f"; the target known is {model}" if model else ""
        raise ExportError(
            "format=gguf copies the tokenizer of the GGUF file that llama.cpp serves as the target: name that file, "
            f"target=TARGET.gguf{known}. llama.cpp's convert_hf_to_gguf.py makes one of the target's folder (with "
            "--vocab-only it is small, and enough for this)"
        )
    if info.get("adapter"):
        raise ExportError(
            f"the target {model} has the adapter {info['adapter']}: name a GGUF file with both merged (target=…)"
        )
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ExportError("format=gguf needs the package gguf: pip install 'headtrain[gguf]'") from error
    try:
        found = GGUFReader(locate(model))
        sizes(found)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ExportError(f"target={model}: no GGUF file of a model can be read there ({error})") from error
    return found


def sizes(target: GGUFReader) -> dict[str, int]:
    """What the file says of the target, as keys of `headtrain.export.export`'s target_info. KeyError without a key."""
    architecture = _value(target, "general.architecture")
    own = {key: _value(target, f"{architecture}.{key}") for key in ("block_count", "embedding_length")}
    more = f"{architecture}.nextn_predict_layers"  # MTP modules are counted as blocks
    return {
        "vocab_size": len(target.fields["tokenizer.ggml.tokens"].data),
        "hidden_size": own["embedding_length"],
        "num_layers": own["block_count"] - (_value(target, more) if more in target.fields else 0),
    }


def _value(file: GGUFReader, key: str) -> Any:
    return file.fields[key].contents()


# ------------------------------------------------------------------------------------------------- the file


def write(path: Path, layout: Layout, tokenizer: GGUFReader) -> None:
    """Writes the head; tokenizer: of which file the tokenizer is copied."""
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants

    matrices, file_type = TYPES[layout.config["torch_dtype"]]
    writer = GGUFWriter(path, ARCHITECTURE)
    _write_keys(writer, layout.config)
    writer.add_file_type(LlamaFileType[file_type])
    for key, field in tokenizer.fields.items():
        if key.startswith("tokenizer.") and field.data:  # empty lists cannot be written
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    for name, array in _arrays(layout.config, layout.tensors).items():
        kind = GGMLQuantizationType[matrices if array.ndim > 1 else "F32"]
        if array.dtype == np.int64:
            kind = GGMLQuantizationType.I64
        else:
            array = quants.quantize(array, kind)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_keys(writer: GGUFWriter, config: dict[str, Any]) -> None:
    from gguf import GGML_QUANT_VERSION, GGUFType

    writer.add_type(GGUFType.MODEL)
    writer.add_name("EAGLE-3 draft head")
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    if (scale := _rope(config)[1]) != 1:
        writer.add_rope_scaling_attn_factors(scale)
    writer.add_array(f"{ARCHITECTURE}.target_layers", config["headtrain"]["taps"])
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", config.get("target_hidden_size", config["hidden_size"]))
    writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", config["norm_before_residual"])
    writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", False)


def _rope(config: dict[str, Any]) -> tuple[Tensor, float]:
    """(by what each plain frequency is divided, float32 [D/2]; what cosines and sines are multiplied by)."""
    rope, head_dim = config["headtrain"]["rope"], config["head_dim"]
    trained, scale = rope_inverse_frequencies(rope, head_dim, config["max_position_embeddings"])
    plain, _ = rope_inverse_frequencies({"rope_theta": rope["rope_theta"]}, head_dim, 0)
    return plain / trained, scale


def _arrays(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Under the file's names: float32, and d2t as int64 of target ids."""
    found = {f"{name}.weight": tensors[f"{ours}.weight"].float() for name, ours in NAMES.items()}
    for name, heads in (("q", config["num_attention_heads"]), ("k", config["num_key_value_heads"])):
        found[f"blk.0.attn_{name}.weight"] = interleaved(found[f"blk.0.attn_{name}.weight"], heads)
    if bool(((factors := _rope(config)[0]) != 1).any()):
        found["rope_freqs.weight"] = factors
    if "d2t" in tensors:
        found["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    return {name: tensor.contiguous().numpy() for name, tensor in found.items()}


def interleaved(weight_CH: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbouring rows of a head, ours row i and row D/2 + i: the rows in its order."""
    halves = weight_CH.view(heads, 2, -1, weight_CH.shape[1])
    return halves.transpose(1, 2).reshape(weight_CH.shape)
