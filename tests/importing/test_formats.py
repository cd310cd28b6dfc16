"""Checkpoints as other tools write them: what is made of each, tensor by tensor and key by key."""

from __future__ import annotations

import json

import importing_checkpoints as made
import pytest
import torch
from safetensors.torch import load_file

from headtrain.heads.base import HeadConfig, load_head
from headtrain.importing import HeadImportError, detect, import_head

PLAIN = {"rope_theta": 500000.0, "rope_type": "default"}
YARN = {"rope_theta": 500000.0, "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 512}
# format: (checkpoint, what it becomes, what is said of it); every value worked out from the tool's own conventions
TABLE = {
    "eagle": (made.eagle3, {"type": "eagle3", "taps": [2, 6, 9], "norm_before_residual": False}, "default taps"),
    "sglang": (made.sglang, {"type": "eagle3", "taps": [2, 6, 9], "rope": PLAIN, "unroll": 7}, "unroll 7"),
    "vllm": (made.vllm, {"type": "eagle3", "taps": [4, 6, 12], "norm_before_residual": True}, "unroll 7"),
    "trtllm": (made.trtllm, {"type": "eagle3", "taps": [3, 6, 11], "rope": YARN}, "order of their target ids"),
    "speculators": (
        made.speculators, {"type": "eagle3", "taps": [2, 6, 9], "norm_before_residual": True, "unroll": 4},
        "norm_before_residual is not in config.json: True",
    ),
    "speculators peagle": (
        lambda: made.peagle(),
        {"type": "peagle", "layers": 2, "mask_token": 58, "norm_before_residual": False, "own_embedding": False},
        "norm_before_residual is not in config.json: False",
    ),
    "vllm peagle": (lambda: made.peagle(plain=True), {"type": "peagle", "layers": 2, "mask_token": 58}, "unroll 7"),
    "eagle 1": (made.eagle, {"type": "eagle", "unroll": 1, "fc_bias": False, "head_dim": 16}, "unroll 1"),
    "eagle 1 with a bias": (lambda: made.eagle(bias=True), {"type": "eagle", "fc_bias": True}, "vLLM ignores it"),
    "medusa": (made.medusa, {"type": "medusa", "unroll": 3, "blocks": 1}, "medusa_num_heads is 2 in config.json: 3"),
    "medusa of vllm": (
        lambda: made.medusa("medusa_heads.{i}.{j}", vocab_size=made.VOCAB), {"type": "medusa", "unroll": 3}, "is 2",
    ),
}  # fmt: skip


@pytest.fixture
def bring(tmp_path, target):
    """bring((config, tensors), **keys): what import_head says of such a folder."""

    def call(checkpoint, **keys):
        config, tensors = checkpoint
        place = made.write(tmp_path / "theirs", config, tensors, keys.pop("weights", "model.safetensors"))
        return import_head(str(place), tmp_path / "ours", **{"target": str(target)} | keys)

    return call


def renamed(name: str) -> str:
    """Our name of a foreign tensor, written down again here."""
    if name.startswith(("0.", "1.", "2.", "medusa_heads.")):
        head, block, *rest = name.removeprefix("medusa_heads.").split(".")
        return f"blocks.{head}.layers.{block}.{rest[1]}" if len(rest) > 1 else f"lm_heads.{head}.weight"
    return name


@pytest.mark.parametrize("name", TABLE)
def test_a_foreign_checkpoint_becomes_a_head_folder_with_the_same_tensors(name, bring, lend):
    checkpoint, wanted, said = TABLE[name]
    config, tensors = checkpoint()
    found = bring((config, tensors))
    assert found.format == name.split()[0] and said in "\n".join(found.said)
    head, written = load_head(found.folder), load_file(found.folder / "model.safetensors")
    assert {key: getattr(head.config, key) for key in wanted} == wanted
    assert head.config.target_layers == made.LAYERS and head.config.vocab_size == made.VOCAB
    for theirs, tensor in tensors.items():
        ours = renamed(theirs)
        if wanted["type"] in ("eagle3", "peagle"):
            ours = ours.replace("layers.0.", "midlayer.")
        if ours == "lm_head.weight":
            tensor = tensor.flip(0) if name == "trtllm" else tensor  # whose draft ids stand backwards
        if ours == "d2t":
            tensor = torch.tensor(made.IDS) - torch.arange(made.DRAFT)
        assert torch.equal(written[ours], tensor.reshape(written[ours].shape)), theirs
    added = {"t2d"} if name == "trtllm" else {"fc.bias"} if name == "eagle 1" else set()
    assert len(written) == len(tensors) + len(added) and added <= written.keys()
    drafts = lend(head).draft_all(made.batch(len(head.config.taps)), 2)
    if head.config.draft_vocab_size < made.VOCAB:
        assert set(drafts[drafts >= 0].tolist()) <= set(made.IDS)
    assert len(drafts[drafts >= 0]) > 10


def test_the_folder_says_where_it_came_from_without_a_local_path(bring, tmp_path):
    record = json.loads((bring(made.sglang()).folder / "import.json").read_text())
    assert record["format"] == "sglang" and record["head"] == "theirs" and str(tmp_path) not in json.dumps(record)
    assert any(line.startswith("taps [2, 6, 9]") for line in record["said"])


# ------------------------------------------------------------------------------------------------- taps (case 33)


def nested(*ids):
    return made.eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": list(ids)})


@pytest.mark.parametrize(
    ("checkpoint", "keys", "taps"),
    [
        (nested(1, 5, 8), {}, [2, 6, 9]),  # both rules of SGLang say so
        (nested(3, 5, 8), {"engine_version": "0.5.23"}, [4, 6, 9]),
        (nested(3, 5, 8), {"taps": [3, 5, 8]}, [3, 5, 8]),
        (nested(3, 5, 8), {"format": "trtllm"}, [4, 6, 9]),
        (nested(8, 3, 5), {"format": "trtllm"}, [4, 6, 9]),  # a set
        (nested(4, 6, 12), {}, [4, 6, 12]),  # 13 does not exist
        (made.eagle3(eagle_aux_hidden_state_layer_ids=[9, 2, 5]), {}, [2, 5, 9]),
        (made.eagle3(eagle_aux_hidden_state_layer_ids=[4, 6, 9], eagle_config=nested(3, 5, 8)[0]["eagle_config"]), {},
         [4, 6, 9]),
        (made.eagle3(), {}, [2, 6, 9]),
    ],
)  # fmt: skip
def test_layer_ids_are_taps_by_the_rule_of_who_reads_them(checkpoint, keys, taps, bring):
    assert load_head(bring(checkpoint, **keys).folder).config.taps == taps


@pytest.mark.parametrize(
    ("checkpoint", "keys", "words"),
    [
        (nested(3, 5, 8), {}, r"=\[3, 5, 8\] is ambiguous: taps \[4, 6, 9\] .* taps \[3, 5, 8\] .*taps=\[4,6,9\] or "),
        (nested(13, 5, 8), {}, "14 is not allowed"),
        (made.eagle3(eagle_aux_hidden_state_layer_ids=[2, 6, 13]), {}, "13 is not allowed"),
        (made.eagle3(eagle_aux_hidden_state_layer_ids=[0, 6, 9]), {}, "0 would be the embedding"),
        (made.eagle3(eagle_aux_hidden_state_layer_ids=[4, 6]), {}, "reads 3 layers of the target, but the taps are"),
        (made.eagle3(eagle_aux_hidden_state_layer_ids=[4, 6, 9], eagle_config=nested(2, 5, 8)[0]["eagle_config"]), {},
         r"=\[4, 6, 9\] means taps \[4, 6, 9\], and eagle_config.*means \[3, 6, 9\]"),
        (made.eagle3(), {"taps": [2, 6, 13]}, "taps: .*13 is not allowed"),
        (made.eagle3(), {"engine_version": "0.5.23"}, "engine_version=0.5.23: nothing .* leave it out"),
        (made.medusa(), {"taps": [1, 2, 3]}, "taps=.*leave it out"),
        (nested(3, 5, 8), {"engine_version": "newest"}, "engine_version=newest"),
    ],
)  # fmt: skip
def test_layer_ids_that_do_not_say_which_taps_are_meant_are_refused(checkpoint, keys, words, bring, tmp_path):
    with pytest.raises(ValueError, match=words):
        bring(checkpoint, **keys)
    assert not (tmp_path / "ours").exists()


def test_a_release_of_sglang_reads_deepseek_targets_by_the_other_rule(bring, monkeypatch):
    from headtrain.importing import foreign

    real = foreign.TargetFacts.__init__

    def deepseek(self, model):
        real(self, model)
        self.config.model_type = "deepseek_v3"

    monkeypatch.setattr(foreign.TargetFacts, "__init__", deepseek)
    assert load_head(bring(nested(3, 5, 8), engine_version="0.5.23").folder).config.taps == [3, 5, 8]


# ------------------------------------------------------------------------------------------------- the draft vocabulary

OFFSETS = torch.tensor(made.IDS) - torch.arange(made.DRAFT)
MARKS = torch.zeros(made.VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(made.IDS), True)


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({"d2t": OFFSETS, "t2d": MARKS}, ""),
        ({"d2t": OFFSETS.int(), "t2d": MARKS}, ""),
        ({"d2t": OFFSETS}, ""),
        ({"d2t": torch.tensor(made.IDS), "t2d": MARKS}, "d2t holds target ids"),
        ({"d2t": torch.tensor(made.IDS)}, "d2t holds target ids"),  # 59 + 19 is no token
        ({"t2d": MARKS}, "made from t2d"),
    ],
)
def test_a_mapping_becomes_offsets_however_it_is_written(mapping, said, bring):
    config, tensors = made.sglang()
    tensors = {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")} | mapping
    found = bring((config, tensors))
    written = load_file(found.folder / "model.safetensors")
    assert torch.equal(written["d2t"], OFFSETS) and torch.equal(written["t2d"], MARKS)
    assert torch.equal(written["lm_head.weight"], tensors["lm_head.weight"]) and said in "\n".join(found.said)


def test_a_mapping_that_could_be_both_is_read_as_engines_read_it(bring):
    config, tensors = made.sglang()
    del tensors["t2d"]
    found = bring((config, tensors | {"d2t": torch.arange(made.DRAFT)}))
    written = load_file(found.folder / "model.safetensors")
    assert written["d2t"].tolist() == list(range(20)) and written["t2d"].nonzero()[:, 0].tolist() == [*range(0, 40, 2)]
    assert "d2t could hold target ids as well: read as offsets" in "\n".join(found.said)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: [t.pop("d2t"), t.pop("t2d")], "d2t is missing: which of the 60 tokens"),
        (lambda t: t.update(d2t=t["d2t"].float()), r"d2t is torch.float32 \[20\], not int64"),
        (lambda t: t.update(d2t=t["d2t"][:-1]), r"d2t is torch.int64 \[19\], not int64 \[20\]"),
        (lambda t: t.update(d2t=t["d2t"] - 1), "leads to no 20 different tokens"),
        (lambda t: t.update(t2d=t["t2d"][:-1]), r"t2d is torch.bool \[59\]"),
        (lambda t: t.update(t2d=~t["t2d"]), "t2d does not mark the tokens that d2t leads to"),
    ],
)
def test_a_mapping_that_leads_nowhere_is_refused(change, words, bring):
    config, tensors = made.sglang()
    change(tensors)
    with pytest.raises(HeadImportError, match=words):
        bring((config, tensors))


