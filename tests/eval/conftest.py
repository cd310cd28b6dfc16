"""A tiny random target and a tiny random head for it, token ids to feed them, and drafters that know the answer."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from headtrain.eval.decoder.drafters.base import Drafter
from headtrain.tree import DraftTree

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
    # a config of its own: the models would share the name of their attention with it
    theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    theirs.load_state_dict(ours.state_dict())
    assert (ours.config._attn_implementation, theirs.config._attn_implementation) == ("headtrain", "eager")
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


def generated(model, prompt, new, **more):
    """Greedy continuation by transformers, the end token included."""
    row = torch.tensor([prompt])
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0} | more
    return model.generate(row, attention_mask=torch.ones_like(row), **options)[0, len(prompt) :].tolist()


class Oracle(Drafter):
    """Knows every prompt's continuation and drafts it, changed by `spoil(token, depth)`."""

    name = "oracle"

    def __init__(self, prompts, answers, spoil=lambda token, depth: token):
        self.texts = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
        self.spoil = spoil

    def start(self, prompts, capacity):
        self.rows = [next(text for text in self.texts if text[: len(p)] == p) for p in prompts]
        self.at = [1] * len(prompts)

    def observe(self, news):
        for i, tokens in enumerate(news.tokens):
            assert self.rows[i][self.at[i] : self.at[i] + len(tokens)] == tokens, "a token came twice, or never"
            assert tokens == news.tokens_BL[i, : news.counts_B[i]].tolist()
            self.at[i] += len(tokens)

    def propose(self, k, uniform_BN=None):
        drafts = [text[at : at + k] for text, at in zip(self.rows, self.at, strict=True)]
        drafts = [[self.spoil(token, depth) for depth, token in enumerate(d)] for d in drafts]
        padded = torch.tensor([d + [0] * (k - len(d)) for d in drafts], dtype=torch.long).view(len(drafts), k)
        return DraftTree.chain(padded, torch.tensor([len(d) for d in drafts]))

    def select(self, rows):
        self.rows, self.at = [self.rows[i] for i in rows.tolist()], [self.at[i] for i in rows.tolist()]


class TreeOracle(Oracle):
    """Hides the continuation, changed by `spoil`, in a tree of its own for each request, the nodes in random order.

    Every depth has the next token, a wrong sibling of it, and the same token once more below the wrong sibling.
    """

    name, branches = "tree oracle", True

    def nodes(self, k):
        return 3 * k

    def start(self, prompts, capacity):
        super().start(prompts, capacity)
        self.random = random.Random(0)
        self.proposed = []  # per step and request: the depths of its nodes

    def propose(self, k, uniform_BN=None):
        trees = [self._tree(text[at : at + k]) for text, at in zip(self.rows, self.at, strict=True)]
        width = max(len(tokens) for tokens, _ in trees)
        tokens = torch.tensor([t + [0] * (width - len(t)) for t, _ in trees], dtype=torch.long)
        parents = torch.tensor([p + [-1] * (width - len(p)) for _, p in trees], dtype=torch.long)
        tree = DraftTree(tokens, parents.view(tokens.shape), torch.tensor([len(t) for t, _ in trees]))
        self.proposed.append([depths[: len(t)] for depths, (t, _) in zip(tree.depths().tolist(), trees, strict=True)])
        return tree

    def _tree(self, truth):
        waiting, truth_at, wrong_at = [], "root", None  # (name, token, parent's name)
        for depth, token in enumerate(self.spoil(t, d) for d, t in enumerate(truth)):
            waiting += [(("true", depth), token, truth_at), (("wrong", depth), (token + 7) % VOCAB, truth_at)]
            if wrong_at:
                waiting.append((("late", depth), token, wrong_at))
            truth_at, wrong_at = ("true", depth), ("wrong", depth)
        order, tokens, parents = {"root": -1}, [], []
        while waiting:
            name, token, parent = self.random.choice([node for node in waiting if node[2] in order])
            waiting.remove((name, token, parent))
            order[name] = len(tokens)
            tokens.append(token)
            parents.append(order[parent])
        return tokens, parents


@pytest.fixture(scope="session")
def transformers_says():
    return generated


@pytest.fixture(scope="session")
def oracles():
    """(Oracle, TreeOracle)"""
    return Oracle, TreeOracle


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
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(6, VOCAB, (n,), generator=generator).tolist() for n in (3, 9, 17, 1, 30, 8, 12, 5)]
    rows[2] = rows[1][:4] * 4 + [7]  # repeats itself, so that prompt lookup finds something
    return rows


@pytest.fixture(scope="session")
def make():
    """The builders above, for tests that need another target."""
    return build_target, build_head
