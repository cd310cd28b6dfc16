"""Medusa against an obvious reference: one slot at a time, full logits, autograd; and trees made of its accuracies."""

import copy
from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from headtrain.config import ConfigError, RecipeConfig
from headtrain.configcheck import validate
from headtrain.configload import load
from headtrain.data_gen import store
from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters import Drafting, make_drafter
from headtrain.eval.decoder.drafters.base import News
from headtrain.eval.decoder.drafters.shape import TreeShape, static_tree
from headtrain.eval.decoder.sampling import Sampling
from headtrain.heads.base import Batch, head_class, load_head, new_head, save_head
from headtrain.heads.medusa import MedusaConfig, MedusaHead
from headtrain.heads.simulate import rank_hits
from headtrain.heads.vocab import mapping
from headtrain.plan import model_of
from headtrain.target import Target, TargetParts

V, T, DEPTHS, EOS = 50, 24, 4, 5
BOTH = pytest.mark.parametrize("shared", [False, True])


def make_head(shared=False, draft_vocab=20, blocks=2, **options):
    torch.manual_seed(0)
    head = MedusaHead(MedusaConfig(
        hidden_size=T, target_hidden_size=T, vocab_size=V, draft_vocab_size=draft_vocab, unroll=DEPTHS,
        target_layers=3, blocks=blocks, share_lm_head=shared, **options,
    ))  # fmt: skip
    for p in head.parameters():
        torch.nn.init.normal_(p, std=0.3)
    head.d2t, head.t2d = mapping(torch.randperm(V)[:draft_vocab].sort().values, V)
    head.attach(torch.randn(V, T), torch.randn(V, T))
    return head


def make_batch(lengths=(13, 9, 17), prompts=(4, 2, 6), seed=1):
    g, n = torch.Generator().manual_seed(seed), sum(lengths)
    supervised = torch.cat([torch.arange(t) >= p for t, p in zip(lengths, prompts, strict=True)])
    supervised[sum(lengths[:2]) + 10] = False  # two spans in the last document
    return Batch(
        ids_N=torch.randint(0, V, (n,), generator=g),
        positions_N=torch.cat([torch.arange(t) for t in lengths]),
        cu_R1=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        supervised_N=supervised,
        taps_NAT=torch.zeros(n, 0, T),
        last_NT=torch.randn(n, T, generator=g),
        argmax_N=torch.randint(0, V, (n,), generator=g),
        logsumexp_N=torch.full((n,), 6.0),
    )


def reference_logits(head, last_T, depth):
    """Of one slot and depth, by the names of the tensors that are saved."""
    tensors, x = head.state_dict(keep_vars=True), last_T
    for j in range(head.config.blocks):
        z = tensors[f"blocks.{depth}.layers.{j}.weight"] @ x + tensors[f"blocks.{depth}.layers.{j}.bias"]
        x = x + z * torch.sigmoid(z)
    return tensors[f"lm_heads.{0 if head.config.share_lm_head else depth}.weight"] @ x


def reference_pairs(head, batch):
    """(depth, slot, label's position) of the trained pairs, slot by slot."""
    for a, b in zip(batch.cu_R1[:-1].tolist(), batch.cu_R1[1:].tolist(), strict=True):
        for depth, slot in product(range(DEPTHS), range(a, b)):
            label = slot + 2 + depth
            if label < b and batch.supervised_N[slot + 1 : label + 1].all() and head.t2d[batch.argmax_N[label - 1]]:
                yield depth, slot, label


def reference_loss(head, batch):
    count = Counter(depth for depth, _, _ in reference_pairs(head, batch))
    total, teacher_VT = 0.0, head._lent["teacher"]
    for depth, slot, label in reference_pairs(head, batch):
        p = torch.softmax(teacher_VT @ batch.last_NT[label - 1], -1)
        ce = -(p * torch.log_softmax(reference_logits(head, batch.last_NT[slot], depth), -1)).sum()
        total = total + head.rules.decay**depth * ce / count[depth]
    return total, [count[depth] for depth in range(DEPTHS)]


# ------------------------------------------------------------------------------------------------- training

