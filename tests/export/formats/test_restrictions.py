"""What an engine, or a release of it, cannot run is refused with the reason; spoiled heads are refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file

from headtrain.config import HeadSection
from headtrain.export import ExportError, audit, export
from headtrain.export.contracts import load_contract
from headtrain.export.refusals import check_plan, versions

INFO = {"model": "org/Name-7B", "family": "llama"}
WORKS = [
    ("eagle", "eagle"), ("eagle", "sglang"), ("eagle", "vllm"), ("eagle3", "eagle"), ("eagle3", "sglang"),
    ("eagle3", "speculators"), ("eagle3", "trtllm"), ("eagle3", "vllm"), ("medusa", "medusa"), ("medusa", "vllm"),
    ("peagle", "speculators"), ("peagle", "vllm"),
]  # fmt: skip
VERSION = {("medusa", "vllm"): "0.32.0"}


def found(head, kind, format):
    return audit(head, format, VERSION.get((kind, format)), INFO)


# ------------------------------------------------------------------------------------------ wirings and releases

@pytest.mark.parametrize(("changes", "formats", "words"), [
    ({"norm_before_residual": True}, ["sglang", "trtllm", "eagle"], "norm_before_residual=True must be False"),
    ({"norm_output": True}, ["eagle"], "norm_output=True must be False"),
    ({"rope": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}, ["eagle"], "rope of type linear"),
    ({"head_dim": 32}, ["eagle"], "4 heads of 32 are not 64"),
    ({"taps": [2, 3, 6]}, ["eagle"], "taps [2, 3, 6]: the original EAGLE code knows the default ones alone"),
])  # fmt: skip
def test_a_wiring_is_refused_where_it_is_not_read_and_goes_through_elsewhere(changes, formats, words, make_head):
    head = make_head("eagle3", **changes)
    for format in ("vllm", "sglang", "trtllm", "speculators", "eagle"):
        faults = audit(head, format, "0.5.23" if format == "sglang" else None, INFO)
        if format in formats:
            assert len(faults) == 1 and words in faults[0] and "format=vllm" in faults[0], (format, faults)
        else:
            assert faults == [], format


def test_a_shallow_target_is_refused_where_its_layers_are_not_handed_out(make_head):
    head = make_head("eagle3", taps=[1, 2, 4], target_layers=5)
    for format, words in (("trtllm", "a target of 5 blocks"), ("eagle", "taps [1, 2, 4]")):
        (fault,) = audit(head, format, None, INFO)
        assert words in fault and "format=vllm" in fault
    assert audit(head, "vllm", None, INFO) == []


def test_a_folder_of_another_toolkit_and_a_broken_section_are_errors_that_say_what_to_do(make_head, spoil):
    for number, (change, words) in enumerate([
        (lambda c: c.pop("headtrain"), "import the head first (headtrain import)"),
        (lambda c: c.update(headtrain=[]), "its headtrain section does not fit"),
        (lambda c: c["headtrain"].update(unroll="five"), "unroll='five' is no int"),
        (lambda c: c["headtrain"].update(type="eagle9"), "eagle9"),
    ]):  # fmt: skip
        head = make_head("eagle3", f"broken{number}")
        spoil(head, config=change)
        for format in ("vllm", "speculators", "mtp"):
            (fault,) = audit(head, format, None, INFO)
            assert words in fault


@pytest.mark.parametrize(("format", "version"), [("medusa", None), ("vllm", "0.32.0")])
def test_no_engine_loads_a_medusa_head_with_a_reduced_draft_vocabulary(format, version, make_head):
    (fault,) = audit(make_head("medusa", draft_vocab_size=50), format, version, INFO)
    assert "draft vocabulary of 50" in fault and "head.draft_vocab=full" in fault


def test_several_blocks_are_not_for_the_original_medusa_code(make_head):
    head = make_head("medusa", blocks=2)
    (fault,) = audit(head, "medusa", None, INFO)
    assert "2 blocks per head" in fault and "format=vllm engine_version=0.32.0" in fault
    assert audit(head, "vllm", "0.32.0", INFO) == []


@pytest.mark.parametrize(("version", "runs"), [
    (None, False), ("0.33.0", False), ("0.34.1rc1", False), ("1.0", False), ("0.32.0", True), ("v0.31.2", True),
    ("0.9.0.post1", True), ("0.32", True),
])  # fmt: skip
def test_medusa_goes_to_releases_of_vllm_that_have_it(version, runs, make_head, tmp_path):
    head = make_head("medusa")
    assert bool(audit(head, "vllm", version, INFO)) != runs
    if runs:
        text = (export(head, "vllm", tmp_path / "out", INFO, engine_version=version) / "README.md").read_text()
        assert '"method": "medusa"' in text and '"num_speculative_tokens": 3' in text


def test_a_version_that_is_none_is_an_error(make_head):
    for text in ("latest", "0.32.x", "32-0"):
        with pytest.raises(ValueError, match="no release"):
            audit(make_head("medusa"), "vllm", text, INFO)
    with pytest.raises(ExportError, match="format=eagle is of no engine"):
        export(make_head("eagle"), "eagle", "nowhere", INFO, engine_version="0.32.0")


# Layer ids, worked by hand: (taps of 36 blocks, release, family of the target, ids that SGLang is given).
SGLANG = [
    ([2, 18, 33], None, None, [1, 17, 32]),
    ([2, 18, 33], "0.5.23", "deepseek_v3", [1, 17, 32]),
    ([4, 12, 20], "0.5.23", "llama", [3, 11, 19]),
    ([4, 12, 20], "0.5.23", "deepseek_v3", [4, 12, 20]),
    ([4, 12, 20], "0.5.13", "kimi_k25", [4, 12, 20]),
    ([4, 12, 20], "0.5.12.post1", "deepseek_v3", [3, 11, 19]),
    ([4, 12, 20], "0.5.12", None, [3, 11, 19]),
    ([1, 12, 20], "0.5.23", "llama", [0, 11, 19]),
]


@pytest.mark.parametrize(("taps", "version", "family", "ids"), SGLANG)
def test_sglang_gets_layer_ids_as_its_release_counts_them(taps, version, family, ids, make_head, tmp_path):
    head = make_head("eagle3", taps=taps, target_layers=36)
    out = export(head, "sglang", tmp_path / "out", INFO | {"family": family}, engine_version=version)
    alone = make_head("eagle3", "alone", taps=taps, target_layers=36, made_for={"family": family})
    for folder in (out, export(alone, "sglang", tmp_path / "alone-out", engine_version=version)):
        config = json.loads((folder / "config.json").read_text())
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
        assert config["eagle_aux_hidden_state_layer_ids"] == taps
    assert (taps[0] == 2) != (f"counted for SGLang {version}" in (out / "README.md").read_text())


def test_taps_that_sglangs_releases_read_differently_need_a_release(make_head):
    head = make_head("eagle3", taps=[4, 12, 20], target_layers=36)
    (fault,) = audit(head, "sglang", None, INFO)
    assert "taps [4, 12, 20]" in fault and "engine_version=0.5.23" in fault
    head = make_head("eagle3", taps=[1, 12, 20], target_layers=36)
    (fault,) = audit(head, "sglang", "0.5.23", INFO | {"family": "deepseek_v3"})
    assert "cannot be told to start at tap 1" in fault


def test_versions_are_said_for_one_format_or_for_each():
    assert versions(None, ["vllm", "sglang"]) == {} and versions("0.32.0", ["vllm"]) == {"vllm": "0.32.0"}
    said = {"vllm": "0.32.0", "sglang": "0.5.9"}
    assert versions("vllm=0.32.0, sglang=0.5.9", ["vllm", "sglang", "trtllm"]) == said
    for text, formats, words in (
        ("0.32.0", ["vllm", "sglang"], "of which format"),
        ("gguf=1", ["vllm"], "none of the formats"),
        ("vllm=new", ["vllm"], "no release"),
    ):
        with pytest.raises(ValueError, match=words):
            versions(text, formats)


def test_a_plan_is_refused_before_the_run_begins():
    check_plan("eagle3", ["vllm", "sglang", "trtllm", "speculators", "eagle"], None)
    check_plan("medusa", ["vllm", "medusa"], "vllm=0.32.0")
    for format in ("vllm", "medusa"):
        with pytest.raises(ExportError, match=r"head\.draft_vocab=8192\); set head\.draft_vocab=full"):
            check_plan(
                "medusa", [format], "vllm=0.32.0" if format == "vllm" else None, None, HeadSection(draft_vocab=8192)
            )
    with pytest.raises(ExportError, match="removed Medusa"):
        check_plan("medusa", ["vllm"], None)
    with pytest.raises(ExportError, match="no parallel drafting"):
        check_plan("peagle", ["vllm", "sglang"], None)


@pytest.mark.parametrize("key", ["norm_before_residual", "norm_output"])
def test_a_setting_that_a_format_cannot_say_is_refused_before_the_run_begins_and_only_then(key, make_head):
    head = make_head("eagle3", **{key: True})
    for format in ("eagle", "sglang", "speculators", "trtllm", "vllm"):
        faults = audit(head, format, None, INFO)
        try:
            check_plan("eagle3", [format], None, None, HeadSection(**{key: True}))
        except ExportError as error:
            assert key in str(error) and faults, format
        else:
            assert not faults, format


def test_fit_says_so_at_once(headtrain, recipe):
    done = headtrain("fit", f"recipe={recipe}", "head.type=medusa", "head.taps=null", "export.formats=[sglang]")
    assert done.returncode == 2 and "format=sglang takes no Medusa heads" in done.stderr, done.stderr
    done = headtrain("fit", f"recipe={recipe}", "export.formats=[onnx]")
    assert done.returncode == 2 and "speculators" in done.stderr


# ------------------------------------------------------------------------------------------------- spoiled heads

@pytest.mark.parametrize(("kind", "format"), WORKS)
def test_every_missing_unknown_broken_or_untrained_tensor_is_named(kind, format, make_head, spoil):
    head = make_head(kind)
    names = [name for name in load_file(head / "model.safetensors")]
    for number, name in enumerate(names):
        head = make_head(kind, f"missing{number}")
        spoil(head, tensors=lambda t, name=name: t.pop(name))
        assert f"tensor {name} is missing" in found(head, kind, format)
    matrix = next(name for name in names if name.endswith(("q_proj.weight", "layers.0.weight")))
    for number, (change, words) in enumerate({
        f"tensor {matrix} has 2 values that are NaN or infinite": lambda t: t[matrix].view(-1)[3:5].fill_(float("inf")),
        f"tensor {matrix} holds 0 everywhere: it was never trained": lambda t: t[matrix].zero_(),
        f"tensor {matrix} has shape": lambda t: t.update({matrix: t[matrix][:-1]}),
        "tensor extra.weight is not one the engine knows": lambda t: t.update({"extra.weight": torch.ones(2)}),
    }.items()):  # fmt: skip
        head = make_head(kind, f"spoiled{number}")
        spoil(head, tensors=words)
        assert any(line.startswith(change) for line in found(head, kind, format)), found(head, kind, format)


@pytest.mark.parametrize(("kind", "format"), WORKS)
def test_what_the_targets_config_would_bring_along_is_refused(kind, format, make_head, spoil):
    head = make_head(kind)
    more = {"quantization_config": {"quant_method": "fp8"}, "_name_or_path": "/mine", "auto_map": {}}
    spoil(head, config=lambda c: c.update(more))
    assert {line.split()[1] for line in found(head, kind, format)} == set(more)


def test_a_bias_that_engines_treat_differently_is_refused(make_head, spoil):
    head = make_head("eagle")
    spoil(head, tensors=lambda t: t["fc.bias"].fill_(0.1))
    for format in ("vllm", "sglang", "eagle"):
        assert audit(head, format, None, INFO) == [
            "tensor fc.bias must be zero: vLLM ignores it and SGLang adds it, so it has to change nothing"
        ]


def test_two_norms_of_a_layer_that_differ_are_refused(make_head, spoil):
    head = make_head("peagle")
    spoil(head, tensors=lambda t: t.update({"layers.1.hidden_norm.weight": torch.ones(64)}))
    (fault,) = audit(head, "vllm", None, INFO)
    assert fault.startswith("tensor layers.1.hidden_norm.weight must equal layers.1.input_layernorm.weight")


@pytest.mark.parametrize(("kind", "format"), WORKS)
def test_a_head_for_another_target_is_refused(kind, format, make_head, tmp_path):
    info = INFO | {"vocab_size": 32000, "num_layers": 8}
    with pytest.raises(ExportError) as caught:
        export(make_head(kind), format, tmp_path / "out", info, engine_version=VERSION.get((kind, format)))
    assert caught.value.faults == ["the target has vocab_size 32000, but the head was made for 200"]


@pytest.mark.parametrize(("kind", "format"), [pair for pair in WORKS if pair[1] in ("vllm", "sglang", "trtllm")])
def test_an_exported_folder_is_sound_too(kind, format, make_head, tmp_path):
    version = VERSION.get((kind, format)) or ("0.5.23" if format == "sglang" else None)
    info = INFO | {"family": "deepseek_v3"}
    head = make_head(kind, **({"taps": [3, 4, 6]} if kind == "eagle3" else {}))
    out = export(head, format, tmp_path / "out", info, engine_version=version)
    assert audit(out, format, version, info) == []


def test_every_pair_that_works_has_a_contract_that_says_what_was_run():
    engines = {"trtllm": "tensorrt_llm"}
    for kind, format in [*WORKS, ("mtp", "vllm"), ("mtp", "sglang"), ("mtp", "trtllm")]:
        contract = load_contract(engines.get(format, format), kind)
        assert contract["version"] and contract["executed"] and contract["head"] == kind
