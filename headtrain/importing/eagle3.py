"""EAGLE-3 and P-EAGLE heads as SafeAILab, SpecForge, SGLang, vLLM, speculators and ModelOpt write them.

All have the same tensors under slightly different names; config.json says the same things in different places.
"""

from __future__ import annotations

import re
from typing import Any

from headtrain.heads.base import HeadConfig
from headtrain.heads.peagle import PEagleConfig
from headtrain.importing.foreign import Foreign
from headtrain.importing.keys import Keys, layer_sizes
from headtrain.importing.taps import settle_taps
from headtrain.importing.vocab import settle_vocab

ONLY = (  # key, the one value such heads can have, why
    ("bias", False, "fc has no bias here"),
    ("norm_before_fc", False, "no norm stands before fc here"),
    ("fc_norm", False, "no norms stand before fc here"),
    ("use_aux_norm", False, "no norms stand before fc here"),
    ("logit_scale", 1, "what lm_head says is not scaled here"),
)
ONLY_NESTED = (
    ("use_aux_hidden_state", True, "the head reads taps of the target here"),
    ("norm_before_fc", False, "no norm stands before fc here"),
    ("use_last_layernorm", True, "a norm stands before lm_head here"),
    ("use_input_layernorm_in_first_layer", True, "the embedding is normed here"),
    ("use_mtp_layernorm", False, "the head has EAGLE-3's norms here"),
    ("next_layer_regular", True, "later layers are plain ones here"),
    ("eh_proj_before_attn", False, "the embedding enters with the queries, keys and values here"),
    ("parallel_draft_step", 1, "drafting in parallel is P-EAGLE's way here"),
)
MASKS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")  # in the order vLLM looks
CLASSES = ("Eagle3DraftModel", "Eagle3Speculator", "PEagleDraftModel")  # the others have Llama in their name
SPECULATORS = {"eagle3": True, "peagle": False}  # its types, and what vLLM takes norm_before_residual for