@BOTH
@pytest.mark.parametrize("draft_vocab", [20, V])
def test_the_forward_equals_the_slot_by_slot_reference_in_loss_and_every_gradient(shared, draft_vocab):
    fast, slow, batch = make_head(shared, draft_vocab), make_head(shared, draft_vocab), make_batch()
    out = fast(batch)
    expected, count = reference_loss(slow, batch)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert out.count_D.tolist() == count and min(count) > 0
    out.loss.backward()
    expected.backward()
    for (name, p), q in zip(fast.named_parameters(), slow.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-5, rtol=1e-4) and q.grad.abs().sum() > 0, name


def test_the_sums_per_depth_are_those_of_the_reference():
    head, batch = make_head(), make_batch()
    out = head(batch)
    for depth in range(DEPTHS):
        pairs = [(slot, label) for d, slot, label in reference_pairs(head, batch) if d == depth]
        said = [reference_logits(head, batch.last_NT[slot], depth).argmax() for slot, _ in pairs]
        right = head.to_target_ids(torch.stack(said)) == batch.argmax_N[[label - 1 for _, label in pairs]]
        assert out.correct_D[depth] == right.sum()
    assert out.loss.item() == pytest.approx(float((0.8 ** torch.arange(DEPTHS) * out.loss_D / out.count_D).sum()))


@BOTH
@pytest.mark.parametrize("supervised", [0, 3])  # 3: pairs at depths 0 and 1 alone
def test_depths_without_a_pair_get_zero_gradients_not_none(shared, supervised):
    head, batch = make_head(shared, V), make_batch()
    batch.supervised_N[:] = False
    batch.supervised_N[4 : 4 + supervised] = True
    out = head(batch)
    out.loss.backward()
    assert out.count_D.tolist() == [max(supervised - 1 - depth, 0) for depth in range(DEPTHS)]
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in head.parameters())
    assert head.blocks[3].layers[0].weight.grad.abs().sum() == 0
    assert (head.blocks[0].layers[0].weight.grad.abs().sum() > 0) == (supervised > 0)


