"""EAGLE against an obvious reference: dense attention, full logits, autograd, one document at a time."""

import copy
import json
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from headtrain.config import ConfigError, HeadSection, RecipeConfig
from headtrain.configcheck import validate
from headtrain.data_gen import store
from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters.head import HeadDrafter
from headtrain.eval.decoder.drafters.none import NoDrafter
from headtrain.eval.decoder.drafters.shape import TreeShape
from headtrain.eval.decoder.sampling import Sampling
from headtrain.heads.base import Batch, load_head, new_head, save_head
from headtrain.heads.eagle import EagleConfig, EagleHead
from headtrain.heads.vocab import trained_pairs
from headtrain.target import Target, TargetParts

V, H, DEPTHS = 50, 24, 3
LENGTHS, PROMPTS = (13, 9, 17), (4, 2, 6)


def make_head(unroll=DEPTHS, **options):
    torch.manual_seed(0)
    head = EagleHead(EagleConfig(
        hidden_size=H, target_hidden_size=H, intermediate_size=40, num_attention_heads=6, num_key_value_heads=2,
        head_dim=8, vocab_size=V, draft_vocab_size=V, target_layers=7, unroll=unroll, **options,
    ))  # fmt: skip
    head.layers[0].post_attention_layernorm.weight.data += 0.1 * torch.randn(H)
    if head.fc.bias is not None:
        head.fc.bias.data += torch.randn(H)
    head.attach(torch.randn(V, H), torch.randn(V, H))
    head.rules.decay = 0.8
    return head


def make_batch(seed=1):
    g, n = torch.Generator().manual_seed(seed), sum(LENGTHS)
    supervised = torch.cat([torch.arange(t) >= p for t, p in zip(LENGTHS, PROMPTS, strict=True)])
    supervised[sum(LENGTHS[:2]) + 10] = False  # two spans in the last document
    return Batch(
        ids_N=torch.randint(0, V, (n,), generator=g),
        positions_N=torch.cat([torch.arange(t) for t in LENGTHS]),
        cu_R1=torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32),
        supervised_N=supervised,
        taps_NAT=torch.zeros(n, 0, H),
        last_NT=torch.randn(n, H, generator=g),
        argmax_N=torch.randint(0, V, (n,), generator=g),
        logsumexp_N=torch.zeros(n),
    )


