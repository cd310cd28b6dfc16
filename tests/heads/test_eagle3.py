"""EAGLE-3 against an obvious reference: dense attention, full logits, autograd, one document at a time."""

import copy
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from headtrain.config import TrainConfig
from headtrain.heads import unrolled
from headtrain.heads.base import Batch, HeadConfig, load_head, save_head
from headtrain.heads.eagle3 import Eagle3Head
from headtrain.heads.vocab import mapping, trained_pairs

V, T, DEPTHS = 50, 24, 4


def make_head(draft_vocab=20, **options):
    torch.manual_seed(0)
    config = HeadConfig(
        hidden_size=T, target_hidden_size=T, intermediate_size=40, num_attention_heads=6, num_key_value_heads=2,
        head_dim=8, vocab_size=V, draft_vocab_size=draft_vocab, taps=[1, 2, 4], unroll=DEPTHS,
        target_layers=7, **options,
    )  # fmt: skip
    head = Eagle3Head(config)
    for p in head.parameters():
        if p.dim() == 1:
            p.data += 0.1 * torch.randn_like(p)
    selected = torch.randperm(V)[:draft_vocab].sort().values
    head.d2t, head.t2d = mapping(selected, V)
    head.attach(torch.randn(V, T), torch.randn(V, T))
    return head


def make_batch(lengths=(13, 9, 17), prompts=(4, 2, 6), seed=1):
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    supervised = torch.cat([torch.arange(t) >= p for t, p in zip(lengths, prompts, strict=True)])
    supervised[sum(lengths[:2]) + 10] = False  # two spans in the last document
    last = torch.randn(n, T, generator=g)
    return Batch(
        ids_N=torch.randint(0, V, (n,), generator=g),
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


def rope(x, positions):
    frequencies = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    angle = positions[:, None] * frequencies
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :4], x[..., 4:]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def reference_logits(head, batch):
    """Per document and depth, the logits at slots 0 … length-2-depth: {(document, depth): [slots, V_draft]}."""
    layer, out = head.midlayer, {}
    embedding = head._lent["embedding"]
    for r, (a, b) in enumerate(zip(batch.cu_R1[:-1].tolist(), batch.cu_R1[1:].tolist(), strict=True)):
        features = F.linear(batch.taps_NAT[a:b].flatten(1), head.fc.weight)
        ids, length = batch.ids_N[a:b], b - a
        keys, values = [], []
        for d in range(head.config.unroll):
            slots = torch.arange(length - 1 - d)
            features = features[slots]
            e = norm(embedding[ids[slots + 1 + d]], layer.input_layernorm.weight)
            x = torch.cat([e, norm(features, layer.hidden_norm.weight)], -1)
            q, k, v = (F.linear(x, layer.self_attn[f"{n}_proj"].weight).unflatten(-1, (-1, 8)) for n in "qkv")
            q, k = rope(q, slots + d), rope(k, slots + d)
            keys.append(k.repeat_interleave(3, 1))
            values.append(v.repeat_interleave(3, 1))
            attended = []
            for p in slots.tolist():
                k_p = torch.cat([keys[0][: p + 1], *[keys[j][p : p + 1] for j in range(1, d + 1)]])
                v_p = torch.cat([values[0][: p + 1], *[values[j][p : p + 1] for j in range(1, d + 1)]])
                weights = torch.softmax(torch.einsum("hd,shd->hs", q[p], k_p) / 8**0.5, -1)
                attended.append(torch.einsum("hs,shd->hd", weights, v_p).flatten())
            residual = norm(features, layer.hidden_norm.weight) if head.config.norm_before_residual else features
            x = residual + F.linear(torch.stack(attended), layer.self_attn["o_proj"].weight)
            inner = norm(x, layer.post_attention_layernorm.weight)
            x = x + F.linear(
                F.silu(F.linear(inner, layer.mlp["gate_proj"].weight)) * F.linear(inner, layer.mlp["up_proj"].weight),
                layer.mlp["down_proj"].weight,
            )
            normed = norm(x, head.norm.weight)
            features = normed if head.config.norm_output else x
            out[r, d] = F.linear(normed, head.lm_head.weight)
    return out