def test_a_frozen_shared_lm_head_gets_no_gradient():
    head = make_head(shared=True, freeze_lm_head=True)
    head(make_batch()).loss.backward()
    assert head.lm_heads[0].weight.grad is None and head.blocks[0].layers[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("weights", ["decay", "dpace", "vat"])
@pytest.mark.parametrize("objective", ["soft_ce", "lk_alpha", "lk_hybrid", "tv"])
def test_every_objective_falls_along_its_own_gradient(objective, weights):
    head, batch = make_head(shared=True), make_batch()
    head.rules.objective, head.rules.weights = objective, weights
    before = head(batch)
    before.loss.backward()
    with torch.no_grad():
        for p in head.parameters():
            p -= 0.01 * p.grad
    assert float(head(batch).loss_D.sum()) < float(before.loss_D.sum())


# ------------------------------------------------------------------------------------------------- drafting

@BOTH
def test_drafting_step_by_step_gives_the_logits_of_training_at_the_same_slot_and_depth(shared):
    head, batch = make_head(shared), make_batch()
    state, counts = head.start(2, 40), torch.tensor([3, 2])
    for begin in (22, 25):
        last = torch.stack([batch.last_NT[begin : begin + 3], batch.last_NT[begin - 1 : begin + 2]])
        logits, hidden = head.extend(state, torch.zeros(2, 3, dtype=torch.long), None, last, counts)
        for depth in range(DEPTHS):
            for row, slot in ((0, begin + 2), (1, begin)):
                assert torch.allclose(logits[row], reference_logits(head, batch.last_NT[slot], depth), atol=1e-5)
            if depth + 1 < DEPTHS:
                logits, hidden = (x[:, 0] for x in head.expand(state, torch.randint(V, (2, 1))))
        assert hidden.shape == (2, T)


def test_a_node_of_a_tree_gets_the_logits_of_its_own_depth_in_each_row_and_a_row_may_leave():
    head = make_head()
    last = torch.randn(2, 1, T, generator=torch.Generator().manual_seed(3))
    state = head.start(2, 8)
    head.select(state, torch.tensor([1, 0]))
    head.extend(state, torch.zeros(2, 1, dtype=torch.long), None, last, torch.ones(2, dtype=torch.long))
    first, _ = head.expand(state, torch.zeros(2, 2, dtype=torch.long), torch.tensor([[-1, -1], [-1, -1]]))
    second, _ = head.expand(state, torch.zeros(2, 2, dtype=torch.long), torch.tensor([[0, -1], [-1, 1]]))
    third, _ = head.expand(state, torch.zeros(2, 1, dtype=torch.long), torch.tensor([[2], [2]]))
    for row, depths in enumerate(([1, 1, 2, 1, 3], [1, 1, 1, 2, 2])):
        for got, depth in zip(torch.cat([first, second, third], 1)[row], depths, strict=True):
            assert torch.allclose(got, reference_logits(head, last[row, 0], depth), atol=1e-5)


@BOTH
def test_draft_all_equals_drafting_from_each_slot_alone(shared):
    head, batch = make_head(shared), make_batch()
    drafts = head.draft_all(batch, DEPTHS)
    for slot in (*range(3, 11), *range(27, 30)):
        state = head.start(1, 40)
        token, last = batch.ids_N[slot + 1 : slot + 2][None], batch.last_NT[None, slot : slot + 1]
        logits, _ = head.extend(state, token, None, last, torch.tensor([1]))
        for depth in range(DEPTHS):
            token = head.to_target_ids(logits.argmax(-1))
            assert int(drafts[slot, depth]) == int(token)
            if depth + 1 < DEPTHS:
                logits = head.expand(state, token[:, None])[0][:, 0]
    assert (drafts[:3] == -1).all()  # slots that no response is drafted from


def test_no_draft_depends_on_a_later_state_or_on_another_document():
    head, batch = make_head(), make_batch()
    changed, cut = copy.deepcopy(batch), 22 + 9
    for x in (changed.ids_N, changed.last_NT):
        x[cut:] = x[cut:].flip(0)
        x[:13] = x[:13].flip(0)
    before, after = head.draft_all(batch, DEPTHS), head.draft_all(changed, DEPTHS)
    assert torch.equal(before[27:cut], after[27:cut]) and (before[27 : cut - 1] >= 0).all()
    assert not torch.equal(before[cut:37], after[cut:37])  # the probe does reach what may differ


def test_equal_logits_are_ranked_by_id_as_argmax_ranks_them():
    head, batch = make_head(draft_vocab=V), make_batch()
    for lm_head in head.lm_heads:
        lm_head.weight.data[:] = lm_head.weight[:1]
        lm_head.weight.data[V - 1] += 0.1
    with torch.no_grad():
        first = [head._at(batch.last_NT[5], depth)[0].argmax() for depth in range(DEPTHS)]
    assert head.ranked(batch, DEPTHS)[5, :, 0].tolist() == [int(token) for token in first]


def test_more_drafts_than_heads_are_refused():
    head = make_head(accuracy=[[0.5]] * DEPTHS)
    with pytest.raises(ValueError, match="k=5: this head drafts at most 4 tokens"):
        head.draft_all(make_batch(), 5)
    with pytest.raises(ValueError, match="k=5: the head drafts at most 4 tokens"):
        make_drafter("head", head).nodes(5)


# ------------------------------------------------------------------------------------------------- static trees

def test_how_often_each_rank_is_right_is_counted_over_supervised_pairs():
    head, batch = make_head(), make_batch()
    ranked = head.ranked(batch, DEPTHS)
    hits, pairs = rank_hits(ranked, batch)
    everything = copy.copy(head)
    everything.t2d = torch.ones(V, dtype=torch.bool)
    expected, count = torch.zeros_like(hits), torch.zeros(DEPTHS, dtype=torch.long)
    for depth, slot, label in reference_pairs(everything, batch):
        order = reference_logits(head, batch.last_NT[slot], depth).argsort(descending=True)[:10]
        count[depth] += 1
        expected[depth] += head.to_target_ids(order) == batch.argmax_N[label - 1]
    assert torch.equal(hits, expected) and torch.equal(pairs, count) and int(hits.sum()) > 5


ACCURACY = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.05], [0.3, 0.1, 0.1]]