def rope(x, position):
    angle = position * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    a, b = x[..., :4], x[..., 4:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def reference(head, batch):
    """{(document, depth, slot): the hidden state that the layer puts out}, written from the paper, slot by slot."""
    layer, out = head.layers[0], {}
    weight = {name.split(".")[-2]: p for name, p in layer.named_parameters()}
    for r in range(len(LENGTHS)):
        a, b = batch.cu_R1[r : r + 2].tolist()
        first = []  # keys and values of depth 0, by slot
        for p in range(b - a - 1):
            features, own = batch.last_NT[a + p], []
            for d in range(min(head.config.unroll, b - a - 1 - p)):
                embedded = head._lent["embedding"][batch.ids_N[a + p + 1 + d]]
                x = head.fc.weight @ torch.cat([embedded, features * head.feature_scale])
                x = x if head.fc.bias is None else x + head.fc.bias
                q, k, v = ((weight[f"{n}_proj"] @ x).view(-1, 8) for n in "qkv")
                pair = rope(k, p + d), v
                if d == 0:
                    first.append(pair)
                else:
                    own.append(pair)
                keys, values = (torch.stack(z) for z in zip(*first[: p + 1], *own, strict=True))
                heads = []
                for h in range(6):  # three query heads share a key head
                    scores = keys[:, h // 3] @ rope(q, p + d)[h] / 8**0.5
                    heads.append(scores.softmax(-1) @ values[:, h // 3])
                x = x + weight["o_proj"] @ torch.cat(heads)
                inner = x / (x.square().mean() + 1e-5).sqrt() * layer.post_attention_layernorm.weight
                gated = F.silu(weight["gate_proj"] @ inner) * (weight["up_proj"] @ inner)
                features = out[r, d, p] = x + weight["down_proj"] @ gated
    return out


def reference_loss(head, batch):
    """10 x the paper's: soft cross-entropy, and ten times smooth L1 with the target's next hidden state."""
    lm_head, total = head._lent["teacher"], 0.0
    trained, _ = trained_pairs(batch.supervised_N, batch.argmax_N, None, batch.cu_R1, head.config.unroll)
    for (r, d, p), hidden in reference(head, batch).items():
        slot = int(batch.cu_R1[r]) + p
        if trained[d, slot]:
            true = batch.last_NT[slot + 1 + d]
            scale = head.output_scale
            ce = -((lm_head @ true * scale).softmax(-1) * (lm_head @ hidden * scale).log_softmax(-1)).sum()
            distance = F.smooth_l1_loss(hidden * scale, true * scale)
            total = total + 0.8**d * (ce + 10 * distance) / trained[d].sum()
    return total


@pytest.mark.parametrize("unroll, scale, bias", [(1, 1.0, False), (DEPTHS, 1.0, True), (DEPTHS, 0.25, False)])
def test_the_forward_equals_the_reference_in_loss_and_every_gradient(unroll, scale, bias):
    fast, slow = (make_head(unroll, logit_scale=scale, fc_bias=bias) for _ in range(2))
    batch = make_batch()
    fast.logit_scale, fast.rules.feature_weight = scale, 10.0
    out, expected = fast(batch), reference_loss(slow, batch)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    out.loss.backward()
    expected.backward()
    for (name, p), q in zip(fast.named_parameters(), slow.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-5, rtol=1e-4), name


def test_what_each_depth_reads_and_is_compared_with_is_the_table_worked_by_hand(monkeypatch):
    """The first document: tokens 0 … 12, of which 4 … 12 are the answer. Token t is t, its state is t everywhere."""
    head, batch, seen = make_head(), make_batch(), []
    batch.ids_N = torch.arange(39)
    batch.last_NT = torch.arange(39.0)[:, None].expand(-1, H)
    join = head._join

    def watched(read, features, weights):
        seen.append((read[:, 0].tolist(), features[:, 0].tolist()))
        return join(read, features, weights)

    monkeypatch.setattr(head, "_read", lambda ids, _: ids[:, None].float().expand(-1, H))
    monkeypatch.setattr(head, "_join", watched)
    head(batch)
    assert seen[0][0][:12] == list(range(1, 13))  # depth 0 reads token p+1 at slot p …
    assert seen[0][1][:12] == list(range(12))  # … and the state of token p
    assert seen[1][0][:7] == [5, 6, 7, 8, 9, 10, 11]  # depth 1 reads token p+2 at slots 3 … 9, which have a label there
    assert seen[2][0][:6] == [6, 7, 8, 9, 10, 11]  # depth 2 reads token p+3 at slots 3 … 8
    trained, _ = trained_pairs(batch.supervised_N, batch.argmax_N, None, batch.cu_R1, DEPTHS)
    labels = [(trained[d, :13].nonzero()[:, 0] + 2 + d).tolist() for d in range(DEPTHS)]  # tokens guessed
    assert labels == [list(range(5, 13)), list(range(6, 13)), list(range(7, 13))]


@pytest.mark.parametrize("bias", [False, True])
def test_drafting_step_by_step_gives_the_logits_of_the_training_forward(bias):
    head, batch = make_head(fc_bias=bias), make_batch()
    hidden, a = reference(head, batch), 22  # the last document
    ids, last = batch.ids_N[a:], batch.last_NT[a:]
    state = head.start(2, 40)
    for begin, end in ((0, 5), (5, 8)):  # five slots, then three more; row 1 lags behind by one and is padded
        lag = max(begin - 1, 0)
        tokens = torch.stack([ids[begin + 1 : end + 1], ids[lag + 1 :][: end - begin]])
        features = torch.stack([last[begin:end], last[lag:][: end - begin]])
        counts = torch.tensor([end - begin, end - begin - (begin == 0)])
        draft, _ = head.extend(state, tokens, None, features, counts)
        for depth in range(DEPTHS):
            for row, slot in ((0, end - 1), (1, end - 2)):
                expected = head._lent["teacher"] @ hidden[2, depth, slot]
                assert torch.allclose(draft[row], expected, atol=1e-5), (begin, depth, row)
            draft = head.expand(state, torch.stack([ids[end + 1 + depth], ids[end + depth]])[:, None])[0][:, 0]


def test_draft_all_equals_drafting_from_each_slot_alone():
    head, batch = make_head(), make_batch()
    drafts = head.draft_all(batch, 4)
    for slot in range(3, 11):
        state = head.start(1, 40)
        last = batch.last_NT[: slot + 1][None]
        logits, _ = head.extend(state, batch.ids_N[1 : slot + 2][None], None, last, torch.tensor([slot + 1]))
        for depth in range(4):
            token = head.to_target_ids(logits.argmax(-1))
            assert int(drafts[slot, depth]) == int(token)
            logits = head.expand(state, token[:, None])[0][:, 0]


def test_no_draft_depends_on_a_later_token_or_on_another_document():
    head, batch = make_head(), make_batch()
    changed, cut = copy.deepcopy(batch), 22 + 9
    for x in (changed.ids_N, changed.last_NT):
        x[cut:] = x[cut:].flip(0)
        x[:13] = x[:13].flip(0)
    before, after = head.draft_all(batch, 3), head.draft_all(changed, 3)
    assert torch.equal(before[22:][5 : cut - 1 - 22], after[22:][5 : cut - 1 - 22])  # slot p reads tokens up to p+1
    assert not torch.equal(before[cut:], after[cut:])  # the probe does reach what may differ


@pytest.mark.parametrize("bias", [False, True])
def test_a_folder_holds_what_vllm_and_sglang_load_and_comes_back_with_the_same_drafts(tmp_path, bias):
    head, batch = make_head(fc_bias=bias), make_batch()
    drafts = head.draft_all(batch, 3)
    head.scale_features(torch.rand(1, H) * 100 + 0.01)
    assert torch.equal(head.draft_all(batch, 3), drafts)  # folded into fc, both ways
    save_head(head, tmp_path)
    again = load_head(tmp_path, head._lent["embedding"], lm_head=head._lent["teacher"])
    assert again.config == head.config and torch.equal(again.draft_all(batch, 3), drafts)
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    names = {*(f"self_attn.{n}" for n in attention), *(f"mlp.{n}" for n in mlp), "post_attention_layernorm"}
    written = head.portable_tensors()
    assert set(written) == {"fc.weight", "fc.bias", *(f"layers.0.{name}.weight" for name in names)}
    assert list(written["fc.weight"].shape) == [H, 2 * H] and bool(written["fc.bias"].any()) == bias
    for name, tensor in again.portable_tensors().items():
        assert torch.equal(tensor, written[name]), name
    assert head.portable_config(torch.float32)["architectures"] == ["LlamaForCausalLM"]


def test_a_bias_that_one_engine_reads_and_the_other_does_not_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save_head(make_head(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["fc.bias"] += 0.1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: fc\.bias is not zero"):
        load_head(tmp_path)


@pytest.mark.parametrize("keys, words", [
    ({"draft_vocab": 8192}, "head.draft_vocab=8192: .* set head.draft_vocab=full"),
    ({"draft_vocab": "full", "taps": [1]}, "head.taps"),
    ({"draft_vocab": "full", "freeze_lm_head": True}, "head.freeze_lm_head"),
])  # fmt: skip
def test_settings_that_an_eagle_head_does_not_have_are_refused(keys, words):
    config = RecipeConfig()
    config.head = HeadSection(type="eagle", **keys)
    with pytest.raises(ConfigError, match=words):
        validate(config)


# ---------------------------------------------------------------------------------------------------- with a target


@pytest.fixture(scope="module")
def target():
    from transformers import AutoConfig, AutoModelForCausalLM

    from headtrain.target import _register_attention

    _register_attention()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=V, hidden_size=H, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.3, eos_token_id=V - 1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="headtrain").eval()
    torch.nn.init.normal_(model.model.norm.weight, mean=1.0, std=0.3)

    class Tokenizer:
        eos_token_id, chat_template = V - 1, ""

    return Target(model, Tokenizer(), "tiny")


@pytest.fixture(scope="module")
def answered(target):
    """(prompts, plain greedy answers, their states as a packed batch)."""
    g = torch.Generator().manual_seed(2)
    prompts = [torch.randint(V - 1, (n,), generator=g).tolist() for n in (4, 9, 6, 3, 7, 5)]
    answers = [row.ids for row in decode(target, NoDrafter(), prompts, k=0, max_new_tokens=30)]
    rows = [torch.tensor(p + a) for p, a in zip(prompts, answers, strict=True)]
    last = [target.forward(row[None]).last_BLH[0].clone() for row in rows]
    for state in last:
        state[-1] = 0
    logits = target.logits(torch.cat(last)).float()
    lengths = [len(row) for row in rows]
    batch = Batch(
        torch.cat(rows), torch.cat([torch.arange(n) for n in lengths]),
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        torch.cat([torch.arange(n) >= len(p) for n, p in zip(lengths, prompts, strict=True)]),
        torch.zeros(sum(lengths), 0, H), torch.cat(last), logits.argmax(-1), logits.logsumexp(-1),
    )  # fmt: skip
    return prompts, answers, batch


def parts_of(target):
    norm = target.norm.weight.detach()
    return TargetParts(
        target.embed.weight.detach(), target.lm_head.weight.detach(), norm, target.config, target.rope(), {V - 1}
    )


def fresh(target, batch, **keys):
    recipe, counts = RecipeConfig(), torch.ones(V, dtype=torch.long)
    recipe.head = HeadSection(type="eagle", draft_vocab="full", **{"unroll": 1} | keys)
    recipe.train.feature_weight = 10.0
    return new_head(recipe, parts_of(target), counts, counts, batch)


def test_the_closed_form_start_is_least_squares_from_what_fc_reads_to_the_next_state(target, answered):
    batch = answered[2]
    head, plain = fresh(target, batch), fresh(target, batch, start="random")
    slots = [p for a, b in pairwise(batch.cu_R1.tolist()) for p in range(a, b - 2)]
    read = torch.stack([torch.cat([target.embed.weight[batch.ids_N[p + 1]], batch.last_NT[p]]) for p in slots])
    true = torch.stack([batch.last_NT[p + 1] for p in slots])
    best = torch.linalg.lstsq(read, true).solution
    scale = torch.cat([torch.ones(H), head.feature_scale])
    error = [(read @ w - true).square().mean() for w in (best, (head.fc.weight * scale).T)]
    assert error[0] <= error[1] < error[0] + 0.05 * true.square().mean()
    losses = [h.eval()(batch).loss.item() for h in (head, plain)]
    assert losses[0] < 0.9 * losses[1]


def test_training_by_the_trainer_lowers_the_loss_and_writes_a_head(target, answered, tmp_path, monkeypatch):
    from headtrain.training import trainer

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")  # so that what the trainer sets is taken back after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(trainer, "load_parts", lambda _: parts_of(target))
    monkeypatch.setattr(trainer, "leave", lambda: None)
    write_run(tmp_path, *answered)
    config = RecipeConfig()
    config.head = HeadSection(type="eagle", draft_vocab="full", unroll=2, start="random")
    config.target.device, config.eval.k = "cpu", [3]
    t = config.train
    t.steps, t.lr, t.precision, t.batch_tokens, t.log_every, t.threads, t.noise = 12, 5e-3, "fp32", 256, 1, 1, 0.1
    t.feature_weight = 10.0
    trainer.train(config, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "training" / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 12 and losses[-1] < 0.9 * losses[0]
    assert load_head(tmp_path / "head").config.type == "eagle"


def write_run(run, prompts, answers, batch):
    """responses/ and captures/ of the answers, without taps."""
    flat = {
        "ids": batch.ids_N.int(), "supervised": batch.supervised_N, "taps": batch.taps_NAT, "last": batch.last_NT,
        "argmax": batch.argmax_N.int(), "logsumexp": batch.logsumexp_N,
    }  # fmt: skip
    infos = [
        store.RowInfo(f"row-{n}", "train" if n < 4 else "valid", "toy", len(p) + len(a), "length", len(p), len(a))
        for n, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]
    facts = {"norm": "post_norm", "taps": [], "hidden": H, "dtype": "float32"}
    responses = {name: flat[name] for name in ("ids", "supervised")}
    store.write_unit(run / "responses", "responses", 0, infos, responses, on_policy=True)
    store.write_unit(run / "captures", "captures", 0, infos, flat, **facts)
    for kind in ("responses", "captures"):
        store.write_index(run / kind, kind, 1)


@pytest.mark.parametrize("shape", [TreeShape(), TreeShape.parse("3x8")])
def test_decoding_with_the_head_gives_the_targets_own_text_and_accepts_what_draft_all_says(target, answered, shape):
    prompts, answers, batch = answered
    head = fresh(target, batch, unroll=2).eval()
    rows = decode(target, HeadDrafter(head, Sampling(), shape), prompts, k=3, max_new_tokens=30)
    assert [row.ids for row in rows] == answers
    accepted = sum(step.accepted for row in rows for step in row.steps)
    assert accepted > 0
    if shape.width == 1:
        from headtrain.heads.simulate import accepted_chain

        drafts = head.draft_all(batch, 3)
        assert sum(accepted_chain(drafts, batch.argmax_N, batch.supervised_N, batch.cu_R1, 3)) == accepted


def test_the_features_are_the_states_after_the_final_norm(target, answered):
    """As engines feed them (case 52): states before the norm, or normed twice, are other features and other drafts."""
    batch = answered[2]
    head = fresh(target, batch).eval()
    right = head.draft_all(batch, 2)
    for b, e in pairwise(batch.cu_R1.tolist()):
        before = target.forward(batch.ids_N[b:e][None], taps=(3,)).taps_BLAH[0, :-1, 0]
        assert torch.allclose(target.norm(before), batch.last_NT[b : e - 1], atol=1e-5)
    wrong = copy.copy(batch)
    wrong.last_NT = target.norm(batch.last_NT).detach()
    assert not torch.equal(head.draft_all(wrong, 2), right)


def test_a_saved_head_is_a_start_with_the_same_drafts(target, answered, tmp_path):
    batch = answered[2]
    parent = fresh(target, batch)
    save_head(parent, tmp_path)
    child = fresh(target, batch, init_from=str(tmp_path), unroll=3)
    assert child.config.unroll == 3 and child.logit_scale == 1
    assert torch.equal(child.draft_all(batch, 3), parent.draft_all(batch, 3))
