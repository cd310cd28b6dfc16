"""P-EAGLE against what an engine does: for one slot, one causal pass over its text and the mask rows, nothing else."""

import copy

import pytest
import torch
from torch.nn import functional as F

from headtrain.config import HeadSection, TrainConfig
from headtrain.heads import peagle, unrolled
from headtrain.heads.base import Batch, load_head, save_head
from headtrain.heads.peagle import PEagleConfig, PEagleHead
from headtrain.heads.vocab import mapping, trained_pairs

V, T, DEPTHS, MASK = 50, 24, 4, 49


def make_head(draft_vocab=20, **options):
    torch.manual_seed(0)
    config = PEagleConfig(
        type="peagle", hidden_size=T, target_hidden_size=T, intermediate_size=40, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, vocab_size=V, draft_vocab_size=draft_vocab, taps=[1, 2, 4], unroll=DEPTHS,
        target_layers=7, mask_token=MASK, **({"layers": 3} | options),
    )  # fmt: skip
    head = PEagleHead(config)
    for name, p in head.named_parameters():
        if p.dim() == 1:
            p.data += 0.1 * torch.randn_like(p)
        elif "layers" in name or "midlayer" in name:
            p.data *= 2  # so that what attention and the MLP add counts
    head.d2t, head.t2d = mapping(torch.randperm(V)[:draft_vocab].sort().values, V)
    head.attach(torch.randn(V, T), torch.randn(V, T))
    return head


def make_batch(lengths=(13, 9, 17), prompts=(4, 2, 6), seed=1):
    g, n = torch.Generator().manual_seed(seed), sum(lengths)
    supervised = torch.cat([torch.arange(t) >= p for t, p in zip(lengths, prompts, strict=True)])
    supervised[sum(lengths[:2]) + 10] = False  # two spans in the last document
    last = torch.randn(n, T, generator=g)
    return Batch(
        ids_N=torch.randint(0, V - 1, (n,), generator=g),
        positions_N=torch.cat([torch.arange(t) for t in lengths]),
        cu_R1=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        supervised_N=supervised,
        taps_NAT=torch.randn(n, 3, T, generator=g),
        last_NT=last,
        argmax_N=torch.randint(0, V, (n,), generator=g),
        logsumexp_N=torch.zeros(n),
    )


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rope(x):
    angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :4], x[..., 4:]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def engine_pass(head, ids, taps, slot, depths):
    """Logits [depths, W]: rows of slots 0 … slot, then depths-1 mask rows, consecutive positions, one causal pass.

    ids, taps: of one document.
    """
    weight = dict(head.named_parameters())
    table = weight.get("embed_tokens.weight", head._lent["embedding"])
    tokens = torch.cat([ids[1 : slot + 2], torch.full((depths - 1,), MASK)])
    fused = torch.cat([taps[: slot + 1].flatten(1), weight["mask_hidden"].expand(depths - 1, -1)])
    hidden = F.linear(fused, weight["fc.weight"])
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    for number in range(head.config.layers):
        prefix = f"layers.{number}." if number else "midlayer."
        here = {name.removeprefix(prefix).removesuffix(".weight"): w for name, w in weight.items()}
        if number:
            x = norm(hidden, here["input_layernorm"])
        else:
            normed = norm(hidden, here["hidden_norm"])
            x = torch.cat([norm(table[tokens], here["input_layernorm"]), normed], -1)
            hidden = normed if head.config.norm_before_residual else hidden
        q, k, v = (F.linear(x, here[f"self_attn.{n}_proj"]).unflatten(-1, (-1, 8)) for n in "qkv")
        k, v = rope(k).repeat_interleave(3, 1), v.repeat_interleave(3, 1)
        scores = torch.einsum("qhd,khd->hqk", rope(q), k) / 8**0.5
        p = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", p, v).flatten(1)
        hidden = hidden + F.linear(attended, here["self_attn.o_proj"])
        x = norm(hidden, here["post_attention_layernorm"])
        gate, up = (F.linear(x, here[f"mlp.{n}_proj"]) for n in ("gate", "up"))
        hidden = hidden + F.linear(F.silu(gate) * up, here["mlp.down_proj"])
    return F.linear(norm(hidden[slot:], weight["norm.weight"]), weight["lm_head.weight"])