def test_a_static_tree_is_the_best_of_all_trees_of_its_size():
    every = [path for d in (1, 2, 3) for path in product(range(3), repeat=d)]
    worth = {path: 1.0 for path in [()]}
    for path in every:
        worth[path] = worth[path[:-1]] * ACCURACY[len(path) - 1][path[-1]]
    for nodes in (1, 2, 3, 4):
        trees = (set(t) for t in combinations(every, nodes))
        best = max(sum(worth[p] for p in tree) for tree in trees if all(not p[:-1] or p[:-1] in tree for p in tree))
        assert sum(worth[p] for p in static_tree(ACCURACY, nodes)) == pytest.approx(best)
    assert static_tree(ACCURACY, 6) == [(0,), (0, 0), (1,), (0, 1), (2,), (1, 0)]  # 0.5, 0.2, 0.2, 0.15, 0.1, 0.08
    paths = static_tree(ACCURACY, 39)
    assert len(set(paths)) == 39 and all(not p[:-1] or p[:-1] in paths[:n] for n, p in enumerate(paths))
    assert static_tree([[0.0, 0.0]] * 2, 3) == [(0,), (0, 0), (0, 1)]


def test_the_drafted_tree_has_the_token_of_each_rank_at_its_node():
    head = make_head(accuracy=ACCURACY)
    drafter = make_drafter("head", head, drafting=Drafting(tree="static-6"))
    drafter.start([[1, 2], [3, 4]], 8)
    last = torch.randn(2, 1, T, generator=torch.Generator().manual_seed(3))
    for k in (3, 2, 1):
        drafter.observe(News(torch.tensor([[2], [4]]), torch.tensor([1, 1]), None, last, [[2], [4]]))
        tree, paths = drafter.propose(k), static_tree(ACCURACY[:k], 6)
        assert tree.counts.tolist() == [len(paths)] * 2 and max(map(len, paths)) <= k
        assert tree.depths().tolist() == [len(path) for path in paths]
        for node, path in enumerate(paths):
            assert int(tree.parents[node]) == (paths.index(path[:-1]) if path[:-1] else -1)
            for row in range(2):
                order = reference_logits(head, last[row, 0], len(path) - 1).argsort(descending=True)
                assert int(tree.tokens[row, node]) == int(head.to_target_ids(order[path[-1]]))


def test_a_static_tree_that_cannot_be_made_is_refused():
    assert TreeShape.parse("static-16") == TreeShape(nodes=16, static=True)
    with pytest.raises(ValueError, match="static-0"):
        TreeShape.parse("static-0")
    static = Drafting(tree="static-4")
    with pytest.raises(ValueError, match="the head has none: train with"):
        make_drafter("head", make_head(), drafting=static)
    with pytest.raises(ValueError, match="min_confidence"):
        make_drafter("head", make_head(accuracy=ACCURACY), drafting=Drafting(tree="static-4", min_confidence=0.1))
    other = head_class("eagle3")(head_class("eagle3").Config(
        hidden_size=8, target_hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1,
        head_dim=8, vocab_size=9, draft_vocab_size=9, taps=[1],
    ))  # fmt: skip
    with pytest.raises(ValueError, match="heads that draft by depth; this one is eagle3"):
        make_drafter("head", other, drafting=static)


# ------------------------------------------------------------------------------------------------- in the decoder

class Tokenizer:
    eos_token_id = EOS
    chat_template = "a template"


