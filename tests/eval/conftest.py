"""A tiny random target and a tiny random head for it, and token ids to feed them."""

from __future__ import annotations

import pytest
import torch

EOS = 5
VOCAB = 97


class TinyTokenizer:
    eos_token_id = EOS
    chat_template = "a template"


def build_target(family: str = "llama", vocab: int = VOCAB, layers: int = 3, seed: int = 0, **more):
    """(our Target, the same weights as a plain transformers model with its own eager attention)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from headtrain.target import Target, _register_attention

    _register_attention()
    config = AutoConfig.for_model(
        family, vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.3, eos_token_id=EOS,
        bos_token_id=1, pad_token_id=0, **more,
    )  # fmt: skip
    torch.manual_seed(seed)
    ours = AutoModelForCausalLM.from_config(config, attn_implementation="headtrain").eval()
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs.load_state_dict(ours.state_dict())
    target = Target(ours, TinyTokenizer(), f"tiny {family}")
    target.self_check()
    return target, theirs


def build_head(target, draft_vocab: int | None = None, taps=(1, 2, 3), seed: int = 0):
    """A random EAGLE-3 head; with a draft vocab, it can draft every other id only."""
    from headtrain.heads.base import HeadConfig
    from headtrain.heads.eagle3 import Eagle3Head

    vocab = target.vocab_size
    torch.manual_seed(seed)
    head = Eagle3Head(HeadConfig(
        hidden_size=64, target_hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=vocab, draft_vocab_size=draft_vocab or vocab, taps=list(taps), target_layers=3,
    ))  # fmt: skip
    if draft_vocab:
        ids = torch.arange(draft_vocab) * 2
        head.d2t.copy_(ids - torch.arange(draft_vocab))
        head.t2d.copy_(torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True))
    head.attach(target.embed.weight)
    return head.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tiny():
    return build_target()


@pytest.fixture(scope="session")
def target(tiny):
    return tiny[0]


@pytest.fixture(scope="session")
def head(target):
    return build_head(target, draft_vocab=40)


@pytest.fixture(scope="session")
def prompts():
    random = torch.Generator().manual_seed(1)
    rows = [torch.randint(6, VOCAB, (n,), generator=random).tolist() for n in (3, 9, 17, 1, 30, 8, 12, 5)]
    rows[2] = rows[1][:4] * 4 + [7]  # repeats itself, so that prompt lookup finds something
    return rows


@pytest.fixture(scope="session")
def make():
    """The builders above, for tests that need another target."""
    return build_target, build_head
