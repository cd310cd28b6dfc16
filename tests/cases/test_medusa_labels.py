"""Which position each Medusa head learns at, and which token it learns: trained to the end, drafts must be accepted."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters import make_drafter
from headtrain.heads.base import Batch, load_head, save_head
from headtrain.heads.medusa import MedusaConfig, MedusaHead
from headtrain.heads.vocab import trained_pairs
from headtrain.target import Target, TargetParts

IDS, PROMPT, HEADS = [3, 4, 5, 6, 7, 8, 2], 2, 3
LABELS = [{1: 3, 2: 4, 3: 5, 4: 6}, {1: 4, 2: 5, 3: 6}, {1: 5, 2: 6}]  # per head: position -> its label's
CYCLE, VOCAB, WIDTH = [3, 4, 5, 6, 7], 12, 16


def batch_of(ids, prompt, last):
    n = len(ids)
    return Batch(
        torch.tensor(ids), torch.arange(n), torch.tensor([0, n], dtype=torch.int32), torch.arange(n) >= prompt,
        torch.zeros(n, 0, last.shape[1]), last, torch.tensor(ids).roll(-1), torch.zeros(n),
    )  # fmt: skip


def new(heads=HEADS, vocab=VOCAB, width=WIDTH):
    head = MedusaHead(MedusaConfig(
        hidden_size=width, target_hidden_size=width, vocab_size=vocab, draft_vocab_size=vocab, unroll=heads,
    ))  # fmt: skip
    torch.manual_seed(0)
    head.attach(torch.randn(vocab, width), torch.randn(vocab, width))
    for lm_head in head.lm_heads:
        torch.nn.init.normal_(lm_head.weight)
    return head


def one_hot_states():
    """Position t's state says t, so that what a head learned at which position can be read from its gradient."""
    return torch.eye(len(IDS), WIDTH)


@pytest.mark.parametrize("heads", [3, 2, 1])
def test_every_head_learns_at_the_positions_of_the_table_whatever_the_number_of_heads(heads):
    batch = batch_of(IDS, PROMPT, one_hot_states())
    trained, _ = trained_pairs(batch.supervised_N, batch.argmax_N, None, batch.cu_R1, heads)
    table = [{t: t + 2 + d for t in row.nonzero()[:, 0].tolist()} for d, row in enumerate(trained)]
    assert table == LABELS[:heads]


def test_the_gradient_of_every_head_comes_from_its_own_positions_and_labels():
    """Taught by the label alone, the gradient of logit v at position t is softmax - [v = label]: both are read off."""
    head, batch = new(), batch_of(IDS, PROMPT, one_hot_states())
    head.rules = replace(head.rules, hard_weight=1.0)  # the label alone
    head(batch).loss.backward()
    for depth, labels in enumerate(LABELS):
        gradient_VH = head.lm_heads[depth].weight.grad
        positions = gradient_VH.abs().sum(0).nonzero()[:, 0].tolist()
        assert positions == sorted(labels)
        assert {t: int(gradient_VH[:, t].argmin()) for t in positions} == {t: IDS[at] for t, at in labels.items()}


def cyclic_target():
    """A llama that repeats CYCLE: its blocks add nothing, and lm_head answers a token's direction by the next one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from headtrain.target import _register_attention

    _register_attention()
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="headtrain").eval().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    follows = torch.arange(VOCAB)
    follows[CYCLE] = torch.tensor([*CYCLE[1:], CYCLE[0]])
    directions = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0][:VOCAB]
    model.model.embed_tokens.weight.copy_(directions)
    model.lm_head.weight[follows] = 3 * directions
    return Target(model, SimpleNamespace(eos_token_id=None, chat_template="a template"), "a cycle")


def accepted_share(target, head, k):
    """Of each depth: drafts accepted, of those whose predecessors were."""
    [answer] = decode(target, make_drafter("head", head), [CYCLE[:2]], k=k, max_new_tokens=64)
    assert answer.ids == [CYCLE[(2 + n) % 5] for n in range(64)]
    steps = [step.accepted for step in answer.steps if step.drafted == k]
    return [sum(n > d for n in steps) / max(sum(n >= d for n in steps), 1) for d in range(k)]


def test_heads_that_learned_a_cycle_are_accepted_in_the_decoder_and_from_the_saved_folder(tmp_path):
    target = cyclic_target()
    lm_head, embedding = target.lm_head.weight, target.embed.weight
    parts = TargetParts(embedding, lm_head, torch.ones(WIDTH), None, {}, set())
    head = new()
    head.attach(embedding, lm_head)
    head.start_from(parts, torch.arange(VOCAB), batch_of([3], 0, torch.zeros(1, WIDTH)), None)
    ids = [CYCLE[n % 5] for n in range(27)]
    with torch.no_grad():
        last = target.model.model(torch.tensor([ids])).last_hidden_state[0]
    assert (lm_head @ last.T).argmax(0)[:-1].tolist() == ids[1:]
    batch = batch_of(ids, PROMPT, last)
    batch.logsumexp_N = (last @ lm_head.T).logsumexp(-1)
    assert accepted_share(target, head, HEADS) == [0, 0, 0]  # a fresh head repeats the target's own next token
    optimizer = torch.optim.Adam(head.parameters(), 0.03)
    for _ in range(60):
        optimizer.zero_grad()
        out = head(batch)
        out.loss.backward()
        optimizer.step()
    assert torch.equal(out.correct_D, out.count_D)
    assert min(accepted_share(target, head, HEADS)) > 0.95
    save_head(head, tmp_path)
    assert min(accepted_share(target, load_head(tmp_path), HEADS)) > 0.95
    tensors = load_file(tmp_path / "model.safetensors")  # as an engine computes it, by the names it loads
    for token in CYCLE:
        x = last[ids.index(token)]
        for depth in range(HEADS):
            layer = (tensors[f"blocks.{depth}.layers.0.{kind}"] for kind in ("weight", "bias"))
            y = x + torch.nn.functional.silu(torch.nn.functional.linear(x, *layer))
            said = int((tensors[f"lm_heads.{depth}.weight"] @ y).argmax())
            assert said == CYCLE[(CYCLE.index(token) + 2 + depth) % 5]
