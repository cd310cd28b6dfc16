"""Heads against speculators' models: the same weights and inputs give the same logits and draft tokens, in float32.

Needs the environment of `make bench-train` (`make test-peers`); what a CPU needs is put in from outside, as in
benchmarks/peers.py: plain attention instead of FlexAttention, no torch.compile.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("speculators")
pytestmark = pytest.mark.bench
os.environ["TORCHDYNAMO_DISABLE"] = "1"

from headtrain.heads import unrolled  # noqa: E402
from headtrain.heads.base import HeadConfig  # noqa: E402
from headtrain.heads.eagle3 import Eagle3Head  # noqa: E402
from headtrain.heads.peagle import PEagleConfig, PEagleHead  # noqa: E402
from headtrain.heads.vocab import mapping  # noqa: E402
from headtrain.training.batches import collate  # noqa: E402

H, V, W, DEPTHS, LENGTHS = 32, 60, 40, 4, (14, 9)
SIZES = {
    "hidden_size": H, "target_hidden_size": H, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": V, "draft_vocab_size": W, "taps": [1, 2, 3],
    "target_layers": 4, "unroll": DEPTHS,
}  # fmt: skip
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def inputs():
    """Two documents, an embedding, an lm_head, and a draft vocabulary in which every label lies."""
    made = torch.Generator().manual_seed(1)
    selected = torch.randperm(V, generator=made)[:W].sort().values
    rows = []
    for length in LENGTHS:
        rows.append(SimpleNamespace(
            ids=torch.randint(V, (length,), generator=made), supervised=torch.ones(length, dtype=torch.bool),
            taps=torch.randn(length, 3, H, generator=made), last=torch.randn(length, H, generator=made),
            argmax=selected[torch.randint(W, (length,), generator=made)], logsumexp=torch.full((length,), 9.0),
        ))  # fmt: skip
    embedding, lm_head = (torch.randn(V, H, generator=made) for _ in range(2))
    return SimpleNamespace(batch=collate(rows, ["a", "b"]), embedding=embedding, lm_head=lm_head, selected=selected)


def filled(head, inputs):
    """The head with random weights everywhere, norms included."""
    made = torch.Generator().manual_seed(2)
    for p in head.parameters():
        p.data = torch.randn(p.shape, generator=made) * (0.2 if p.dim() > 1 else 0.1) + (0 if p.dim() > 1 else 1)
    head.d2t, head.t2d = mapping(inputs.selected, V)
    head.attach(inputs.embedding, inputs.lm_head)
    return head


def ours(head, batch, monkeypatch) -> dict[tuple[int, int], torch.Tensor]:
    """(slot, depth) -> the logits that the training forward compares with the target's."""
    found, original = {}, unrolled.fused_loss

    def spy(objective, weights, scale, x, lm_head, pairs, *more):
        for slot, depth, row in zip(pairs.slot_M.tolist(), pairs.depth_M.tolist(), x @ lm_head.T, strict=True):
            found[slot, depth] = row.detach()
        return original(objective, weights, scale, x, lm_head, pairs, *more)

    monkeypatch.setattr(unrolled, "fused_loss", spy)
    head(batch)
    monkeypatch.undo()
    assert len(found) == sum(length - 2 - d for length in LENGTHS for d in range(DEPTHS))
    return found


def fed(inputs) -> dict[str, torch.Tensor]:
    """speculators' batch: each document without its first token, beside the states of the one before (shift_batch)."""
    from speculators.models.eagle3 import shift_batch

    parts, batch = [], inputs.batch
    for n, (start, stop) in enumerate(zip(batch.cu_R1.tolist(), batch.cu_R1.tolist()[1:], strict=False)):
        shifted = shift_batch({
            "input_ids": batch.ids_N[start:stop], "hidden_states": batch.taps_NAT[start:stop].flatten(1),
            "loss_mask": torch.ones(stop - start), "verifier_last_hidden_states": batch.last_NT[start:stop],
            "position_ids": batch.positions_N[start:stop], "lengths": torch.tensor([stop - start]),
        })  # fmt: skip
        parts.append(shifted | {"document_ids": torch.full((stop - start - 1,), n)})
    names = parts[0].keys() - {"lengths"}
    return {name: torch.cat([part[name] for part in parts])[None] for name in names}


def slot_of(place: int) -> int:
    """Our slot of a place in speculators' batch, which lacks one per document before."""
    return place if place < LENGTHS[0] - 1 else place + 1


def peer(kind: str, head, inputs, **more):
    """speculators' model of a kind with the head's weights."""
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.peagle.config import PEagleSpeculatorConfig
    from speculators.models.peagle.core import PEagleDraftModel
    from transformers import LlamaConfig

    config_class, model_class = {
        "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel), "peagle": (PEagleSpeculatorConfig, PEagleDraftModel)
    }[kind]  # fmt: skip
    c = head.config
    layer = LlamaConfig(
        hidden_size=H, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=V,
        num_hidden_layers=getattr(c, "layers", 1), rms_norm_eps=c.rms_norm_eps, rope_parameters=dict(c.rope),
        max_position_embeddings=c.max_position_embeddings, pad_token_id=None,
    )  # fmt: skip
    layer._attn_implementation = "sdpa"
    model = model_class(config_class(
        transformer_layer_config=layer, draft_vocab_size=W, norm_before_residual=c.norm_before_residual,
        norm_before_fc=False, norm_output=c.norm_output, eagle_aux_hidden_state_layer_ids=[1, 2, 3], **more,
    ))  # fmt: skip
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head.portable_tensors().items()}
    if "mask_hidden" in weights:
        weights["mask_hidden"] = weights["mask_hidden"][None]
    target = {
        "embed_tokens.weight": inputs.embedding, "verifier_lm_head.weight": inputs.lm_head[inputs.selected],
        "verifier_norm.weight": torch.ones(H), "t2d": head.t2d, "d2t": head.d2t,
    }  # fmt: skip
    missing, unknown = model.load_state_dict(target | weights, strict=False)
    assert not missing and not unknown
    return model.eval()


