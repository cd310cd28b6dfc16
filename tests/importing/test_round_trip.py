"""There and back: a head through every exporter and the importer, and foreign checkpoints through both."""

from __future__ import annotations

import json
from dataclasses import asdict

import importing_checkpoints as made
import pytest
import torch
from safetensors.torch import load_file

from headtrain.export import export
from headtrain.heads.base import head_class, load_head, save_head
from headtrain.heads.vocab import mapping
from headtrain.importing import import_head

INFO = {"family": "llama"}
SIZES = dict(
    hidden_size=made.HIDDEN, target_hidden_size=made.HIDDEN, intermediate_size=made.WIDE, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, vocab_size=made.VOCAB, draft_vocab_size=made.DRAFT, rms_norm_eps=1e-5,
    rope={"rope_theta": 500000.0, "rope_type": "default"}, max_position_embeddings=512, taps=[2, 6, 9],
    target_layers=made.LAYERS, unroll=5,
)  # fmt: skip
LLAMA3 = {
    "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FULL = {"draft_vocab_size": made.VOCAB}
EAGLE = {"draft_vocab_size": made.VOCAB, "taps": [], "freeze_lm_head": True, "unroll": 1}
MEDUSA = {
    "taps": [], "unroll": 3, "intermediate_size": 0, "num_attention_heads": 0, "num_key_value_heads": 0, "head_dim": 0,
    "rope": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
PAIRS = [  # head type, its settings, export format, engine version
    ("eagle3", {}, "vllm", None),
    ("eagle3", {"taps": [4, 6, 12], "rope": LLAMA3, "norm_output": True, "norm_before_residual": True}, "vllm", None),
    ("eagle3", {"taps": [3, 6, 8, 11]}, "vllm", None),
    ("eagle3", FULL, "vllm", None),
    ("eagle3", {}, "sglang", None),
    ("eagle3", {"taps": [4, 6, 11], "rope": LLAMA3}, "sglang", "0.5.23"),
    ("eagle3", {"taps": [1, 6, 12]}, "trtllm", None),
    ("eagle3", {}, "eagle", None),
    ("eagle3", {"norm_before_residual": True, "taps": [4, 6, 12], "rope": LLAMA3}, "speculators", None),
    ("eagle3", {}, "speculators", None),
    ("eagle3", FULL, "speculators", None),
    ("peagle", {"layers": 3, "mask_token": 58}, "vllm", None),
    ("peagle", {"layers": 3, "mask_token": 58, "norm_before_residual": True}, "speculators", None),
    ("peagle", {"layers": 1, "mask_token": 0, "own_embedding": True}, "speculators", None),
    ("eagle", EAGLE, "vllm", None),
    ("eagle", EAGLE, "sglang", None),
    ("eagle", EAGLE, "eagle", None),
    ("medusa", MEDUSA | FULL, "vllm", "0.32.0"),
    ("medusa", MEDUSA | FULL | {"blocks": 2}, "vllm", "0.32.0"),
    ("medusa", MEDUSA | FULL | {"share_lm_head": True}, "vllm", "0.32.0"),
    ("medusa", MEDUSA | FULL, "medusa", None),
    ("medusa", MEDUSA | FULL | {"share_lm_head": True}, "medusa", None),
]


def make_head(kind: str, **changes):
    """A head whose values are those of bfloat16."""
    torch.manual_seed(0)
    of_type = head_class(kind)
    head = of_type(of_type.Config(**(SIZES | {"type": kind} | changes)))
    with torch.no_grad():
        for p in head.parameters():
            p.copy_((torch.randn(p.shape) * 0.2 + (p.dim() == 1)).bfloat16())
    if head.config.draft_vocab_size < made.VOCAB:
        head.d2t, head.t2d = mapping(torch.tensor(made.IDS), made.VOCAB)
    return head.eval()


def drafts(head, lend):
    """The chain from every slot: what is the same for two heads that are the same."""
    return lend(head).draft_all(made.batch(len(head.config.taps)), min(3, head.config.unroll + 1))


def without(record: dict, *keys: str) -> dict:
    return {key: value for key, value in record.items() if key not in keys}


@pytest.mark.parametrize(("kind", "settings", "format", "version"), PAIRS)
@pytest.mark.parametrize("section", [True, False], ids=["with our section", "without"])
def test_the_import_of_an_export_is_the_head(kind, settings, format, version, section, tmp_path, target, lend):
    """Without our section in config.json the foreign keys alone have to say it."""
    head = make_head(kind, **settings)
    save_head(head, tmp_path / "head", torch.bfloat16)
    out = export(tmp_path / "head", format, tmp_path / "export", INFO, engine_version=version)
    config = json.loads((out / "config.json").read_text())
    if not section:
        config.pop("headtrain", None)
        (out / "config.json").write_text(json.dumps(config))
    clear = "headtrain" in config or not version or kind == "medusa"
    keys = {"target": str(target)} | ({} if clear else {"taps": settings["taps"]})
    if "headtrain" not in config and "eagle_aux_hidden_state_layer_ids" in config:
        keys.pop("taps", None)  # vLLM's own ids stand there too
    again = load_head(import_head(str(out), tmp_path / "again", **keys).folder)
    lost = () if "headtrain" in config else ("freeze_lm_head", "unroll", "accuracy", "head_dim", "made_for")
    assert without(asdict(again.config), *lost) == without(asdict(head.config), *lost)
    assert again.config.unroll == head.config.unroll or "headtrain" not in config
    for name, tensor in head.portable_tensors().items():
        assert torch.equal(again.portable_tensors()[name], tensor), name
    assert torch.equal(drafts(again, lend), drafts(head, lend))


FOREIGN = {  # checkpoint, the format it goes back to, engine version
    "sglang": (made.sglang, "sglang", None),
    "vllm": (made.vllm, "vllm", None),
    "speculators": (made.speculators, "speculators", None),
    "peagle": (made.peagle, "speculators", None),
    "plain peagle": (lambda: made.peagle(plain=True), "vllm", None),
    "eagle 1": (made.eagle, "vllm", None),
    "medusa": (made.medusa, "medusa", None),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_the_export_of_an_import_has_the_tensors_bit_for_bit(name, tmp_path, target):
    checkpoint, format, version = FOREIGN[name]
    config, tensors = checkpoint()
    place = made.write(tmp_path / "theirs", config, tensors)
    ours = import_head(str(place), tmp_path / "ours", target=str(target)).folder
    out = export(ours, format, tmp_path / "out", engine_version=version)  # the import says its target's family
    written = load_file(next(out.glob("*.safetensors")))
    stem = "layers.0." if format == "speculators" else "midlayer."
    if name == "eagle 1":
        stem = "layers.0."
    for theirs, tensor in tensors.items():
        own = theirs.replace("layers.0.", stem)
        assert torch.equal(written[own].reshape(tensor.shape), tensor), theirs
    more = {"layers.1.hidden_norm.weight"} if name == "plain peagle" else set()
    assert len(written) - len(tensors) == len(more) + (name == "eagle 1")


@pytest.mark.parametrize("changed", ["input_layernorm", "taps", "d2t"])
def test_the_comparison_of_drafts_notices_what_an_import_could_get_wrong(changed, lend):
    """A sensitivity check of the test above."""
    head, other = make_head("eagle3"), make_head("eagle3")
    if changed == "input_layernorm":
        other.midlayer.input_layernorm.weight.data.copy_(head.midlayer.hidden_norm.weight)
    elif changed == "taps":
        other.fc.weight.data = other.fc.weight.data.roll(made.HIDDEN, 1)
    else:
        other.d2t = other.d2t.roll(1)
    assert not torch.equal(drafts(head, lend), drafts(other, lend))


# ------------------------------------------------------------------------------------------------- MTP


@pytest.mark.parametrize("family", ["qwen3_next", "glm4_moe", "qwen2"])
def test_the_module_of_a_targets_checkpoint_comes_bit_for_bit(family, tmp_path, mtp_targets):
    from headtrain.heads.mtp_checkpoint import write_back
    from headtrain.smoke import byte_tokenizer

    folder = tmp_path / "target"
    found = mtp_targets.make(folder, family)
    byte_tokenizer().save_pretrained(folder)
    said = import_head(str(folder), tmp_path / "ours")
    assert (said.type, said.format) == ("mtp", "mtp")
    head = load_head(said.folder)
    assert head.config.native and head.config.prefix == found.prefix
    stored = {n: t for shard in folder.glob("*.safetensors") for n, t in load_file(shard).items()}
    for name, tensor in head.trained_tensors().items():
        assert torch.equal(tensor, stored[name].float()), name
    write_back(head, folder, tmp_path / "back")
    for shard in folder.glob("*.safetensors"):
        assert (tmp_path / "back" / shard.name).read_bytes() == shard.read_bytes()
    again = load_head(import_head(str(said.folder), tmp_path / "again").folder)
    assert again.config == head.config


def test_a_target_without_a_module_and_one_with_a_broken_shard_are_named(tmp_path, target, mtp_targets):
    from headtrain.smoke import byte_tokenizer

    with pytest.raises(ValueError, match=r"no draft head that is known here .*no MTP module"):
        import_head(str(target), tmp_path / "ours")
    with pytest.raises(ValueError, match=r"has no MTP layers"):
        import_head(str(target), tmp_path / "ours", format="mtp")
    folder = tmp_path / "broken"
    mtp_targets.make(folder, "qwen2")
    byte_tokenizer().save_pretrained(folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(ValueError, match=f"{shard.name}: cannot be read as safetensors"):
        import_head(str(folder), tmp_path / "ours", format="mtp")
    assert not (tmp_path / "ours").exists()