def test_draft_ids_in_any_order_draft_the_same_tokens(bring, lend, tmp_path):
    """The reordered lm_head says of every target token what the original row said."""
    config, tensors = made.trtllm()
    head = lend(load_head(bring((config, tensors)).folder))
    x = torch.randn(5, made.HIDDEN)
    theirs = x @ tensors["lm_head.weight"].float().T
    ids = torch.arange(made.DRAFT) + tensors["d2t"]
    ours = head.lm_head(x)
    for row, token in enumerate(ids.tolist()):
        column = made.IDS.index(token)
        assert head.to_target_ids(torch.tensor(column)) == token and torch.allclose(ours[:, column], theirs[:, row])


# ------------------------------------------------------------------------------------------------- variants of the same


def test_names_with_the_prefix_model_and_fused_projections_are_the_same_head(bring, tmp_path):
    config, tensors = made.sglang()
    fused = {n: t for n, t in tensors.items() if not any(f"{p}_proj" in n for p in ("q", "k", "v", "gate", "up"))}
    attention, mlp = "midlayer.self_attn.{}_proj.weight", "midlayer.mlp.{}_proj.weight"
    fused[attention.format("qkv")] = torch.cat([tensors[attention.format(p)] for p in "qkv"])
    fused[mlp.format("gate_up")] = torch.cat([tensors[mlp.format(p)] for p in ("gate", "up")])
    outer = ("lm_head.weight", "d2t", "t2d")
    other = {n if n in outer else f"model.{n}": t for n, t in fused.items()}
    other["model.midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    written = load_file(bring((config, other)).folder / "model.safetensors")
    assert written.keys() == tensors.keys() and all(torch.equal(written[n], t) for n, t in tensors.items())


def test_the_targets_own_embedding_and_lm_head_are_taken_out_or_put_in(bring, ends):
    config, tensors = made.sglang()
    config["draft_vocab_size"] = None
    full = {n: t for n, t in tensors.items() if n not in ("d2t", "t2d", "lm_head.weight")}
    found = bring((config, full | {"embed_tokens.weight": ends["embedding"].float()}))
    written = load_file(found.folder / "model.safetensors")
    assert torch.equal(written["lm_head.weight"].bfloat16(), ends["lm_head"]) and "embed_tokens.weight" not in written
    assert "bit for bit" in "\n".join(found.said) and "lm_head.weight is not there" in "\n".join(found.said)
    assert load_head(found.folder).config.draft_vocab_size == made.VOCAB


@pytest.mark.parametrize("kind", ["sglang", "eagle"])
def test_an_embedding_that_is_not_the_targets_is_refused(kind, bring, ends):
    config, tensors = getattr(made, kind)()
    for other in (ends["embedding"] + 1, ends["embedding"][:-1]):
        with pytest.raises(HeadImportError, match=r"embed_tokens\.weight is not the embedding of target="):
            bring((config, tensors | {"embed_tokens.weight": other}))


def test_what_a_config_took_over_from_the_target_is_left_out_and_said(bring):
    config, tensors = made.sglang()
    found = bring((config | {"tie_word_embeddings": True, "quantization_config": {"quant_method": "fp8"}}, tensors))
    written = json.loads((found.folder / "config.json").read_text())
    assert "quantization_config" not in written and written["tie_word_embeddings"] is False
    said = "\n".join(found.said)
    assert "quantization_config is left out" in said and "tie_word_embeddings is true, but" in said


def test_a_target_that_cannot_be_read_is_one_line(bring, tmp_path):
    with pytest.raises(HeadImportError, match=r"target=.*nowhere: its config\.json cannot be read") as caught:
        bring(made.sglang(), target=str(tmp_path / "nowhere"))
    assert "\n" not in str(caught.value)


def test_a_peagle_head_keeps_an_embedding_of_its_own(bring, ends):
    config, tensors = made.peagle()
    own = ends["embedding"] + 1
    found = bring((config, tensors | {"embed_tokens.weight": own}))
    assert load_head(found.folder).config.own_embedding
    assert torch.equal(load_file(found.folder / "model.safetensors")["embed_tokens.weight"], own)


def test_tensors_of_several_dtypes_are_written_in_the_one_that_holds_all_values(bring):
    config, tensors = made.sglang()
    tensors["norm.weight"] = torch.rand(made.HIDDEN)
    found = bring((config, tensors))
    written = load_file(found.folder / "model.safetensors")
    assert {t.dtype for n, t in written.items() if n not in ("d2t", "t2d")} == {torch.float32}
    assert all(torch.equal(written[n], t.to(written[n].dtype)) for n, t in tensors.items())
    assert json.loads((found.folder / "config.json").read_text())["torch_dtype"] == "float32"


def test_a_medusa_head_without_biases_and_with_copies_of_one_lm_head(bring):
    config, tensors = made.medusa()
    tensors = {n: t for n, t in tensors.items() if not n.endswith("bias")}
    tensors |= {f"{i}.1.weight": tensors["0.1.weight"].clone() for i in range(3)}
    found = bring((config, tensors), weights="medusa_lm_head.safetensors")
    head, written = load_head(found.folder), load_file(found.folder / "model.safetensors")
    assert head.config.share_lm_head and len(head.lm_heads) == 1 and not written["blocks.2.layers.0.bias"].any()


def test_a_medusa_heads_reduced_vocabulary_is_put_in_order(bring):
    config, tensors = made.medusa("medusa_heads.{i}.{j}", vocab_size=made.VOCAB)
    kept = torch.tensor(made.IDS[::-1])
    small = {n: t[: made.DRAFT] if t.shape[0] == made.VOCAB else t for n, t in tensors.items()}
    found = bring((config, small | {"token_map": kept}))
    written = load_file(found.folder / "model.safetensors")
    assert written["token_map"].tolist() == made.IDS
    assert torch.equal(written["lm_heads.1.weight"], small["medusa_heads.1.1.weight"].flip(0))
    assert load_head(found.folder).to_target_ids(torch.arange(made.DRAFT)).tolist() == made.IDS


ROPES = {
    "old names": ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}}, {}),
    "new names": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}}, {}),
    "both": ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
              "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}}, {}),
    "theta in the scaling": ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_rope_is_read_in_old_names_and_new_ones(name, bring):
    config, tensors = made.sglang()
    del config["rope_theta"]
    found = bring((config | ROPES[name][0], tensors))
    assert load_head(found.folder).config.rope == {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0}