def heard(model, call) -> list[torch.Tensor]:
    """The logits [N, W] of every call of the model's lm_head."""
    found: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _module, _inputs, logits: found.append(logits.detach()[0]))
    with torch.no_grad():
        call()
    handle.remove()
    return found


@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True}, {"norm_output": True}], ids=str)
def test_eagle3_has_speculators_logits_and_draft_tokens_at_every_unroll_depth(inputs, options, monkeypatch):
    head = filled(Eagle3Head(HeadConfig(**SIZES, **options)), inputs)
    model, found = peer("eagle3", head, inputs), ours(head, inputs.batch, monkeypatch)
    batch, drafts = fed(inputs), []
    from speculators.losses import resolve_loss_config

    more = {"ttt_steps": DEPTHS, "loss_config": resolve_loss_config("kl_div", "eager")}
    theirs = heard(model, lambda: drafts.extend(model(**batch, **more)[0]))
    compared = 0
    for depth, logits_NW in enumerate(theirs):
        for place, row in enumerate(logits_NW):
            if (slot_of(place), depth) in found:
                torch.testing.assert_close(found[slot_of(place), depth], row, **CLOSE)
                assert int(found[slot_of(place), depth].argmax()) == int(drafts[depth][0, place])
                compared += 1
    assert compared == len(found)


@pytest.mark.parametrize("layers", [1, 3])
def test_peagle_has_speculators_logits_at_every_depth(inputs, layers, monkeypatch):
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core

    config = PEagleConfig(**SIZES | {"type": "peagle"}, layers=layers, mask_token=7)
    head = filled(PEagleHead(config), inputs)
    model, found = peer("peagle", head, inputs, mask_token_id=7), ours(head, inputs.batch, monkeypatch)
    batch = fed(inputs)
    count = batch["input_ids"].shape[1]
    rows = [(p, d) for d in range(DEPTHS) for p in range(count - d)]  # all of them, in the place of a random sample
    anchors, depths = (torch.tensor(values) for values in zip(*rows, strict=True))
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (anchors, depths))
    more = {"num_depths": DEPTHS, "loss_config": resolve_loss_config("kl_div", "eager")}
    (logits,) = heard(model, lambda: model(**batch, **more))
    compared = 0
    for (place, depth), row in zip(rows, logits, strict=True):
        if (slot_of(place), depth) in found:
            torch.testing.assert_close(found[slot_of(place), depth], row, **CLOSE)
            compared += 1
    assert compared == len(found)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_mtp_has_speculators_logits_for_the_first_draft_token(family, mtp_targets, tmp_path):
    """Later ones differ by design: speculators attends to the keys of the same depth, engines to the cache's."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.convert.mtp.converter import MTPConverter
    from speculators.models.mtp.config import MTPSpeculatorConfig
    from speculators.models.mtp.core import MTPDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    from headtrain.config import HeadSection, TargetConfig
    from headtrain.heads.mtp import MtpHead
    from headtrain.target import TargetParts

    theirs, vocab = mtp_targets.make(tmp_path, family), mtp_targets.VOCAB
    c = theirs.model.config
    embedding, lm_head = theirs.model.get_input_embeddings().weight.detach(), theirs.model.lm_head.weight.detach()
    c.num_hidden_layers = mtp_targets.LAYERS
    source = TargetConfig(model=str(tmp_path))
    parts = TargetParts(embedding, lm_head, torch.ones(mtp_targets.HIDDEN), c, {}, {19}, source)
    head = MtpHead.fresh(HeadSection(type="mtp", draft_vocab="full", unroll=1), parts).eval()
    head.d2t, head.t2d = mapping(torch.arange(vocab), vocab)
    head.attach(embedding, lm_head)

    plan = GreedyTokenProposalConfig(speculative_tokens=1)
    model = MTPDraftModel(MTPSpeculatorConfig(
        transformer_layer_config=c,
        speculators_config=SpeculatorsConfig(algorithm="mtp", proposal_methods=[plan], default_proposal_method="greedy",
                                             verifier=VerifierConfig(name_or_path=None, architectures=[])),
    )).eval()  # fmt: skip
    weights = MTPConverter().convert_to_state_dict(str(tmp_path))
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and not [name for name in missing if name.startswith("mtp")]
    model.embed_tokens.weight.data, model.lm_head.weight.data = embedding, lm_head

    made = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, vocab, (1, 12), generator=made)
    last = torch.randn(1, 12, mtp_targets.HIDDEN, generator=made)
    with torch.no_grad():
        (logits,), *_ = model(tokens, last)
    for known in range(1, logits.shape[1] + 1):
        state = head.start(1, 16)
        found, _ = head.extend(state, tokens[:, 1 : known + 1], None, last[:, :known], torch.tensor([known]))
        torch.testing.assert_close(found[0], logits[0, known - 1], **CLOSE)