def read(f: Foreign, dialect: str) -> HeadConfig:
    """The head's config; the foreign tensors are renamed in place. dialect: as in `taps.settle_taps`."""
    if dialect == "speculators":
        dialect, f.keys = "vllm", _flat(f.keys)
    keys, nested = f.keys, f.keys.section("eagle_config")
    for section, rules in ((keys, ONLY), (nested, ONLY_NESTED)):
        for rule in rules:
            section.must_be(*rule)
    names = keys.texts("architectures") or [f"{keys.text('model_type') or 'llama'}, by model_type"]
    if not any("llama" in name.lower() or name in CLASSES for name in names):
        raise keys.fault("architectures", f"={names}: only heads whose layer is Llama's can be imported")
    sizes = layer_sizes(keys)
    if sizes["hidden_size"] != sizes["target_hidden_size"]:
        raise keys.fault("target_hidden_size", ": a head of another width than its target has an embedding of its own")
    rename(f, sizes)
    parallel = any("mask_hidden" in name for name in f.tensors)
    layers = keys.whole("num_hidden_layers", 1, len(f.tensors))
    if not parallel and layers != 1:
        raise keys.fault("num_hidden_layers", f"={layers}: EAGLE-3 heads have one layer here")
    sizes |= f.made_for_target(sizes)
    if (fc := f.tensors.get("fc.weight")) is None or fc.dim() != 2 or fc.shape[1] % sizes["target_hidden_size"]:
        raise f.fault("fc.weight is missing, or not as wide as a number of the target's hidden states")
    sizes |= {
        "type": "peagle" if parallel else "eagle3",
        "draft_vocab_size": keys.whole("draft_vocab_size", None, sizes["vocab_size"]) or sizes["vocab_size"],
        "taps": settle_taps(f, fc.shape[1] // sizes["target_hidden_size"], dialect),
        "norm_before_residual": keys.flag("norm_before_residual", False),
        "norm_output": bool(keys.flag("norm_output", None) or nested.flag("return_hidden_post_norm", None)),
        "unroll": unroll(f),
    }
    if sizes["norm_before_residual"] and dialect in ("sglang", "trtllm"):
        f.said.append("norm_before_residual is true, as config.json says; SGLang and TensorRT-LLM do not read it")
    config = PEagleConfig(**sizes, layers=layers, **_ahead(f)) if parallel else HeadConfig(**sizes)
    settle(f, config)
    return config


def settle(f: Foreign, config: HeadConfig) -> None:
    """What is left to do with the tensors once the config is known: lm_head, the embedding, the draft vocabulary."""
    if "lm_head.weight" not in f.tensors and config.draft_vocab_size == config.vocab_size:
        f.tensors["lm_head.weight"] = f.target.parts.lm_head.to(f.tensors["fc.weight"].dtype)
        f.said.append("lm_head.weight is not there: the target's, as engines do")
    elif f.keys.raw.get("tie_word_embeddings"):
        f.said.append("tie_word_embeddings is true, but there is a lm_head.weight: that counts")
    if not getattr(config, "own_embedding", False):
        f.without_embedding()
    settle_vocab(f, config.vocab_size, config.draft_vocab_size, ["lm_head.weight"] * ("lm_head.weight" in f.tensors))


def rename(f: Foreign, sizes: dict[str, Any]) -> None:
    """Names as ours: no `model.`, the first layer `midlayer.`, q, k and v apart, mask_hidden as a row."""
    f.strip()
    for name in sorted(f.tensors):
        if name.startswith("layers.0."):
            f.rename(name, name.replace("layers.0.", "midlayer.", 1))
        elif "mask_hidden" in name:
            if name != "mask_hidden":
                f.rename(name, "mask_hidden")
            f.tensors["mask_hidden"] = f.tensors["mask_hidden"].reshape(1, -1)
        elif re.fullmatch(r"layers\.\d+\.hidden_norm\.weight", name):
            del f.tensors[name]
            f.said.append(f"{name} is left out: vLLM does not use it")
    for layer in sorted({name[: name.find(".self_attn") + 1] for name in f.tensors if ".self_attn." in name}):
        f.split_fused(layer, sizes)


def unroll(f: Foreign) -> int:
    """The depths that training unrolled: as many as the checkpoint is said to draft, else the default of recipes."""
    methods = f.keys.raw.get("proposal_methods")
    if isinstance(methods, list) and methods and isinstance(methods[0], dict):
        proposal = Keys(methods[0], f.keys.where, f.said, "speculators_config.proposal_methods[0].")
        if proposal.has("speculative_tokens"):
            return proposal.whole("speculative_tokens", most=1024)
    f.said.append(f"unroll {HeadConfig.unroll}, the default: no checkpoint says how deep training unrolled")
    return HeadConfig.unroll


def _ahead(f: Foreign) -> dict[str, Any]:
    """What P-EAGLE heads have besides."""
    found = [key for key in MASKS if f.keys.has(key)]
    if not found:
        raise f.keys.fault("ptd_token_id", " is missing: the token that unknown positions read")
    own = "embed_tokens.weight" in f.tensors
    if own:
        f.said.append("embed_tokens is the head's own, as vLLM takes it")
    token = f.keys.raw[found[0]]
    if type(token) is not int or not 0 <= token < f.keys.whole("vocab_size"):
        raise f.keys.fault(found[0], f"={token!r} is no token of the target")
    return {"mask_token": token, "own_embedding": own}


def _flat(keys: Keys) -> Keys:
    """A speculators config as the flat one that vLLM makes of it."""
    kind, layer = keys.text("speculators_model_type"), keys.section("transformer_layer_config", needed=True)
    if kind not in SPECULATORS:
        raise keys.fault("speculators_model_type", f"={kind!r}: there is {', '.join(SPECULATORS)}")
    if (layer.text("model_type") or "llama") != "llama":
        raise layer.fault("model_type", f"={layer.raw['model_type']!r}: only heads whose layer is Llama's are read")
    flat = {**layer.raw, **{key: value for key, value in keys.raw.items() if value is not None}}
    flat["architectures"] = ["Eagle3DraftModel"]
    flat["proposal_methods"] = keys.section("speculators_config").raw.get("proposal_methods")
    if not keys.has("norm_before_residual"):
        flat["norm_before_residual"] = SPECULATORS[kind]
        keys.said.append(f"norm_before_residual is not in config.json: {SPECULATORS[kind]}, as vLLM takes it then")
    return Keys(flat, keys.where, keys.said)


def verifier(keys: Keys) -> str | None:
    """The target that a speculators config names."""
    return keys.section("speculators_config").section("verifier").text("name_or_path")
