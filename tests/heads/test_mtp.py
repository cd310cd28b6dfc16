"""MTP modules against an obvious reference: transformers' own layer over every slot's prefix, one slot at a time."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from headtrain.config import ConfigError, HeadSection, RecipeConfig, TargetConfig
from headtrain.configcheck import validate
from headtrain.heads import mtp as mtp_module
from headtrain.heads import unrolled
from headtrain.heads.base import Batch, load_head, save_head
from headtrain.heads.mtp import MtpHead
from headtrain.heads.mtp_checkpoint import find, locate_module
from headtrain.heads.vocab import mapping, trained_pairs
from headtrain.target import TargetError

V, H, DEPTHS = 20, 16, 3
FAMILIES = ("glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_text", "qwen2")
SCRATCH = ("deepseek", "qwen", "mimo")


@pytest.fixture(scope="session")
def native(mtp_targets, tmp_path_factory):
    """native(family) -> (head of that checkpoint, what transformers made of it, the target's parts)"""
    made = {}

    def get(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            theirs = mtp_targets.make(folder, family)
            parts = target_parts(folder, theirs)
            section = HeadSection(type="mtp", draft_vocab="full", unroll=DEPTHS)
            made[family] = MtpHead.fresh(section, parts), theirs, parts
        head, theirs, parts = made[family]
        head = copy.deepcopy(head)
        return ready(head, parts), theirs, parts

    return get


def target_parts(folder, theirs):
    model, config = theirs.model, copy.copy(theirs.model.config)
    config.num_hidden_layers -= 1
    embedding, lm_head = model.get_input_embeddings().weight, model.lm_head.weight
    norm = model.get_decoder().norm.weight
    return mtp_module.TargetParts(
        embedding.detach(), lm_head.detach(), norm.detach(), config, {}, {19}, TargetConfig(model=str(folder))
    )


def ready(head, parts, draft_vocab=V):
    selected = torch.randperm(V, generator=torch.Generator().manual_seed(2))[:draft_vocab].sort().values
    head.d2t, head.t2d = mapping(selected, V)
    head.start_from(parts, selected, None, None)
    head.attach(parts.embedding, parts.lm_head)
    return head.eval()


def scratch(dialect, draft_vocab=12):
    torch.manual_seed(0)
    text = SimpleNamespace(
        num_hidden_layers=4, hidden_size=H, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, rms_norm_eps=1e-5, max_position_embeddings=256,
    )  # fmt: skip
    norm = 0.5 + torch.rand(H)
    rope = {"rope_theta": 1e4, "rope_type": "default"}
    parts = mtp_module.TargetParts(torch.randn(V, H), torch.randn(V, H), norm, text, rope, {19})
    section = HeadSection(
        type="mtp", init_from="scratch", dialect=dialect, draft_vocab=draft_vocab, unroll=DEPTHS, start="random"
    )
    head = MtpHead.fresh(section, parts)
    for p in head.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return ready(head, parts, draft_vocab)


def make_batch(lengths=(9, 7, 12), prompts=(3, 2, 5), seed=1):
    g, n = torch.Generator().manual_seed(seed), sum(lengths)
    supervised = torch.cat([torch.arange(t) >= p for t, p in zip(lengths, prompts, strict=True)])
    supervised[sum(lengths[:2]) + 8] = False  # two spans in the last document
    return Batch(
        ids_N=torch.randint(0, V, (n,), generator=g),
        positions_N=torch.cat([torch.arange(t) for t in lengths]),
        cu_R1=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        supervised_N=supervised, taps_NAT=torch.zeros(n, 0, H), last_NT=torch.randn(n, H, generator=g),
        argmax_N=torch.randint(0, V, (n,), generator=g), logsumexp_N=torch.zeros(n),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the reference


def rms(x, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def reference(head, batch, layer, rotary, plus=0.0):
    """{(document, depth): logits [slots, draft vocab]}: x = fc [norm e; norm h], transformers' whole layer, norm.

    plus: what norms add to their weight (1 for Qwen3-Next). layer, rotary: by transformers' eager attention.
    """
    eps = head.config.rms_norm_eps
    weight = {n: getattr(head, n).weight for n in ("fc", "embed_norm", "hidden_norm", "norm")}
    embedding, lm_head = head._lent["embedding"], head._lent["teacher"]
    first_zero, swapped = head.config.dialect != "qwen", head.config.dialect == "mimo"
    out: dict = {}
    for r, (a, b) in enumerate(zip(batch.cu_R1[:-1].tolist(), batch.cu_R1[1:].tolist(), strict=True)):
        ids, last = batch.ids_N[a:b], batch.last_NT[a:b]
        if swapped:  # MiMo's module is given the state before the target's final norm
            last = last / head.final_norm
        for p in range(b - a - 1):
            features, tokens, positions = list(last[:p]), ids[1 : p + 1].tolist(), list(range(p))
            hidden = last[p]
            for d in range(DEPTHS):
                if p + 1 + d >= b - a:
                    break
                features.append(hidden)
                tokens.append(int(ids[p + 1 + d]))
                positions.append(p + d)
                e = rms(embedding[tokens], eps) * (weight["embed_norm"] + plus)
                if first_zero:
                    e = torch.cat([torch.zeros_like(e[:1]), e[1:]])
                h = rms(torch.stack(features), eps) * (weight["hidden_norm"] + plus)
                x = F.linear(torch.cat([h, e] if swapped else [e, h], -1), weight["fc"])[None]
                where = torch.tensor([positions])
                mask = torch.full((len(tokens), len(tokens)), -1e30).triu(1)[None, None]
                x = layer(x, position_embeddings=rotary(x, where), position_ids=where, attention_mask=mask)
                hidden = rms(x[0, -1], eps) * (weight["norm"] + plus)
                out.setdefault((r, d), []).append(lm_head @ hidden)
    return {key: torch.stack(value) for key, value in out.items()}


def own_layer(head):
    """The head's layer by transformers' own forward and attention."""
    layer = copy.deepcopy(head.layer)
    layer.self_attn.config._attn_implementation = "eager"
    return layer, copy.deepcopy(head._rotary[0])


def plus_of(family):
    return 1.0 if family.startswith("qwen3") else 0.0


def reference_loss(head, batch, logits):
    trained, _ = trained_pairs(batch.supervised_N, batch.argmax_N, head.t2d_or_none, batch.cu_R1, DEPTHS)
    teacher, total = torch.softmax(batch.last_NT @ head._lent["teacher"].T, -1), 0.0
    for (r, d), draft in logits.items():
        a = int(batch.cu_R1[r])
        for p in range(len(draft)):
            if trained[d, a + p]:
                ce = -(teacher[a + p + 1 + d] * torch.log_softmax(draft[p], -1)).sum()
                total = total + head.rules.decay**d * ce / trained[d].sum()
    return total


# ------------------------------------------------------------------------------------------------ the network


@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_read_from_a_checkpoint_drafts_the_logits_that_transformers_layer_gives(native, family):
    head, theirs, _ = native(family)
    batch = make_batch()
    decoder = theirs.model.get_decoder()
    model_layer = decoder.layers[2]
    for name in ("fc", "embed_norm", "hidden_norm", "norm"):
        assert torch.equal(getattr(head, name).weight, getattr(theirs, name))
    with torch.no_grad():
        logits = reference(head, batch, model_layer, decoder.rotary_emb, plus_of(family))
    a, b = 16, 28
    ids, last = batch.ids_N[a:b], batch.last_NT[a:b]
    state = head.start(2, 40)
    for begin, end in ((0, 4), (4, 8)):  # row 1 lags behind by one and is padded
        tokens = torch.stack([ids[begin + 1 : end + 1], ids[max(begin - 1, 0) + 1 :][: end - begin]])
        features = torch.stack([last[begin:end], last[max(begin - 1, 0) :][: end - begin]])
        draft, _ = head.extend(state, tokens, None, features, torch.tensor([end - begin, end - begin - (begin == 0)]))
        for depth in range(DEPTHS):
            for row, slot in ((0, end - 1), (1, end - 2)):
                assert torch.allclose(draft[row], logits[2, depth][slot], atol=1e-5), (begin, depth, row)
            if depth + 1 < DEPTHS:
                draft = head.expand(state, torch.stack([ids[end + 1 + depth], ids[end + depth]])[:, None])[0][:, 0]


def test_transformers_own_mtp_module_gives_the_same_hidden_states(native, monkeypatch):
    """GLM, read from the same checkpoint by transformers. It does not skip position 0, so here ours does not either."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    head, _, parts = native("glm4_moe")
    model = AutoModelForCausalLM.from_pretrained(parts.source.model, attn_implementation="eager")
    model.config.num_mtp_layers = 1
    monkeypatch.setattr(MtpModel, "get_mtp_weights_regex", staticmethod(lambda _: re.compile(r"model\.layers\.2\.")))
    other = MtpModel.from_pretrained(model).eval()
    monkeypatch.setattr(head, "_seen", lambda read, positions: read)
    ids, last = torch.randint(0, V, (1, 9)), torch.randn(1, 8, H)
    positions = torch.arange(8)[None]
    with torch.no_grad():
        embedded = other.embed_tokens(ids[:, 1:])
        mask = torch.full((8, 8), -1e30).triu(1)[None, None]
        hidden = other.layers[0](
            embedded, last, position_embeddings=other.rotary_emb(embedded, position_ids=positions + 1),
            attention_mask=mask, position_ids=positions + 1, cache=None,
        )  # fmt: skip
        state = head.start(1, 16)
        ours = [head.extend(state, ids[:, i + 1 : i + 2], None, last[:, i : i + 1], torch.ones(1).long())[1][0]
                for i in range(8)]  # fmt: skip
    assert torch.allclose(torch.stack(ours), hidden[0], atol=1e-5)


@pytest.mark.parametrize("name", [*FAMILIES, *SCRATCH])
def test_the_fast_forward_equals_the_slow_reference_in_loss_and_every_gradient(native, name):
    head = scratch(name) if name in SCRATCH else native(name)[0]
    batch, slow = make_batch(), copy.deepcopy(head)
    layer, rotary = own_layer(slow)
    expected = reference_loss(slow, batch, reference(slow, batch, layer, rotary, plus_of(name)))
    loss = head(batch).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    wanted = dict(slow.named_parameters()) | {f"layer.{n}": p for n, p in layer.named_parameters()}
    for key, p in head.named_parameters():
        assert torch.allclose(p.grad, wanted[key].grad, atol=2e-5, rtol=1e-3), key
        assert p.grad.abs().sum() > 0, key


@pytest.mark.parametrize("keep", [1.0, 0.7])
def test_depths_that_are_computed_again_give_the_same_gradients(keep, native):
    found = []
    for checkpointing in (False, True):
        head = native("deepseek_v3")[0]
        head.rules.checkpointing, head.rules.position_keep = checkpointing, keep
        torch.manual_seed(5)
        loss = head(make_batch()).loss
        loss.backward()
        found.append((loss, [p.grad for p in head.parameters()]))
    (loss, gradients), (again, same) = found
    assert torch.equal(loss, again) and all(map(torch.equal, gradients, same))


def test_which_token_position_and_label_each_depth_has_is_this_table():
    """One document, tokens 10 … 15, of which 12 … 15 are the target's; slot p may draft what lies in the answer."""
    head, seen, pairs = scratch("qwen", V), [], []
    batch = Batch(
        ids_N=torch.arange(10, 16), positions_N=torch.arange(6), cu_R1=torch.tensor([0, 6]),
        supervised_N=torch.arange(6) >= 2, taps_NAT=torch.zeros(6, 0, H), last_NT=torch.randn(6, H),
        argmax_N=torch.arange(1, 7), logsumexp_N=torch.zeros(6),
    )  # fmt: skip
    head._read = lambda ids, weights: ids[..., None].float().expand(*ids.shape, H)
    head._seen = lambda read, positions: seen.append((read[:, 0].int().tolist(), positions.tolist())) or read
    fused = unrolled.fused_loss

    def spy(objective, weights, scale, x, lm_head, found, teacher):
        pairs.append([x.tolist() for x in (found.depth_M, found.slot_M, found.label_M)])
        return fused(objective, weights, scale, x, lm_head, found, teacher)

    unrolled.fused_loss = spy
    try:
        out = head(batch)
    finally:
        unrolled.fused_loss = fused
    # tokens and positions of the slots: at depth 0 all (the last one reads nothing that counts), then slots 1, 2 and 1
    assert seen == [([11, 12, 13, 14, 15, 15], [0, 1, 2, 3, 4, 5]), ([13, 14], [2, 3]), ([14], [3])]
    # (depth, slot) is taught the choice at position slot + 1 + depth
    assert list(zip(*pairs[0], strict=True)) == [(0, 1, 3), (0, 2, 4), (0, 3, 5), (1, 1, 4), (1, 2, 5), (2, 1, 5)]
    assert out.count_D.tolist() == [3, 2, 1]


# ------------------------------------------------------------------------------------------------ drafting


@pytest.mark.parametrize("name", ["deepseek_v3", "mimo"])
def test_draft_all_equals_drafting_from_each_slot_alone(native, name):
    head = scratch(name) if name in SCRATCH else native(name)[0]
    batch = make_batch()
    drafts = head.draft_all(batch, 3)
    for slot in range(2, 7):
        state = head.start(1, 40)
        ids, last = batch.ids_N[1 : slot + 2][None], batch.last_NT[: slot + 1][None]
        logits, _ = head.extend(state, ids, None, last, torch.tensor([slot + 1]))
        for depth in range(3):
            token = head.to_target_ids(logits.argmax(-1))
            assert int(drafts[slot, depth]) == int(token)
            logits = head.expand(state, token[:, None])[0][:, 0]


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "deepseek"])
def test_a_node_of_a_tree_is_drafted_as_at_the_end_of_its_path_alone(native, name):
    head = scratch(name) if name in SCRATCH else native(name)[0]
    tokens, last, counts = torch.randint(V, (2, 6)), torch.randn(2, 6, H), torch.tensor([6, 4])

    def begun():
        state = head.start(2, 12)
        head.extend(state, tokens, None, last, counts)
        return state

    state, nodes = begun(), torch.randint(V, (2, 5))
    parents = torch.tensor([[-1, -1, 0, 1, 2], [-1, -1, -1, 0, 1]])
    logits = torch.cat([
        head.expand(state, nodes[:, a:b], parents[:, a:b])[0] for a, b in ((0, 2), (2, 3), (3, 5))
    ], 1)  # fmt: skip
    for row in range(2):
        for node in range(5):
            path, at = [], node
            while at >= 0:
                path, at = [int(nodes[row, at]), *path], int(parents[row, at])
            alone = begun()
            for token in path:
                one = head.expand(alone, torch.full((2, 1), token))[0]
            assert torch.allclose(logits[row, node], one[row, 0], atol=1e-5), (row, node)


@pytest.mark.parametrize("name", ["glm4_moe", "qwen"])
def test_no_logit_depends_on_a_later_token_or_on_another_document(native, name, monkeypatch):
    head = scratch(name, V) if name in SCRATCH else native(name)[0]
    batch, outputs = make_batch(), []
    changed = copy.deepcopy(batch)
    cut = 16 + 8  # in the last document: everything from here on, and all of the first document, is different
    for x in (changed.ids_N, changed.last_NT):
        x[cut:] = x[cut:].flip(0)
        x[:9] = x[:9].flip(0)
    fused = unrolled.fused_loss
    monkeypatch.setattr(
        unrolled, "fused_loss", lambda *a: outputs.append(dict(zip(
            zip(a[5].slot_M.tolist(), a[5].depth_M.tolist(), strict=True), a[3].detach(), strict=True))) or fused(*a)
    )  # fmt: skip
    for b in (batch, changed):
        head(b)
    before, after = outputs
    early = [(p, d) for p, d in before if p >= 16 and p + 1 + d < cut]  # slot p at depth d reads tokens up to p+1+d
    late = [(p, d) for p, d in before if p >= cut]
    assert len(early) > 2 and len({d for _, d in early}) > 1
    assert all(torch.equal(before[key], after[key]) for key in early)
    # the probe does reach what may differ
    assert late and not any(torch.equal(before[key], after[key]) for key in late)


@pytest.mark.parametrize("family, tree", [
    ("glm4_moe", "chain"), ("glm4_moe", "3x6"), ("deepseek_v3", "3x6"), ("qwen3_next", "chain"), ("qwen2", "chain"),
])  # fmt: skip
def test_text_decoded_with_the_module_is_the_targets_own(native, family, tree):
    from transformers import AutoModelForCausalLM

    from headtrain.eval.decoder.decode import decode
    from headtrain.eval.decoder.drafters import Drafting, make_drafter
    from headtrain.target import Target, _register_attention

    _register_attention()
    head, _, parts = native(family)
    model = AutoModelForCausalLM.from_pretrained(parts.source.model, attn_implementation="headtrain")
    target = Target(model, SimpleNamespace(eos_token_id=19), family)
    prompts = [[3, 7, 1], [4, 4, 8, 2, 9], [11]]
    settings = {"k": 3, "max_new_tokens": 20, "batch": 3}
    plain = decode(target, make_drafter("none"), prompts, **settings)
    drafted = decode(target, make_drafter("head", head, drafting=Drafting(tree=tree)), prompts, **settings)
    assert [answer.ids for answer in drafted] == [answer.ids for answer in plain]
    assert sum(step.drafted for answer in drafted for step in answer.steps) > 20


# ------------------------------------------------------------------------------------------------ the folder


@pytest.mark.parametrize("name", [*FAMILIES, *SCRATCH])
def test_a_saved_head_loads_bit_equal_under_the_checkpoints_names(native, name, tmp_path):
    head, parts = (scratch(name), None) if name in SCRATCH else native(name)[::2]
    embedding, teacher = head._lent["embedding"], head._lent["teacher"]
    save_head(head, tmp_path)
    lm_head = torch.zeros(V, H)
    lm_head[head.t2d] = teacher
    again = load_head(tmp_path, embedding, lm_head=lm_head)
    assert again.config == head.config
    for key, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key
    batch = make_batch()
    assert torch.equal(head.draft_all(batch, 3), again.draft_all(batch, 3))
    written = load_file(tmp_path / "model.safetensors")
    if parts:
        theirs = {}
        for file in Path(parts.source.model).glob("*.safetensors"):
            theirs |= {n: t for n, t in load_file(file).items() if n.startswith(head.config.prefix)}
        own = {n: t for n, t in written.items() if n != "final_norm"}
        assert own.keys() <= theirs.keys() and all(torch.equal(own[n], theirs[n]) for n in own)
        assert all(n.endswith(("embed_tokens.weight", "shared_head.head.weight")) for n in theirs.keys() - own.keys())
    first = sorted(written)[0]
    written["extra"] = written.pop(first)
    save_file(written, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"(extra is not a tensor.*)?{first} is missing"):
        load_head(tmp_path)


def test_the_lent_tensors_are_neither_trained_nor_saved():
    head = scratch("deepseek")
    names = set(head.portable_tensors())
    assert not any("embed_tokens" in n or "head.weight" in n for n in names)
    assert {"model.layers.4.eh_proj.weight", "model.layers.4.shared_head.norm.weight", "d2t", "t2d"} <= names


# ------------------------------------------------------------------------------------------------ what is refused


def test_modules_are_found_by_their_names_in_every_dialect():
    found = {
        "model.layers.4.eh_proj.weight": ("deepseek", "model.layers.4."),
        "model.language_model.layers.4.eh_proj.weight": ("deepseek", "model.language_model.layers.4."),
        "mtp.fc.weight": ("qwen", "mtp."),
        "model.mtp_layers.0.input_proj.weight": ("mimo", "model.mtp_layers.0."),
        "model.layers.5.eh_proj.weight": None,  # not behind the last layer
        "lm_head.weight": None,
    }
    for name, expected in found.items():
        assert find({name, "model.layers.3.mlp.up_proj.weight"}, 4) == expected, name


@pytest.mark.parametrize("first, second", [
    ("model.layers.4.eh_proj.weight", "model.layers.5.eh_proj.weight"),
    ("mtp.fc.weight", "mtp.layers.1.mlp.up_proj.weight"),
    ("model.mtp_layers.0.input_proj.weight", "model.mtp_layers.1.input_proj.weight"),
])  # fmt: skip
def test_a_checkpoint_with_several_modules_is_refused(first, second):
    with pytest.raises(TargetError, match="several MTP modules"):
        locate_module({first, second}, 4, "the target")


def test_a_family_whose_layer_is_built_otherwise_is_refused_by_name():
    with pytest.raises(TargetError, match=r"gemma2: its decoder layer is made of .*pre_feedforward_layernorm"):
        mtp_module.build_layer({"model_type": "gemma2", "hidden_size": 16, "num_attention_heads": 2}, False)
    with pytest.raises(TargetError, match="unheard: transformers cannot build its decoder layer"):
        mtp_module.build_layer({"model_type": "unheard"}, False)


@pytest.mark.parametrize("key, value", [("heads", 4), ("intermediate", 8), ("dialect", "qwen")])
def test_sizes_of_the_targets_own_module_cannot_be_chosen(key, value):
    recipe = RecipeConfig()
    recipe.head = HeadSection(type="mtp", **{key: value})
    with pytest.raises(ConfigError, match=rf"head\.{key}={value}.*head\.init_from=scratch"):
        validate(recipe)
    recipe.head.init_from = "scratch"
    validate(recipe)


def test_a_module_from_scratch_is_refused_where_the_state_before_the_final_norm_is_lost(native):
    _, _, parts = native("qwen2")
    parts = copy.copy(parts)
    parts.norm_weight = parts.norm_weight * (torch.arange(H) > 0)
    with pytest.raises(ValueError, match="final norm has zeros"):
        ready(native("qwen2")[0], parts)