def test_what_config_json_does_not_say_is_the_engines_default_and_is_said(bring):
    config, tensors = made.sglang()
    config = {k: v for k, v in config.items() if k not in ("rope_theta", "rms_norm_eps", "max_position_embeddings")}
    found = bring((config, tensors))
    head, said = load_head(found.folder).config, "\n".join(found.said)
    assert (head.rope["rope_theta"], head.rms_norm_eps, head.max_position_embeddings) == (10000.0, 1e-6, 512)
    for words in ("rope_theta is not in config.json: 10000.0", "rms_norm_eps is not in", "512, the target's"):
        assert words in said
    assert HeadConfig.max_position_embeddings != 512  # the target's, and not our own default


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "10000.*1000000"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is longrope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 0.7}}, "rope_scaling.mscale=0.7"),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "linear, yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"norm_before_fc": True}, "norm_before_fc=True: no norm stands before fc"),
        ({"eagle_config": {"norm_before_fc": True}}, "eagle_config.norm_before_fc=True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state=False"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "eagle_config.parallel_draft_step=4"),
        ({"fc_norm": True}, "fc_norm=True"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2: EAGLE-3 heads have one layer"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2ForCausalLM"),
        ({"architectures": None, "model_type": "qwen3"}, "qwen3, by model_type"),
        ({"layer_types": ["sliding_attention"]}, "window"),
        ({"sliding_window": 128}, "window"),
        ({"target_hidden_size": 64}, "target_hidden_size: a head of another width"),
        ({"vocab_size": 61}, "made for a target with vocab_size 61; .* has 60"),
        ({"speculators_model_type": "dflash", "transformer_layer_config": {}}, "speculators_model_type='dflash'"),
    ],
)
def test_a_head_that_computes_what_ours_do_not_is_refused_by_its_key(change, words, bring, tmp_path):
    config, tensors = made.eagle3()
    with pytest.raises(HeadImportError, match=words) as caught:
        bring((config | change, tensors))
    assert "\n" not in str(caught.value) and not (tmp_path / "ours").exists()


