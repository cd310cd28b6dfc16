"""A P-EAGLE head in the decoder: the text is the target's, whatever the head drafts and however it is asked."""

from __future__ import annotations

import pytest
import torch

from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters.head import HeadDrafter
from headtrain.eval.decoder.drafters.shape import TreeShape
from headtrain.eval.decoder.sampling import Sampling
from headtrain.heads.peagle import PEagleConfig, PEagleHead


@pytest.fixture(scope="module")
def peagle(target):
    torch.manual_seed(0)
    head = PEagleHead(PEagleConfig(
        type="peagle", hidden_size=64, target_hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=target.vocab_size, draft_vocab_size=target.vocab_size,
        taps=[1, 2, 3], target_layers=3, unroll=4, layers=2, mask_token=3,
    ))  # fmt: skip
    head.attach(target.embed.weight)
    head.lm_head.weight.data.copy_(target.lm_head.weight)  # so that some drafts are right
    return head.eval().requires_grad_(False)


@pytest.mark.parametrize("tree", ["chain", "3x8"])
@pytest.mark.parametrize("k", [3, 6])
def test_greedy_decoding_gives_the_targets_own_text(tiny, peagle, prompts, transformers_says, k, tree):
    drafter = HeadDrafter(peagle, Sampling(), TreeShape.parse(tree))
    found = decode(tiny[0], drafter, prompts, k=k, max_new_tokens=24, batch=3)
    assert [r.ids for r in found] == [transformers_says(tiny[1], prompt, 24) for prompt in prompts]
    assert any(step.accepted for r in found for step in r.steps)


@pytest.mark.parametrize("rows", [(0, 1), (1,)])
def test_what_is_drafted_while_decoding_is_what_is_drafted_from_captures(target, peagle, prompts, rows):
    """Teacher forcing on the decoded text: `draft_all` at the slots where decoding drafted proposes the same tokens."""
    from headtrain.heads.base import Batch

    proposed = []

    class Watched(HeadDrafter):
        def propose(self, k, uniform_BN=None):
            tree = super().propose(k, uniform_BN)
            proposed.append(tree.tokens.tolist())
            return tree

    for row in rows:
        proposed.clear()
        prompt = prompts[row]
        (found,) = decode(target, Watched(peagle, Sampling()), [prompt], k=4, max_new_tokens=20)
        ids = torch.tensor([*prompt, *found.ids])
        taps = target.forward(ids[None], taps=(1, 2, 3)).taps_BLAH[0]
        n = len(ids)
        batch = Batch(
            ids_N=ids, positions_N=torch.arange(n), cu_R1=torch.tensor([0, n]),
            supervised_N=torch.arange(n) >= len(prompt), taps_NAT=taps, last_NT=taps[:, 0],
            argmax_N=torch.zeros(n, dtype=torch.long), logsumexp_N=torch.zeros(n),
        )  # fmt: skip
        drafts, slot = peagle.draft_all(batch, 4), len(prompt) - 1
        compared = 0
        for step, ((tokens,), taken) in enumerate(zip(proposed, found.steps, strict=False)):
            if slot > n - 3:
                break
            assert drafts[slot, : len(tokens)].tolist() == tokens, step
            slot, compared = slot + 1 + taken.accepted, compared + 1
        assert compared > 3
