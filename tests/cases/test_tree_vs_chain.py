"""The target goes on with A, C, Z. The draft: B (0.6) with E, F below it, and A (0.4) with D (0.7), C (0.3) below it.

Verified as a chain (the likeliest path) and as a tree, in the decoder, on a tiny target whose own words A, C, Z are.
"""

from types import SimpleNamespace

import pytest
import torch

from headtrain.eval.acceptance import metrics
from headtrain.eval.decoder.decode import Step, decode
from headtrain.eval.decoder.drafters import Drafter, NoDrafter
from headtrain.eval.report_data import accepted_per_node
from headtrain.eval.report_words import setting_words
from headtrain.tree import DraftTree

PROMPT = [7, 8, 9]
PARENTS = {"chain": [-1, 0], "2x6": [-1, -1, 0, 0, 1, 1]}


@pytest.fixture(scope="module")
def target():
    from transformers import AutoConfig, AutoModelForCausalLM

    from headtrain.target import Target, _register_attention

    _register_attention()
    config = AutoConfig.for_model(
        "llama", vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, initializer_range=0.5, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="headtrain").eval()
    return Target(model, SimpleNamespace(eos_token_id=None, chat_template="a template"), "tiny llama")


@pytest.fixture(scope="module")
def plain(target):
    return decode(target, NoDrafter(), [PROMPT], k=0, max_new_tokens=4)[0].ids  # the prompt's own token, A, C, Z


class Scripted(Drafter):
    """Proposes the case's draft once, then nothing."""

    def __init__(self, mode, plain):
        _, a, c, z = plain
        b, d, e, f = [token for token in range(61) if token not in (a, c, z)][:4]
        self.parents, self.branches = torch.tensor(PARENTS[mode]), mode != "chain"
        self.tokens = torch.tensor([{"chain": [b, e], "2x6": [b, a, e, f, d, c]}[mode]])

    def nodes(self, k):
        return len(self.parents)

    def start(self, prompts, capacity):
        self.left = [True, False]

    def observe(self, news):
        pass

    def propose(self, k, uniform_BN=None):
        if self.left.pop(0):
            return DraftTree(self.tokens, self.parents, torch.tensor([len(self.parents)]))
        self.left.append(False)
        return DraftTree.chain(self.tokens[:, :0])


@pytest.fixture(params=list(PARENTS))
def answered(request, target, plain):
    """(mode, its steps, its text, its row of a report)"""
    answer = decode(target, Scripted(request.param, plain), [PROMPT], k=2, max_new_tokens=4)[0]
    numbers = metrics([[step[:2] for step in answer.steps[:1]]], 2)
    row = {"tree": request.param, "k": 2, "temperature": 0, "rule": "exact", **numbers}
    return request.param, answer, row | {"nodes_per_step": [answer.steps[0].nodes]}


def test_the_text_is_that_of_plain_decoding_in_both_modes(answered, plain):
    assert answered[1].ids == plain


def test_the_chain_accepts_nothing_and_the_tree_two_of_six_nodes(answered):
    mode, answer, _ = answered
    assert answer.steps[0] == {"chain": Step(2, 0, 2), "2x6": Step(2, 2, 6)}[mode]
    assert len(answer.steps) == {"chain": 3, "2x6": 1}[mode]  # A, C and Z come at once, or one by one


def test_acceptance_is_told_by_depth_and_of_a_tree_by_node_as_well(answered):
    mode, _, row = answered
    assert (row["drafted"], row["draft_acceptance_rate"]) == (2, {"chain": 0, "2x6": 1}[mode])
    assert accepted_per_node(row) == {"chain": None, "2x6": pytest.approx(2 / 6)}[mode]


def test_the_report_names_mode_depth_top_k_and_node_count(answered):
    mode, _, row = answered
    said = setting_words(row)
    if mode == "chain":
        assert said == "K = 2, chain, greedy"
    else:
        assert said.startswith("depth K = 2, dynamic tree") and "top 2 of" in said and "6 nodes" in said