def engine_loss(head, batch, kept=None):
    """(loss, pairs per depth): every trained pair from a pass of its own; kept: slots per depth, else all."""
    trained, _ = trained_pairs(batch.supervised_N, batch.argmax_N, head.t2d_or_none, batch.cu_R1, DEPTHS)
    teacher = torch.softmax(batch.last_NT @ head._lent["teacher"].T, -1)
    total, count, keep = 0.0, torch.zeros(DEPTHS), head.rules.position_keep
    for a, b in zip(batch.cu_R1[:-1].tolist(), batch.cu_R1[1:].tolist(), strict=True):
        for p in range(a, b):
            depths = [d for d in range(DEPTHS) if trained[d, p] and (kept is None or p in kept[d])]
            if depths:
                draft = engine_pass(head, batch.ids_N[a:b], batch.taps_NAT[a:b], p - a, DEPTHS).log_softmax(-1)
            for d in depths:
                ce = -(teacher[p + 1 + d] * draft[d]).sum()
                total = total + (head.rules.decay / keep) ** d * ce / trained[d].sum()
                count[d] += 1
    return total, count


def same_gradients(fast, slow):
    for (name, p), q in zip(fast.named_parameters(), slow.parameters(), strict=True):
        assert p.grad is not None and torch.allclose(p.grad, q.grad, atol=2e-5, rtol=1e-4), name