def reference_loss(head, batch):
    logits, total = reference_logits(head, batch), 0.0
    trained, _ = trained_pairs(batch.supervised_N, batch.argmax_N, head.t2d_or_none, batch.cu_R1, head.config.unroll)
    teacher = torch.softmax(batch.last_NT @ head._lent["teacher"].T, -1)
    for (r, d), draft in logits.items():
        a = int(batch.cu_R1[r])
        for p in range(len(draft)):
            if trained[d, a + p]:
                ce = -(teacher[a + p + 1 + d] * torch.log_softmax(draft[p], -1)).sum()
                total = total + head.rules.decay**d * ce / trained[d].sum()
    return total


@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True, "norm_output": True}, {"draft_vocab": V}])
def test_fast_forward_equals_the_dense_reference_in_loss_and_every_gradient(options):
    fast, slow = make_head(**options), make_head(**options)
    batch = make_batch()
    loss = fast(batch).loss
    expected = reference_loss(slow, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for (name, p), q in zip(fast.named_parameters(), slow.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-5, rtol=1e-4), name


def test_drafting_step_by_step_gives_the_logits_of_the_training_forward():
    head, batch = make_head(), make_batch()
    logits = reference_logits(head, batch)
    a, b = 22, 39  # the last document
    ids, taps, last = batch.ids_N[a:b], batch.taps_NAT[a:b], batch.last_NT[a:b]
    state = head.start(2, 40)
    step = 5  # the first call feeds 5 slots, the second 3 more; row 1 lags behind by one and is padded
    for begin, end in ((0, step), (step, step + 3)):
        tokens = torch.stack([ids[begin + 1 : end + 1], ids[max(begin - 1, 0) + 1 :][: end - begin]])
        features = torch.stack([taps[begin:end], taps[max(begin - 1, 0) :][: end - begin]])
        counts = torch.tensor([end - begin, end - begin - (begin == 0)])
        draft, _ = head.extend(state, tokens, features, last[begin:end].expand(2, -1, -1), counts)
        for depth in range(DEPTHS):
            for row, slot in ((0, end - 1), (1, end - 2)):
                assert torch.allclose(draft[row], logits[2, depth][slot], atol=1e-5), (begin, depth, row)
            if depth + 1 < DEPTHS:
                draft = head.expand(state, torch.stack([ids[end + 1 + depth], ids[end + depth]])[:, None])[0][:, 0]


def test_draft_all_equals_drafting_from_each_slot_alone():
    head, batch = make_head(), make_batch()
    drafts = head.draft_all(batch, 3)
    a = 0
    for slot in range(3, 11):
        state = head.start(1, 40)
        logits, _ = head.extend(
            state,
            batch.ids_N[a + 1 : slot + 2][None],
            batch.taps_NAT[a : slot + 1][None],
            None,
            torch.tensor([slot + 1]),
        )
        for depth in range(3):
            token = head.to_target_ids(logits.argmax(-1))
            assert int(drafts[slot, depth]) == int(token)
            logits = head.expand(state, token[:, None])[0][:, 0]


def test_no_logit_depends_on_a_later_token_or_on_another_document():
    head, batch = make_head(), make_batch()
    changed = copy.deepcopy(batch)
    cut = 22 + 9  # in the last document: everything from here on, and all of the first document, is different
    for x in (changed.ids_N, changed.taps_NAT):
        x[cut:] = x[cut:].flip(0)
        x[:13] = x[:13].flip(0)
    seen = {}
    for key, b in (("before", batch), ("after", changed)):
        seen[key] = head.draft_all(b, 3)
    slots = slice(22 + 5, cut - 1)  # slot p reads tokens up to p+1
    assert (seen["before"][slots] >= 0).all()
    assert torch.equal(seen["before"][slots], seen["after"][slots])
    assert not torch.equal(seen["before"][cut:37], seen["after"][cut:37])  # the probe does reach what may differ


def test_a_batch_without_supervised_tokens_gives_zero_loss_and_finite_zero_gradients():
    head, batch = make_head(), make_batch()
    batch.supervised_N[:] = False
    out = head(batch)
    out.loss.backward()
    assert out.loss.item() == 0.0 and all(p.grad.abs().sum() == 0 for p in head.parameters() if p.requires_grad)


def test_micro_batches_add_up_to_the_whole_batch():
    whole, parts = make_head(), make_head()
    batch = make_batch()
    whole(batch).loss.backward()
    count = whole(batch).count_D
    for a, b in ((0, 22), (22, 39)):
        piece = Batch(
            **{
                name: getattr(batch, name)[a:b]
                for name in ("ids_N", "positions_N", "supervised_N", "taps_NAT", "last_NT", "argmax_N", "logsumexp_N")
            },
            cu_R1=batch.cu_R1[(batch.cu_R1 >= a) & (batch.cu_R1 <= b)] - a,
            count_D=count,
            parts=2,
        )
        (parts(piece).loss / 2).backward()  # what DeepSpeed does with accumulation
    for (name, p), q in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-5, rtol=1e-4), name


