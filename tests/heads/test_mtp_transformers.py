"""MTP modules against transformers' own: the same checkpoint gives the same logits, and the same first draft tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headtrain.config import HeadSection, TargetConfig
from headtrain.heads.mtp import MtpHead
from headtrain.heads.vocab import mapping
from headtrain.target import load_parts


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_checkpoints_module_says_what_transformers_makes_of_it(family, mtp_targets, tmp_path):
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    mtp_targets.make(tmp_path, family)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    layers = target.config.num_hidden_layers
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers}\..*"]  # theirs names the released ones
    theirs = MtpModel.from_pretrained(target).eval()
    tokens = torch.randint(1, mtp_targets.VOCAB, (1, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        last = target.get_decoder()(input_ids=tokens).last_hidden_state

    source = TargetConfig(model=str(tmp_path), dtype="float32", device="cpu")
    parts = dataclasses.replace(_parts(source, tmp_path), source=source)
    head = MtpHead.fresh(HeadSection(type="mtp", draft_vocab="full", unroll=1), parts).eval()
    head.d2t, head.t2d = mapping(torch.arange(mtp_targets.VOCAB), mtp_targets.VOCAB)
    head.attach(parts.embedding, parts.lm_head)
    head.dialect = dataclasses.replace(head.dialect, skips_first=False)  # which is vLLM's custom, not transformers'
    for known in (2, 5, 11):
        positions = torch.arange(1, known + 1)[None]
        cache = MtpCache(config=target.config.get_mtp_config())
        with torch.no_grad():
            drafted, logits, _ = theirs(tokens[:, 1 : known + 1], last[:, :known], None, positions, cache)
        state = head.start(1, 16)
        ours, _ = head.extend(state, tokens[:, 1 : known + 1], None, last[:, :known], torch.tensor([known]))
        torch.testing.assert_close(ours, logits[:, 0], rtol=1e-5, atol=1e-5)
        assert head.to_target_ids(ours.argmax(-1)).tolist() == drafted[:, 0].tolist()
    assert float(ours.std()) > 0.1


def _parts(source, folder):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({str(n): n for n in range(20)}, unk_token="3")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="19").save_pretrained(folder)
    return load_parts(source)