OPTIONS = [
    {}, {"draft_vocab": V, "own_embedding": True}, {"norm_before_residual": True, "layers": 1}, {"layers": 2},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_the_training_forward_has_the_loss_and_gradients_of_an_engines_pass_for_each_slot(options):
    fast, slow, batch = make_head(**options), make_head(**options), make_batch()
    out, (expected, count) = fast(batch), engine_loss(slow, batch)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(out.count_D, count)
    out.loss.backward()
    expected.backward()
    same_gradients(fast, slow)


@pytest.mark.parametrize("options", OPTIONS)
def test_drafting_gives_an_engines_logits_at_every_slot_and_depth_whatever_the_drafts_are(options):
    head, batch = make_head(**options), make_batch()
    ids, taps = batch.ids_N[22:], batch.taps_NAT[22:]
    state, depths = head.start(2, 20), DEPTHS + 3  # more than were trained
    for begin, end in ((0, 5), (5, 8), (8, 9)):  # row 1 lags behind by one, so the first call is padded
        behind = max(begin - 1, 0)
        tokens = torch.stack([ids[begin + 1 : end + 1], ids[behind + 1 :][: end - begin]])
        features = torch.stack([taps[begin:end], taps[behind:][: end - begin]])
        counts = torch.tensor([end - begin, end - begin - (begin == 0)])
        logits, hidden = head.extend(state, tokens, features, None, counts)
        expected = [engine_pass(head, ids, taps, slot, depths) for slot in (end - 1, end - 2)]
        for depth in range(depths):
            for row in (0, 1):
                assert torch.allclose(logits[row], expected[row][depth], atol=1e-5), (begin, depth, row)
                assert torch.allclose(head.lm_head(hidden[row]), logits[row], atol=1e-5)
            tokens = torch.randint(V, (2, 1))
            logits, hidden = (x[:, 0] for x in head.expand(state, tokens))


def test_a_node_of_a_tree_gets_the_logits_of_its_depth():
    head, batch = make_head(), make_batch()
    ids, taps = batch.ids_N[:13], batch.taps_NAT[:13]
    state = head.start(1, 12)
    head.extend(state, ids[None, 1:7], taps[None, :6], None, torch.tensor([6]))
    expected = engine_pass(head, ids, taps, 5, DEPTHS)
    parents, depth_of = [[-1, -1], [0, 1, -1], [2, 4]], [1, 1, 2, 2, 1, 3, 2]
    found = [head.expand(state, torch.zeros(1, len(p), dtype=torch.long), torch.tensor([p]))[0] for p in parents]
    assert torch.allclose(torch.cat(found, 1)[0], expected[depth_of], atol=1e-5)


def test_only_as_many_depths_are_drafted_as_were_used_and_a_deeper_step_finds_the_rest():
    head, batch = make_head(), make_batch()
    state = head.start(1, 13)
    for slot, used in ((0, 2), (1, 1), (2, DEPTHS), (3, 3)):
        ids, taps = batch.ids_N[None, slot + 1 : slot + 2], batch.taps_NAT[None, slot : slot + 1]
        found = [head.extend(state, ids, taps, None, torch.tensor([1]))[0]]
        assert state.ready == {0: DEPTHS, 1: 2, 2: 2, 3: DEPTHS}[slot]
        found += [head.expand(state, torch.tensor([[0]]))[0][:, 0] for _ in range(used - 1)]
        expected = engine_pass(head, batch.ids_N[:13], batch.taps_NAT[:13], slot, used)
        assert torch.allclose(torch.cat(found), expected, atol=1e-5)


def test_no_two_rows_of_a_request_write_to_the_same_slot_padding_included(monkeypatch):
    head, batch, seen = make_head(), make_batch(), []
    run = head._run
    monkeypatch.setattr(head, "_run", lambda *args: (seen.append(args[3]), run(*args))[1])
    ids, taps = batch.ids_N[None, 1:7].repeat(3, 1), batch.taps_NAT[None, :6].repeat(3, 1, 1, 1)
    head.extend(head.start(3, 6), ids, taps, None, torch.tensor([6, 1, 4]))
    for counted, slots in zip((6, 1, 4), seen[0].tolist(), strict=True):
        assert len(set(slots)) == 6 + DEPTHS - 1
        assert slots[:counted] == list(range(counted)) and slots[6:] == list(range(counted, counted + DEPTHS - 1))


def test_a_request_may_leave_between_two_steps():
    head, batch = make_head(), make_batch()
    ids = torch.stack([batch.ids_N[:13], batch.ids_N[22:35]])
    taps = torch.stack([batch.taps_NAT[:13], batch.taps_NAT[22:35]])
    state = head.start(2, 12)
    head.extend(state, ids[:, 1:5], taps[:, :4], None, torch.tensor([4, 4]))
    head.expand(state, torch.tensor([[1], [2]]))
    head.select(state, torch.tensor([1]))
    logits, _ = head.extend(state, ids[1:, 5:7], taps[1:, 4:6], None, torch.tensor([2]))
    assert torch.allclose(logits[0], engine_pass(head, ids[1], taps[1], 5, 1)[0], atol=1e-5)


@pytest.mark.parametrize("piece", [2048, 6])
def test_draft_all_is_the_greedy_chain_of_each_slots_own_pass(monkeypatch, piece):
    monkeypatch.setattr(peagle, "PIECE", piece)
    head, batch = make_head(), make_batch()
    drafts = head.draft_all(batch, 3)
    for slot in range(3, 11):
        chain = engine_pass(head, batch.ids_N[:13], batch.taps_NAT[:13], slot, 3).argmax(-1)
        assert drafts[slot].tolist() == head.to_target_ids(chain).tolist()
    assert (drafts[:3] == -1).all()


def test_no_draft_depends_on_a_later_token_or_on_another_document():
    head, batch = make_head(), make_batch()
    changed, cut = copy.deepcopy(batch), 22 + 9
    for x in (changed.ids_N, changed.taps_NAT):  # everything from here on, and all of the first document
        x[cut:] = x[cut:].flip(0)
        x[:13] = x[:13].flip(0)
    outputs = []
    for b in (batch, changed):
        layout = lambda depth: [peagle.Segment(22, 22 + 5, 37)]  # noqa: E731
        read = head._read(b.ids_N, head._projections())
        next_token = lambda depth, slots, _, read=read: read[(slots + 1).clamp(max=38)]  # noqa: E731
        steps = head._unroll(b, head._features(b.taps_NAT), layout, DEPTHS, next_token)
        outputs.append(torch.stack([output for _, output in steps], 1))
    seen = cut - 1 - (22 + 5)  # slot p reads tokens up to p+1
    assert torch.equal(outputs[0][:seen], outputs[1][:seen])
    assert not torch.isclose(outputs[0][seen:], outputs[1][seen:]).all(-1).any()  # the probe reaches what may differ


@pytest.mark.parametrize("keep", [1.0, 0.6])
def test_pieces_give_the_same_gradients_from_less_memory(monkeypatch, keep):
    monkeypatch.setattr(unrolled, "BLOCK", 2)
    found = []
    for piece in (2048, 7):
        monkeypatch.setattr(peagle, "PIECE", piece)
        head, held = make_head(), [0]
        head.rules = TrainConfig(position_keep=keep)
        torch.manual_seed(5)

        def count(tensor, held=held):
            held[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = head(make_batch()).loss
        loss.backward()
        found.append((loss, head, held[0]))
    (loss, whole, held), (again, pieces, less) = found
    assert torch.allclose(loss, again, rtol=1e-6)
    same_gradients(pieces, whole)
    assert less < 0.3 * held  # not counted: the keys and values of depth 0 and the hidden state of each layer


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_dropped_depths_leave_the_exact_loss_of_the_kept_ones_weighted_up(monkeypatch, keep):
    monkeypatch.setattr(unrolled, "BLOCK", 2)
    monkeypatch.setattr(peagle, "PIECE", 9)
    head, slow, batch = make_head(), make_head(), make_batch()
    head.rules = slow.rules = TrainConfig(position_keep=keep)
    reach = trained_pairs(batch.supervised_N, batch.argmax_N, None, batch.cu_R1, DEPTHS)[1][0]
    torch.manual_seed(5)
    layout = unrolled._training_layout(unrolled._segments(batch, reach), keep)
    kept = [{p for s in layout(d) for p in range(s.first, s.stop)} for d in range(DEPTHS)]
    torch.manual_seed(5)
    out, (expected, count) = head(batch), engine_loss(slow, batch, kept)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(out.count_D, count)
    out.loss.backward()
    expected.backward()
    same_gradients(head, slow)


def test_a_batch_without_supervised_tokens_gives_zero_loss_and_zero_gradients():
    head, batch = make_head(), make_batch()
    batch.supervised_N[:] = False
    out = head(batch)
    out.loss.backward()
    assert out.loss.item() == 0.0 and all(p.grad.abs().sum() == 0 for p in head.parameters())


@pytest.mark.parametrize("options", [{}, {"draft_vocab": V, "own_embedding": True}])
def test_a_saved_head_loads_bit_equal_under_the_names_that_vllm_reads(tmp_path, options):
    from safetensors.torch import load_file

    from headtrain.files import read_json

    head, batch = make_head(**options), make_batch()
    drafts = head.draft_all(batch, 3)
    head.scale_features(2.0 ** torch.randint(-8, 9, (3, T)))  # powers of two are exact
    assert torch.equal(head.draft_all(batch, 3), drafts)
    save_head(head, tmp_path)
    again = load_head(tmp_path, head._lent["embedding"])
    assert torch.equal(again.draft_all(batch, 3), drafts) and again.config == head.config
    tensors, config = load_file(tmp_path / "model.safetensors"), read_json(tmp_path / "config.json")
    for name, tensor in again.portable_tensors().items():
        assert torch.equal(tensor, tensors[name]), name
    assert tensors["mask_hidden"].shape == (1, 3 * T)
    names = {"layers.1.input_layernorm.weight", "layers.2.self_attn.q_proj.weight", "midlayer.hidden_norm.weight"}
    assert names < tensors.keys() and ("embed_tokens.weight" in tensors) is bool(options)
    assert (config["num_hidden_layers"], config["ptd_token_id"]) == (3, MASK)


def test_what_a_warm_start_cannot_give_is_refused():
    with pytest.raises(ValueError, match=r"head\.train_embedding=true: the parent .* has no embedding of its own"):
        make_head().train_as(HeadSection(type="peagle", train_embedding=True))
    head = make_head(own_embedding=True)
    head.train_as(HeadSection(type="peagle", unroll=6))
    assert head.config.unroll == 6 and not head.embed_tokens.weight.requires_grad


def test_the_plan_counts_what_is_built_and_knows_the_size_of_a_piece():
    from headtrain import configload, plan

    config = configload.load("peagle_smollm2", ["head.layers=3", "head.train_embedding=true"])
    s = config.target.shape
    built = PEagleHead(PEagleConfig(
        hidden_size=s.hidden, target_hidden_size=s.hidden, intermediate_size=s.intermediate,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim, vocab_size=s.vocab,
        draft_vocab_size=8192, taps=[1, 2, 3], layers=3, own_embedding=True,
    ))  # fmt: skip
    assert plan.model_of(config).head == sum(p.numel() for p in built.parameters())
    assert plan.PIECE == peagle.PIECE