def test_feature_sizes_change_no_output_and_are_folded_into_the_saved_fc(tmp_path):
    head, batch = make_head(), make_batch()
    before = head.draft_all(batch, 3)
    loss = head(batch).loss.item()
    head.scale_features(torch.rand(3, T) * 100 + 0.01)
    assert head(batch).loss.item() == pytest.approx(loss, rel=1e-5)
    assert torch.equal(head.draft_all(batch, 3), before)
    save_head(head, tmp_path)
    again = load_head(tmp_path, head._lent["embedding"])
    assert torch.equal(again.draft_all(batch, 3), before)
    assert bool((again.feature_scale == 1).all())


def test_a_saved_head_loads_bit_equal_and_a_damaged_folder_is_refused_by_tensor_name(tmp_path):
    from safetensors.torch import load_file, save_file

    head = make_head(norm_output=True)
    save_head(head, tmp_path)
    again = load_head(tmp_path, head._lent["embedding"])
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert again.config == head.config
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["extra"] = tensors.pop("fc.weight").T.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors.*extra is not a tensor.*fc\.weight is missing"):
        load_head(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text('{"headtrain": {"unheard_of": 1}}')
    with pytest.raises(ValueError, match=r"config\.json: its headtrain section does not fit.*unheard_of"):
        load_head(tmp_path)


def kept_pairs(head, batch, seed):
    """(slots of every depth, weight of each depth's pairs) that position_keep chooses after this seed."""
    torch.manual_seed(seed)
    reach = trained_pairs(batch.supervised_N, batch.argmax_N, head.t2d_or_none, batch.cu_R1, DEPTHS)[1][0]
    layout = unrolled._training_layout(unrolled._segments(batch, reach), head.rules.position_keep)
    return [[p for s in layout(d) for p in range(s.first, s.stop)] for d in range(DEPTHS)]


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_dropped_positions_leave_the_exact_loss_of_the_kept_ones_weighted_up(monkeypatch, keep):
    monkeypatch.setattr(unrolled, "BLOCK", 2)
    head, slow = make_head(), make_head()
    head.rules.position_keep = keep
    batch = make_batch()
    kept = kept_pairs(head, batch, 5)
    assert all(set(b) < set(a) for a, b in pairwise(kept))  # chains stay whole
    torch.manual_seed(5)
    out = head(batch)
    logits, expected = reference_logits(slow, batch), 0.0
    trained, _ = trained_pairs(batch.supervised_N, batch.argmax_N, slow.t2d_or_none, batch.cu_R1, DEPTHS)
    teacher = torch.softmax(batch.last_NT @ slow._lent["teacher"].T, -1)
    count = torch.zeros(DEPTHS)
    for (r, d), draft in logits.items():
        a, b = batch.cu_R1[r : r + 2].tolist()
        for p in (p for p in kept[d] if a <= p < b and trained[d, p]):
            ce = -(teacher[p + 1 + d] * torch.log_softmax(draft[p - a], -1)).sum()
            expected = expected + (0.8 / keep) ** d * ce / trained[d].sum()
            count[d] += 1
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(out.count_D, count)
    out.loss.backward()
    expected.backward()
    for (name, p), q in zip(head.named_parameters(), slow.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-5, rtol=1e-4), name


def test_so_many_positions_go_on_as_position_keep_says_and_none_is_preferred():
    torch.manual_seed(0)
    span, rounds = [unrolled.Segment(0, 100, 1100)], 400
    alive = torch.zeros(4, 1100)
    for _ in range(rounds):
        layout = unrolled._training_layout(span, 0.7)
        for d in range(4):
            for s in layout(d):
                alive[d, s.first : s.stop] += 1
    share = alive[:, 100:1096] / rounds
    assert torch.allclose(share.mean(1), 0.7 ** torch.arange(4), atol=0.02)
    assert (share - share.mean(1, keepdim=True)).abs().max() < 0.12  # five standard deviations


def test_noise_disturbs_training_but_neither_drafting_nor_a_resting_head():
    head, batch = make_head(), make_batch()
    clean, drafts = head(batch).loss.item(), head.draft_all(batch, 3)
    head.rules.noise = 0.5
    assert head(batch).loss.item() != pytest.approx(clean, rel=1e-4)
    assert torch.equal(head.draft_all(batch, 3), drafts)
    assert head.eval()(batch).loss.item() == clean


def test_feature_weight_adds_the_distance_to_the_targets_hidden_state():
    head, batch = make_head(), make_batch()
    plain = head(batch).loss.item()
    head.rules.feature_weight, head.rules.decay = 2.0, 0.8
    trained, _ = trained_pairs(batch.supervised_N, batch.argmax_N, head.t2d_or_none, batch.cu_R1, DEPTHS)
    features = head._features(batch.taps_NAT)
    reach = trained_pairs(batch.supervised_N, batch.argmax_N, None, batch.cu_R1, DEPTHS)[1]
    read = head._read(batch.ids_N, head._projections())
    expected = 0.0
    layout = unrolled._training_layout(unrolled._segments(batch, reach[0]), 1.0)
    for d, (slots, normed) in enumerate(
        head._unroll(batch, features, layout, DEPTHS, lambda d, slots, _: read[(slots + 1 + d).clamp(max=38)])
    ):
        chosen = trained[d][slots]
        distance = F.smooth_l1_loss(normed[chosen], batch.last_NT[slots[chosen] + 1 + d])
        expected += 2.0 * 0.8**d * distance.item()
    assert head(batch).loss.item() - plain == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("keep", [1.0, 0.7])
def test_depths_that_are_computed_again_give_the_same_gradients_from_less_memory(keep):
    found = []
    for checkpointing in (False, True):
        head, held = make_head(), [0]
        head.rules = TrainConfig(checkpointing=checkpointing, position_keep=keep, noise=0.1)
        torch.manual_seed(5)

        def count(tensor, held=held):
            held[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = head(make_batch()).loss
        loss.backward()
        found.append((loss, [p.grad for p in head.parameters()], held[0]))
    (loss, gradients, held), (again, same, less) = found
    assert torch.equal(loss, again) and all(map(torch.equal, gradients, same))
    assert less < 0.4 * held  # not counted: the inputs of each depth, which are kept too
