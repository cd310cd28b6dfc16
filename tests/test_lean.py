"""The lean forward is the model's own: taps, caches, ragged batches, trees, windows, bf16; and not used where not."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from headtrain import lean
from headtrain.cache import KVCache
from headtrain.lean import speed_up
from headtrain.tree import DraftTree

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")

_spec = importlib.util.spec_from_file_location("eval_conftest", Path(__file__).parent / "eval" / "conftest.py")
_conftest = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_conftest)
build_target, VOCAB = _conftest.build_target, _conftest.VOCAB

FAMILIES = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "qwen2 with a window in one block": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    ),
    "qwen3 with tied embeddings": ("qwen3", {"tie_word_embeddings": True}),
    "smollm3 with a block without rope": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
}  # fmt: skip
TAPS = (1, 3)


@pytest.fixture(params=FAMILIES, ids=lambda name: name.replace(" ", "-"))
def pair(request):
    """(a target that runs by its own forward, the same one running leanly)."""
    family, more = FAMILIES[request.param]
    own, ours = build_target(family, **more)[0], build_target(family, **more)[0]
    speed_up(ours)
    assert ours.lean is not None
    return own, ours


def same(own, ours, tolerance=1e-4):
    for a, b in ((own.last_BLH, ours.last_BLH), (own.taps_BLAH, ours.taps_BLAH)):
        assert float((a - b).abs().max()) <= tolerance * float(a.abs().max())


def test_prompts_chains_and_trees_of_a_ragged_batch_give_the_models_own_states(pair):
    torch.manual_seed(0)
    lengths_B, width = torch.tensor([20, 3, 11]), 20  # longer and shorter than 16
    prompts_BL = torch.randint(6, VOCAB, (3, width))
    parents = torch.tensor([-1, -1, 0, 0, 1])
    tree = DraftTree(torch.randint(6, VOCAB, (3, 5)), parents, torch.full((3,), 5))
    seen_NN, depths_N = tree.ancestors(), tree.depths()
    window = width + 7
    slots_BL = lengths_B[:, None] + 1 + torch.arange(5)
    true_B1S = (torch.arange(window) < lengths_B[:, None] + 1)[:, None]
    mask_BLS = true_B1S.expand(3, 5, window).clone()
    mask_BLS.scatter_(2, slots_BL[:, None].expand(3, 5, 5), seen_NN.expand(3, 5, 5))
    steps = [
        {"tokens_BL": prompts_BL},
        {"tokens_BL": torch.randint(6, VOCAB, (3, 1)), "slots_BL": lengths_B[:, None]},
        {
            "tokens_BL": tree.tokens, "slots_BL": slots_BL, "mask_BLS": mask_BLS, "window": window,
            "positions_BL": (lengths_B[:, None] + depths_N).expand(3, 5),
        },
    ]  # fmt: skip
    caches = [KVCache(3, 40) for _ in pair]
    for step in steps:
        own, ours = (target.forward(**step, cache=cache, taps=TAPS) for target, cache in zip(pair, caches, strict=True))
        same(own, ours)


def test_one_row_that_grows_token_by_token_gives_the_states_of_one_pass(pair):
    own, ours = pair
    ids = torch.randint(6, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    cache, states = KVCache(1, 12), []
    for at in range(12):
        states.append(ours.forward(ids[:, at : at + 1], cache, torch.tensor([[at]])).last_BLH)
    torch.testing.assert_close(torch.cat(states, 1), own.forward(ids).last_BLH, atol=1e-4, rtol=1e-4)


def test_bf16_agrees_within_its_rounding():
    own, ours = (build_target("qwen3")[0] for _ in range(2))
    for target in (own, ours):
        target.model.to(torch.bfloat16)
    speed_up(ours)
    assert ours.lean is not None
    ids = torch.randint(6, VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
    same(own.forward(ids, taps=TAPS), ours.forward(ids, taps=TAPS), tolerance=0.06)


def test_the_models_own_forward_still_works_and_its_weights_are_views_of_the_fused_ones():
    target, theirs = build_target("llama")
    ids = torch.randint(6, VOCAB, (1, 9), generator=torch.Generator().manual_seed(3))
    speed_up(target)
    with torch.inference_mode():
        torch.testing.assert_close(target.model(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)
    attention, block = target.layers[0].self_attn, target.lean.blocks[0]
    whole = block.qkv.weight_OI.untyped_storage().data_ptr()
    assert {layer.weight.untyped_storage().data_ptr() for layer in (attention.q_proj, attention.v_proj)} == {whole}


def test_with_fewer_blocks_in_the_backbone_only_those_run():
    target, _ = build_target("llama")
    ids = torch.randint(6, VOCAB, (1, 9), generator=torch.Generator().manual_seed(4))
    speed_up(target)
    second = target.forward(ids, taps=(2,)).taps_BLAH[:, :, 0]
    target.backbone.layers = nn.ModuleList(target.layers[:2])
    with torch.inference_mode():
        torch.testing.assert_close(target.forward(ids).last_BLH, target.norm(second), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "family, change, reason",
    [
        ("gemma2", lambda target: None, "family gemma2 is not one of"),
        ("llama", lambda target: target.model.half(), "fp32 or bf16"),
        ("llama", lambda target: setattr(target.layers[1].mlp, "extra", nn.Linear(3, 3)), "seven linear layers"),
    ],
)
def test_a_target_that_cannot_run_leanly_runs_by_its_own_forward_and_the_log_says_why(family, change, reason, caplog):
    target, _ = build_target(family)
    change(target)
    with caplog.at_level(logging.INFO):
        speed_up(target)
    assert target.lean is None and reason in caplog.text


def test_a_lean_forward_that_is_off_the_models_own_is_not_used(monkeypatch, caplog):
    target, theirs = build_target("llama")
    monkeypatch.setattr(lean, "_rotate", lambda x, cos, sin: x)  # as if rope had been forgotten
    with caplog.at_level(logging.INFO):
        speed_up(target)
    assert target.lean is None and "off by" in caplog.text
    ids = torch.randint(6, VOCAB, (1, 9), generator=torch.Generator().manual_seed(5))
    logits = target.logits(target.forward(ids).last_BLH)
    with torch.inference_mode():
        torch.testing.assert_close(logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)
