"""The EAGLE-3 training steps of two other toolkits, as installed from PyPI, run on our inputs ("eager on CPU").

What a CPU needs is put in from outside: specforge's loss module imports triton, which is replaced by a placeholder for
that import, and its Triton loss by the eager reference that stands beside it; both use plain attention ("sdpa"),
because FlexAttention has no backward on a CPU. torch.compile is off (TORCHDYNAMO_DISABLE).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.steps import DECAY, DTYPES, Case, Inputs, reachable

Step = Callable[[], dict[str, Any]]


class PeerMissing(RuntimeError):
    """A peer is not installed in this environment; the message says what to do."""


def _missing(name: str, reason: object) -> PeerMissing:
    return PeerMissing(
        f"{name} cannot be imported ({reason}): run `make bench-train`, which makes an environment for the peers"
    )


def check() -> None:
    """PeerMissing if a peer is not installed."""
    for name in ("specforge", "speculators"):
        if importlib.util.find_spec(name) is None:
            raise _missing(name, "it is not installed")


def load(module: str) -> Any:
    """Imports a module of a peer; PeerMissing if it, or something that it imports, is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _missing(module.split(".")[0], error) from error


def _without_triton(module: str) -> Any:
    """Imports a module that wants triton at import time and uses it only in kernels that are not called."""
    importlib.import_module("torch._dynamo")  # looks for triton itself, so before the placeholder
    placeholder, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    placeholder.jit, placeholder.language, language.constexpr = lambda kernel: kernel, language, object()
    before = {name: sys.modules.get(name) for name in ("triton", "triton.language")}
    sys.modules |= {"triton": placeholder, "triton.language": language}
    try:
        return load(module)
    finally:
        for name, real in before.items():
            sys.modules.pop(name)
            if real is not None:
                sys.modules[name] = real


def _llama_config(case: Case, inputs: Inputs) -> Any:
    from transformers import LlamaConfig

    s = case.shape
    config = LlamaConfig(
        hidden_size=s.hidden, intermediate_size=s.intermediate, num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads, head_dim=s.head_dim, vocab_size=len(inputs.lm_head_VH), num_hidden_layers=1,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=max(2048, case.length + case.depths + 1), tie_word_embeddings=False,
    )  # fmt: skip
    config.draft_vocab_size, config.pretraining_tp = case.draft_vocab, 1
    config.pad_token_id = None
    return config


def _one_document(case: Case) -> None:
    if case.documents != 1 or case.keep != 1:
        raise ValueError(f"{case.contender}: one document and keep=1 only, not {case.documents} and {case.keep}")


def specforge_step(case: Case, inputs: Inputs) -> tuple[torch.nn.Module, Step]:
    """specforge's offline EAGLE-3 step: full-vocabulary target logits, unroll, soft cross-entropy over all N slots."""
    _one_document(case)
    loss = _without_triton("specforge.core.loss")
    algorithm = load("specforge.algorithms.eagle3.model")
    draft = load("specforge.modeling.draft.llama3_eagle")
    target = load("specforge.modeling.target.target_head")
    # the kernel's own eager reference; the name below is where the step looks the loss up
    algorithm.LogSoftmaxLoss = types.SimpleNamespace(apply=loss._compute_loss)
    dtype = DTYPES[case.dtype]
    head = draft.LlamaForCausalLMEagle3(_llama_config(case, inputs), attention_backend="sdpa")
    _fill(head, inputs.weights | {"embed_tokens.weight": inputs.embedding_VH, "d2t": inputs.d2t, "t2d": inputs.t2d})
    head.freeze_embedding()
    head = head.to(dtype)
    model = algorithm.OnlineEagle3Model(head, length=case.depths, attention_backend="sdpa")
    lm_head_VH = inputs.lm_head_VH.to(dtype)
    batch = inputs.batch.to("cpu", dtype)
    mask_1N = reachable(case, inputs.batch)[0].long()[None]

    def step() -> dict[str, Any]:
        ids, hidden, mask = target.TargetHead.preprocess(None, batch.ids_N[None], batch.last_NT[None], mask_1N)
        with torch.no_grad():
            logits = hidden @ lm_head_VH.T
        losses = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), target=logits, loss_mask=mask,
            hidden_states=batch.taps_NAT.flatten(1)[None],
        )[0]  # fmt: skip
        loss = sum(DECAY**d * value for d, value in enumerate(losses))
        loss.backward()
        return {"loss": loss.item()}

    return head, step


def speculators_step(case: Case, inputs: Inputs) -> tuple[torch.nn.Module, Step]:
    """speculators' EAGLE-3 step with the classic network (no extra norms); its lm_head is frozen, as it always is.

    bf16 means bf16 weights, which is faster than the autocast over float32 weights of its trainer. The loss is KL, the
    mean over the supervised slots.
    """
    _one_document(case)
    eagle3 = load("speculators.models.eagle3")
    core = load("speculators.models.eagle3.core")
    losses = load("speculators.losses")
    layer = _llama_config(case, inputs)
    layer._attn_implementation = "sdpa"
    config = eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=case.draft_vocab, norm_before_residual=False,
        norm_before_fc=False, norm_output=False, eagle_aux_hidden_state_layer_ids=[2, 15, 27],
    )  # fmt: skip
    model = core.Eagle3DraftModel(config)
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in inputs.weights.items()}
    target = {
        "embed_tokens.weight": inputs.embedding_VH, "verifier_lm_head.weight": inputs.lm_head_VH[inputs.t2d],
        "verifier_norm.weight": torch.ones(case.shape.hidden), "d2t": inputs.d2t, "t2d": inputs.t2d,
    }  # fmt: skip
    _fill(model, renamed | target)
    dtype = DTYPES[case.dtype]
    model, batch = model.to(dtype), inputs.batch.to("cpu", dtype)
    mask_N = torch.cat([torch.zeros(1, dtype=torch.bool), reachable(case, batch)[0][:-1]])
    shifted = eagle3.shift_batch(
        {
            "input_ids": batch.ids_N, "hidden_states": batch.taps_NAT.flatten(1), "loss_mask": mask_N,
            "verifier_last_hidden_states": batch.last_NT, "position_ids": batch.positions_N,
            "lengths": torch.tensor([case.length]),
        }
    )  # fmt: skip
    names = ("input_ids", "hidden_states", "loss_mask", "verifier_last_hidden_states", "position_ids")
    fed = {name: shifted[name].clone()[None] for name in names}
    fed["document_ids"] = torch.zeros_like(fed["input_ids"])
    loss_config = losses.resolve_loss_config("kl_div", "eager")

    def step() -> dict[str, Any]:
        _, loss, _ = model(**fed, ttt_steps=case.depths, ttt_step_loss_decay=DECAY, loss_config=loss_config)
        loss.backward()
        return {"loss": loss.item()}

    return model, step


def _fill(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Loads tensors under the model's names; an unknown or missing one is an error."""
    missing, unknown = model.load_state_dict(tensors, strict=False)
    if missing or unknown:
        raise RuntimeError(f"{type(model).__name__}: missing tensors {missing}, unknown tensors {unknown}")
