"""Layer numberings: one choice of taps, written down for every engine."""

import json
import shlex
import subprocess
import sys

import pytest

from headtrain.engines import (
    TapsError,
    check_taps,
    default_taps,
    engine_ids,
    servable_name,
    serve_command,
    sglang_rules_agree,
    taps_from_ids,
)

# Worked by hand for a target of 36 blocks: (engine, taps, ids).
TABLE = [
    ("vllm", [2, 18, 33], [2, 18, 33]),
    ("vllm", [4, 12, 20], [4, 12, 20]),
    ("llama_cpp", [4, 12, 20], [4, 12, 20]),
    ("sglang", [2, 18, 33], [1, 17, 32]),
    ("sglang", [4, 12, 20], [3, 11, 19]),
    ("sglang_first_is_1", [2, 18, 33], [1, 17, 32]),
    ("sglang_first_is_1", [4, 12, 20], [4, 12, 20]),
    ("tensorrt_llm", [2, 18, 33], [1, 17, 32]),
    ("tensorrt_llm", [4, 12, 20], [3, 11, 19]),
]


@pytest.mark.parametrize(("engine", "taps", "ids"), TABLE)
def test_taps_are_written_in_each_engines_own_numbers_and_read_back(engine, taps, ids):
    assert engine_ids(engine, taps, 36) == ids
    assert taps_from_ids(engine, ids, 36) == taps


@pytest.mark.parametrize("engine", ["vllm", "sglang", "sglang_first_is_1", "tensorrt_llm"])
def test_without_ids_every_engine_captures_the_default_trio(engine):
    assert taps_from_ids(engine, None, 36) == [2, 18, 33]


@pytest.mark.parametrize(("blocks", "taps"), [(36, [2, 18, 33]), (28, [2, 14, 25]), (61, [2, 30, 58]), (7, [2, 3, 4])])
def test_the_default_taps_of_a_target(blocks, taps):
    assert default_taps(blocks) == taps


@pytest.mark.parametrize("blocks", [3, 4, 5, 6])
def test_default_taps_of_a_tiny_target_collide_and_ask_for_explicit_ones(blocks):
    with pytest.raises(TapsError, match=r"head\.taps"):
        default_taps(blocks)


@pytest.mark.parametrize(
    ("taps", "culprit"), [([0, 12, 20], "0"), ([4, 12, 37], "37"), ([-1, 2, 3], "-1"), ([True, 2, 3], "True")]
)
def test_a_tap_the_target_does_not_have_is_an_error_that_names_it(taps, culprit):
    with pytest.raises(TapsError, match=rf"\]: {culprit} is not"):
        check_taps(taps, 36)


def test_an_empty_list_and_a_repeated_tap_are_errors():
    with pytest.raises(TapsError, match="empty"):
        check_taps([], 36)
    with pytest.raises(TapsError, match="twice"):
        check_taps([4, 4, 20], 36)


def test_columns_of_fc_come_in_ascending_order_whatever_order_was_asked_for():
    assert check_taps([20, 4, 12], 36) == [4, 12, 20]
    assert engine_ids("tensorrt_llm", [20, 4, 12], 36) == [3, 11, 19]
    assert taps_from_ids("tensorrt_llm", [19, 3, 11, 3], 36) == [4, 12, 20]
    assert taps_from_ids("vllm", [20, 4, 12], 36) == [4, 12, 20]


def test_only_a_first_tap_of_2_means_the_same_to_all_sglang_releases():
    assert sglang_rules_agree([2, 18, 33], 36)
    assert not sglang_rules_agree([4, 12, 20], 36)
    assert not sglang_rules_agree([1, 12, 20], 36)
    with pytest.raises(TapsError, match="tap 1"):
        engine_ids("sglang_first_is_1", [1, 12, 20], 36)


def test_ids_copied_unchanged_between_engines_mean_other_layers():
    assert taps_from_ids("sglang", engine_ids("vllm", [4, 12, 20], 36), 36) == [5, 13, 21]


def test_an_unknown_engine_is_an_error_that_lists_the_known_ones():
    with pytest.raises(TapsError, match="sglang_first_is_1"):
        engine_ids("vlm", [2, 18, 33], 36)


def test_the_serve_command_survives_a_shell_and_carries_valid_json():
    words = shlex.split(serve_command("vllm", "org/Name-7B", "my runs/it's a head", 4))
    assert words[:4] == ["vllm", "serve", "org/Name-7B", "--speculative-config"]
    assert json.loads(words[4]) == {"method": "eagle3", "model": "my runs/it's a head", "num_speculative_tokens": 4}
    with pytest.raises(ValueError, match="vllm, sglang, tensorrt_llm"):
        serve_command("other", "org/Name-7B", "head", 4)


def test_sglang_is_told_a_chain_as_one_token_more_than_its_steps_and_a_trees_nodes_with_the_root():
    words = shlex.split(serve_command("sglang", "org/Name-7B", "my runs/head", 4))
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert flags["--speculative-draft-model-path"] == "my runs/head" and flags["--speculative-algorithm"] == "EAGLE3"
    names = ("num-steps", "eagle-topk", "num-draft-tokens")
    assert [flags[f"--speculative-{name}"] for name in names] == ["4", "1", "5"]
    words = shlex.split(serve_command("sglang", "org/Name-7B", "head", 5, width=4, nodes=16))
    assert words[-5:] == ["5", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "17"]


@pytest.mark.parametrize(("taps", "ids"), [([2, 18, 33], None), ([4, 12, 20], [3, 11, 19])])
def test_tensorrt_llm_is_told_in_yaml_and_only_taps_that_are_not_its_default(taps, ids, tmp_path):
    import yaml

    script = serve_command("tensorrt_llm", "org/Name-7B", "runs/a: b/head", 4, taps=taps, layers=36)
    script = script.replace("trtllm-serve", "echo trtllm-serve")
    said = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["trtllm-serve", "org/Name-7B", "--config", "speculative.yaml"]
    found = yaml.safe_load((tmp_path / "speculative.yaml").read_text())["speculative_config"]
    expected = {"decoding_type": "Eagle3", "max_draft_len": 4, "speculative_model": "runs/a: b/head"}
    assert found == expected | ({"eagle3_layers_to_capture": ids} if ids else {})


def test_only_a_hub_id_is_named_in_a_serve_command(tmp_path, monkeypatch):
    assert servable_name("org/Name-7B") == "org/Name-7B"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    for local in ("models/mine", str(tmp_path / "models" / "mine"), "package:a/b.gguf", None):
        assert servable_name(local) == "TARGET"


def test_reading_the_numberings_imports_no_torch():
    code = "import sys, headtrain.engines; print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