# ------------------------------------------------------------------------------------------------- which format


@pytest.mark.parametrize("name", TABLE)
def test_the_format_is_told_from_config_and_names(name):
    config, tensors = TABLE[name][0]()
    assert detect(config, set(tensors), "here") == name.split()[0]


def test_what_is_no_draft_head_is_said_with_its_tensors():
    with pytest.raises(HeadImportError, match=r"here: no draft head .*model\.norm\.weight"):
        detect({"num_hidden_layers": 4}, {"model.norm.weight", "lm_head.weight"}, "here")


def test_a_head_of_ours_that_brings_an_adapter_is_used_as_it_is(bring, tmp_path):
    folder = bring(made.sglang()).folder
    (folder / "adapter").mkdir()
    with pytest.raises(HeadImportError, match="needs no import; use it as it is"):
        import_head(str(folder), tmp_path / "again")


def test_a_target_that_nobody_names_is_asked_for(tmp_path):
    made.write(tmp_path / "theirs", *made.sglang())
    with pytest.raises(HeadImportError, match="target=… is missing"):
        import_head(str(tmp_path / "theirs"), tmp_path / "ours")


def test_speculators_name_their_target(tmp_path, target):
    config, tensors = made.speculators()
    verifier = config["speculators_config"]["verifier"]
    verifier["name_or_path"] = "/model/of/another/machine"
    place = made.write(tmp_path / "theirs", config, tensors)
    with pytest.raises(HeadImportError, match=r"target=/model/of/another/machine: .*; set target=…"):
        import_head(str(place), tmp_path / "ours")
    verifier["name_or_path"] = str(target)
    made.write(tmp_path / "theirs", config, tensors)
    assert import_head(str(tmp_path / "theirs"), tmp_path / "ours").type == "eagle3"


def test_an_output_folder_that_is_in_use_is_left_alone(bring, tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "mine.txt").write_text("x")
    with pytest.raises(HeadImportError, match=r"out=.* exists; name a new folder"):
        bring(made.sglang())
    with pytest.raises(HeadImportError, match="format=nothing: unknown; there is auto, "):
        bring(made.sglang(), format="nothing")
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, target):
    place = made.write(tmp_path / "theirs", *made.sglang())
    (tmp_path / "file").write_text("x")
    with pytest.raises(HeadImportError, match=r"out=.*file/ours: cannot be written"):
        import_head(str(place), tmp_path / "file" / "ours", target=str(target))
