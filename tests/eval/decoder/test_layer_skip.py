"""Drafting with the target's own first layers in the decoder's cache."""

from __future__ import annotations

import copy

import pytest
import torch

from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters import Drafting, make_drafter
from headtrain.eval.decoder.drafters.layer_skip import LayerSkipDrafter, first_layers
from headtrain.eval.decoder.sampling import Sampling
from headtrain.lean import speed_up

FAMILIES = [
    ("llama", {}),
    ("qwen3", {}),
    ("gemma3_text", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "layer_types":
                 ["sliding_attention", "full_attention", "sliding_attention"]}),
    ("mistral", {"sliding_window": 8}),
]  # fmt: skip


@pytest.mark.parametrize("family, more", FAMILIES)
def test_it_drafts_what_a_model_of_the_first_layers_alone_says_and_the_output_stays_the_targets(
    family, more, make, prompts
):
    target, theirs = make[0](family, **more)
    short = copy.deepcopy(theirs)  # the same weights without the last layer, run by transformers on the whole text
    short.model.layers = short.model.layers[:2]
    short.config.num_hidden_layers = 2

    class Checked(LayerSkipDrafter):
        checked = 0

        def propose(self, k, uniform_BK=None):
            tree = super().propose(k, uniform_BK)
            for text, drafts in zip(self.text, tree.tokens.tolist() if k else [], strict=k > 0):
                logits = short(torch.tensor([[*text, *drafts[:-1]]]), use_cache=False).logits[0, len(text) - 1 :]
                assert drafts == logits.argmax(-1).tolist()
                self.checked += 1
            return tree

    drafter = Checked(Sampling(), target, 2)
    plain = [a.ids for a in decode(target, make_drafter("none"), prompts[:5], k=0, max_new_tokens=16)]
    answers = decode(target, drafter, prompts[:5], k=3, max_new_tokens=16)
    assert [a.ids for a in answers] == plain and drafter.checked > 10


@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_output_is_the_targets_own(batch, target, prompts):
    plain = [a.ids for a in decode(target, make_drafter("none"), prompts, k=0, max_new_tokens=20)]
    drafter = make_drafter("layer_skip", drafting=Drafting(skip_from=1), target=target)
    assert [a.ids for a in decode(target, drafter, prompts, k=4, max_new_tokens=20, batch=batch)] == plain


def test_the_lean_forward_is_cut_in_the_same_place(make, prompts):
    target, _ = make[0]()
    drafter = make_drafter("layer_skip", drafting=Drafting(skip_from=2), target=target)
    own = decode(target, drafter, prompts[:3], k=3, max_new_tokens=16)
    speed_up(target)
    assert target.lean is not None
    lean = decode(target, drafter, prompts[:3], k=3, max_new_tokens=16)
    assert [(a.ids, a.steps) for a in lean] == [(a.ids, a.steps) for a in own]


def test_with_a_last_layer_that_does_nothing_every_draft_is_accepted(make, prompts):
    target, _ = make[0]()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        target.layers[2].get_submodule(name).weight.data.zero_()
    drafter = make_drafter("layer_skip", drafting=Drafting(skip_from=2), target=target)
    answers = decode(target, drafter, prompts, k=4, max_new_tokens=24, batch=4)
    assert all(step.accepted == step.drafted for a in answers for step in a.steps[:-1])
    plain = decode(target, make_drafter("none"), prompts, k=0, max_new_tokens=24)
    assert [a.ids for a in answers] == [a.ids for a in plain]


def test_the_layers_come_back_also_after_an_error(target):
    layers = target.backbone.layers
    with pytest.raises(RuntimeError), first_layers(target, 1):
        assert len(target.backbone.layers) == 1
        raise RuntimeError
    assert target.backbone.layers is layers and len(layers) == 3


def test_what_it_cannot_do_is_refused(make, target):
    for skip_from in (0, 3):
        with pytest.raises(ValueError, match=r"tiny llama has 3 layers; give 1 … 2"):
            LayerSkipDrafter(Sampling(), target, skip_from)
    hybrid, _ = make[0]("lfm2", layer_types=["conv", "full_attention", "conv"])
    with pytest.raises(ValueError, match="'conv' layers, whose running state"):
        LayerSkipDrafter(Sampling(), hybrid, 1)
