"""EAGLE-1 and EAGLE-2 heads as SafeAILab, SGLang and vLLM have them: fc over [embedding; hidden], one Llama layer."""

from __future__ import annotations

from headtrain.heads.base import logit_scale
from headtrain.heads.eagle import EagleConfig
from headtrain.importing.foreign import Foreign
from headtrain.importing.keys import layer_sizes


def read(f: Foreign) -> EagleConfig:
    """The head's config; the foreign tensors are renamed in place."""
    keys, sizes = f.keys, layer_sizes(f.keys)
    if keys.whole("num_hidden_layers", 1) != 1:
        raise keys.fault("num_hidden_layers", f"={keys.raw['num_hidden_layers']}: EAGLE heads have one layer here")
    if sizes["hidden_size"] != sizes["target_hidden_size"]:
        raise keys.fault("target_hidden_size", ": an EAGLE head is as wide as its target")
    sizes |= f.made_for_target(sizes)
    f.strip()
    f.split_fused("layers.0.", sizes)
    settle(f)
    f.said.append("unroll 1, as in the paper: no checkpoint says how deep training unrolled")
    vocab = sizes["vocab_size"]
    biased = bool(f.tensors["fc.bias"].any()) if "fc.bias" in f.tensors else False
    if biased:
        f.said.append("fc has a bias: SGLang and the original code add it, vLLM ignores it and would draft otherwise")
    return EagleConfig(
        **sizes, draft_vocab_size=vocab, unroll=1, freeze_lm_head=True, logit_scale=logit_scale(f.target),
        fc_bias=biased,
    )  # fmt: skip


def settle(f: Foreign) -> None:
    """The tensors that a head of ours does not have, or has besides."""
    f.without_embedding()
    if f.tensors.pop("lm_head.weight", None) is not None:
        f.said.append("lm_head.weight is left out: engines draft with the target's")
    if "fc.bias" not in f.tensors and (fc := f.tensors.get("fc.weight")) is not None:
        f.tensors["fc.bias"] = fc.new_zeros(len(fc))