def make_target(vocab=V, **more):
    """(our Target, transformers' own of the same weights), three layers, as wide as the heads."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from headtrain.target import _register_attention

    _register_attention()
    config = AutoConfig.for_model(
        "llama", vocab_size=vocab, hidden_size=T, intermediate_size=32, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=128, initializer_range=0.3, eos_token_id=EOS,
        bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    ours = AutoModelForCausalLM.from_config(config, attn_implementation="headtrain").eval()
    theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    theirs.load_state_dict(ours.state_dict())
    return Target(ours, Tokenizer(), "tiny llama"), theirs


PROMPTS = [[7, 20, 33], [9, 8, 7, 6, 9, 8], [40], [12, 13, 14, 15, 16, 17, 18, 19]]


@pytest.mark.parametrize("name, drafting", [
    ("head", {}), ("head", {"tree": "static-8"}), ("head", {"tree": "3x8"}), ("head+ngram", {"tree": "static-8"}),
    ("head+ngram-tree", {"tree": "static-5"}),
])  # fmt: skip
@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_text_is_that_of_transformers(name, drafting, batch):
    target, theirs = make_target()
    head = make_head(draft_vocab=V, accuracy=ACCURACY).eval().requires_grad_(False)
    for depth, lm_head in enumerate(head.lm_heads):
        lm_head.weight.copy_(target.lm_head.weight.roll(depth, 0))
    drafter = make_drafter(name, head, drafting=Drafting(**drafting))
    answers = decode(target, drafter, PROMPTS, k=3, max_new_tokens=16, batch=batch)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = [
        theirs.generate(row, attention_mask=torch.ones_like(row), **options)[0, len(p) :].tolist()
        for p, row in ((p, torch.tensor([p])) for p in PROMPTS)
    ]
    assert [a.ids for a in answers] == expected
    assert max(step.nodes for a in answers for step in a.steps) > 2


@pytest.mark.parametrize("rule, exact", [("exact", True), ("typical", False)])
def test_sampled_texts_of_a_static_tree_follow_the_target_unless_the_rule_is_typical(rule, exact):
    """4000 requests of one prompt, against the exact probabilities of every two-token text."""
    target, theirs = make_target(vocab=8)
    for model in (target, theirs):
        model.lm_head.weight.data.mul_(0.3)
    target.model.generation_config.eos_token_id = target.tokenizer.eos_token_id = None
    head = MedusaHead(MedusaConfig(
        hidden_size=T, target_hidden_size=T, vocab_size=8, draft_vocab_size=8, unroll=2, accuracy=[[0.5, 0.3]] * 2,
    )).requires_grad_(False)  # fmt: skip
    for lm_head in head.lm_heads:
        lm_head.weight.copy_(target.lm_head.weight)
    drafter = make_drafter("head", head, Sampling(temperature=1.0), Drafting(tree="static-4"))
    n, prompt = 4000, [6, 7, 6]
    answers = decode(target, drafter, [prompt] * n, k=2, max_new_tokens=3, batch=2000, temperature=1.0, rule=rule)
    counts = torch.zeros(8, 8, 8)
    for answer in answers:
        counts[tuple(answer.ids)] += 1
    texts = torch.cartesian_prod(*[torch.arange(8)] * 2)
    p = theirs(torch.cat([torch.tensor(prompt).expand(64, -1), texts], 1)).logits.detach()[:, -3:].softmax(-1)
    expected = (p[:, 0].gather(1, texts[:, :1]) * p[:, 1].gather(1, texts[:, 1:]) * p[:, 2]).view(8, 8, 8) * n
    big = expected >= 5
    chi2, freedom = float(((counts - expected)[big] ** 2 / expected[big]).sum()), int(big.sum())
    assert freedom > 20 and (chi2 < freedom + 4 * (2 * freedom) ** 0.5) == exact
    assert sum(step.accepted for a in answers for step in a.steps) > 0.1 * n


# ------------------------------------------------------------------------------------------------- folder and training

@BOTH
@pytest.mark.parametrize("draft_vocab", [20, V])
def test_a_saved_head_loads_bit_equal_under_the_engines_names(tmp_path, shared, draft_vocab):
    from safetensors.torch import load_file

    head = make_head(shared, draft_vocab, accuracy=ACCURACY)
    save_head(head, tmp_path)
    again = load_head(tmp_path)
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert again.config == head.config and isinstance(again, MedusaHead)
    written = load_file(tmp_path / "model.safetensors")
    names = {f"blocks.{i}.layers.{j}.{kind}" for i in range(DEPTHS) for j in range(2) for kind in ("weight", "bias")}
    names |= {f"lm_heads.{i}.weight" for i in range(1 if shared else DEPTHS)}
    assert set(written) == (names if draft_vocab == V else names | {"token_map"})
    if draft_vocab < V:
        assert torch.equal(written["token_map"], head.t2d.nonzero()[:, 0])
    (tmp_path / "model.safetensors").unlink()
    from safetensors.torch import save_file

    written["extra"] = written.pop("blocks.0.layers.0.bias")
    save_file(written, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"blocks\.0\.layers\.0\.bias is missing; extra is not a tensor"):
        load_head(tmp_path)


def toy():
    """(target's parts, rows of captures): the next token is a permutation of the present one."""
    g = torch.Generator().manual_seed(11)
    embedding, lm_head = torch.randn(2, V, T, generator=g)
    lm_head, following = 4 * lm_head / lm_head.norm(dim=1, keepdim=True), torch.randperm(V, generator=g)
    about = SimpleNamespace(
        hidden_size=T, max_position_embeddings=128, num_hidden_layers=3, rms_norm_eps=1e-5, num_attention_heads=2
    )
    rows = []
    for n in range(30):
        ids = torch.randint(V, (3 + n % 4,), generator=g).tolist()
        prompt = len(ids)
        for _ in range(8 + n % 9):
            ids.append(int(following[ids[-1]]))
        ids = torch.tensor(ids, dtype=torch.int32)
        choice = following[ids.long()]
        rows.append({
            "ids": ids, "supervised": torch.arange(len(ids)) >= prompt, "taps": torch.zeros(len(ids), 0, T),
            "last": lm_head[choice], "argmax": choice.int(), "logsumexp": (lm_head[choice] @ lm_head.T).logsumexp(-1),
        })  # fmt: skip
    return TargetParts(embedding, lm_head, torch.ones(T), about, {"rope_theta": 1e4, "rope_type": "default"}, {1}), rows


@pytest.fixture
def run(tmp_path):
    """A run folder with the toy's captures, which hold no taps."""
    _, rows = toy()
    infos = []
    for n, row in enumerate(rows):
        split, tokens = "train" if n < 24 else "valid", len(row["ids"])
        infos.append(store.RowInfo(f"{n:03d}", split, "toy", tokens, "length", 3 + n % 4, 8 + n % 9))
    flat = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    responses = {name: flat[name] for name in ("ids", "supervised")}
    store.write_unit(tmp_path / "responses", "responses", 0, infos, responses, on_policy=True)
    facts = {"norm": "post_norm", "taps": [], "hidden": T, "dtype": "float32"}
    store.write_unit(tmp_path / "captures", "captures", 0, infos, flat, **facts)
    for kind in ("responses", "captures"):
        store.write_index(tmp_path / kind, kind, 1)
    return tmp_path


def recipe(**head):
    made = RecipeConfig()
    made.head.type, made.head.unroll, made.head.draft_vocab, made.target.device = "medusa", 3, "full", "cpu"
    made.head.start = "random"
    made.train.precision, made.train.threads, made.train.batch_tokens, made.train.lr = "fp32", 1, 64, 3e-2
    made.train.steps, made.train.log_every, made.eval.k = 80, 20, [3]
    for key, value in head.items():
        setattr(made.head, key, value)
    return made


@BOTH
def test_the_trainer_teaches_it_the_toy_and_writes_its_accuracies(run, shared, monkeypatch):
    import json

    from headtrain.training import trainer

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(trainer, "load_parts", lambda target: toy()[0])
    monkeypatch.setattr(trainer, "leave", lambda: None)
    trainer.train(recipe(share_lm_head=shared), run)
    log = [json.loads(line) for line in (run / "training" / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[-1] < losses[0]
    taus = [line["tau"] for line in log if "tau" in line]
    assert taus[0] == 1 and taus[-1] > 2
    head = load_head(run / "head")
    accuracy = head.config.accuracy
    assert len(accuracy) == 3 and all(len(row) == 10 and sum(row) <= 1.001 for row in accuracy)
    assert accuracy[0][0] > 0.8 and head.config.share_lm_head == shared


def test_a_random_start_says_at_every_depth_what_the_targets_lm_head_says():
    parts, _ = toy()
    counts = torch.ones(V, dtype=torch.long)
    head, batch = new_head(recipe(draft_vocab=20, start="random"), parts, counts, counts, make_batch()), make_batch()
    for depth in range(3):
        assert torch.equal(head._at(batch.last_NT, depth)[0], batch.last_NT @ parts.lm_head[head.t2d].T)


def test_the_calibrated_start_knows_whatever_of_later_states_is_linear_in_this_one():
    """States that a matrix carries from each position to the next: every depth gives the target's later logits."""
    parts, counts = toy()[0], torch.ones(V, dtype=torch.long)
    batch, carry = make_batch(lengths=(60, 70, 60)), torch.linalg.qr(torch.randn(T, T))[0]
    for p in range(1, len(batch.ids_N)):
        if batch.positions_N[p]:
            batch.last_NT[p] = carry @ batch.last_NT[p - 1]
    head = new_head(recipe(draft_vocab=20, start="calibrated"), parts, counts, counts, batch)
    for depth in range(3):
        expected = batch.last_NT[11 + depth] @ parts.lm_head[head.t2d].T
        gap = (head._at(batch.last_NT[10], depth)[0] - expected).abs().max()
        assert gap < 0.05 * expected.abs().max()


def test_a_parent_is_continued_and_a_rebuilt_vocabulary_moves_the_rows_of_every_lm_head(tmp_path):
    parts, _ = toy()
    parent, counts = make_head(), torch.zeros(V, dtype=torch.long)
    save_head(parent, tmp_path)
    start = {"init_from": str(tmp_path), "unroll": DEPTHS, "blocks": 2, "draft_vocab": 20}
    head = new_head(recipe(**start), parts, counts, counts, make_batch())
    batch = make_batch()
    assert torch.equal(head.draft_all(batch, DEPTHS), parent.draft_all(batch, DEPTHS))
    counts[5:25] = 1
    moved = new_head(recipe(**start, rebuild_vocab=True), parts, counts, counts, batch)
    new, old = moved.t2d.nonzero()[:, 0].tolist(), parent.t2d.nonzero()[:, 0].tolist()
    assert new != old
    for mine, theirs in zip(moved.lm_heads, parent.lm_heads, strict=True):
        for row, token in zip(mine.weight, new, strict=True):
            assert torch.equal(row, theirs.weight[old.index(token)] if token in old else parts.lm_head[token])
    assert F.mse_loss(moved(batch).loss, moved(batch).loss) == 0  # it runs
    for key, value in (("unroll", 3), ("blocks", 1), ("share_lm_head", True)):
        with pytest.raises(ValueError, match=rf"head\.{key}={value}: the parent .* has"):
            new_head(recipe(**start | {key: value}), parts, counts, counts, batch)


@pytest.mark.parametrize("option, said", [
    ("head.taps=[1,2]", r"head\.taps=.* heads of type medusa have no such setting"),
    ("head.intermediate=64", r"head\.intermediate=64: .* no such setting"),
    ("train.noise=0.1", r"train\.noise=0\.1: .* no such setting"),
    ("train.feature_weight=0.1", r"train\.feature_weight=0\.1: .* no such setting"),
    ("train.position_keep=0.5", r"train\.position_keep=0\.5: .* no such setting"),
    ("train.checkpointing=true", r"train\.checkpointing=True: .* no such setting"),
    ("train.weights=vat", r"train\.weights=vat: .* set head\.share_lm_head"),
    ("head.freeze_lm_head=true", r"head\.freeze_lm_head=true: .* set head\.share_lm_head"),
    ("eval.tree=static-", r"eval\.tree=static-: .* static-16"),
])  # fmt: skip
def test_settings_that_it_does_not_have_are_refused(option, said):
    with pytest.raises(ConfigError, match=said):
        validate(load("medusa_smollm2", [option]))


def test_only_medusa_has_its_settings():
    with pytest.raises(ConfigError, match=r"head\.blocks=2: heads of type eagle3 have no such setting \(only medusa\)"):
        validate(load("eagle3_smollm2", ["head.blocks=2"]))


@BOTH
def test_the_plan_counts_its_parameters(shared):
    config = load("medusa_smollm2", [f"head.share_lm_head={shared}", "head.blocks=2"])
    model, parts = model_of(config), toy()[0]
    head = MedusaHead.fresh(config.head, replace(parts, lm_head=torch.empty(49152, 576, device="meta")))
    assert model.head == sum(p.numel() for p in head.parameters()) and model.taps == 0
