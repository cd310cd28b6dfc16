"""The model card says what was measured, how, on what and for which target, and names what is not known."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from headtrain.config import HEAD_TYPES, KINDS
from headtrain.export.hub import gather
from headtrain.export.model_card import cleaned, commit_message, name_of, read_licence


def card_of(run) -> str:
    return gather(run / "head", "ann/mine")[0]["README.md"].decode()


def parts(card: str) -> tuple[dict, str]:
    """(the Hub's metadata, the text)."""
    _, head, text = card.split("---\n", 2)
    return yaml.safe_load(head), text


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def table(text: str) -> list[list[str]]:
    rows = [line for line in section(text, "Acceptance").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_hub_reads_library_target_and_tags(run, hub):
    metadata, text = parts(card_of(run))
    assert metadata == {
        "library_name": "headtrain", "base_model": "lab/Target-1B",
        "tags": ["speculative-decoding", "draft-head", "eagle3"],
    }  # fmt: skip
    assert "# EAGLE-3 draft head for Target-1B\n" in text and f"`lab/Target-1B` (commit {40 * 'c'})" in text


def test_every_number_of_the_table_is_the_reports_and_the_formula_stands_below(run, hub, made):
    made.report(run, [
        made.result(), made.result("ngram", tau=1.7, alpha=[0.3]),
        made.result(suite="gsm8k", k=3, temperature=0.7, top_p=0.9, rule="block", tau=2.03, alpha=[0.5, None]),
        made.result(tree="4x16", tau=3.1), made.result("none", tau=1.0, alpha=[]), made.result(tau=None),
        made.result(kind="speed", batch=1, prompts=4, speedup=1.614, tau=2.4),
    ])  # fmt: skip
    _, text = parts(card_of(run))
    assert table(text)[1:] == [
        ["heldout", "head", "K = 5, chain", "greedy", "8", "40", "2.50", "0.60 0.40 0.25 0.15 0.10", "1.61×"],
        ["heldout", "ngram", "K = 5, chain", "greedy", "8", "40", "1.70", "0.30", "–"],
        ["gsm8k", "head", "K = 3, chain", "T = 0.7, top_p 0.9, block verification", "8", "40", "2.03", "0.50 –", "–"],
        ["heldout", "head", "depth 5, tree 4x16", "greedy", "8", "40", "3.10", "0.60 0.40 0.25 0.15 0.10", "–"],
    ]
    said = section(text, "Acceptance")
    assert "τ = 1 + accepted draft tokens / steps" in said and "α_k = share of the steps" in said
    assert "target in float32" in said and "at most 128 new tokens" in said
    assert "on 2 × NVIDIA H200, at batch 1, 4 prompts" in said
    assert "In all 2 greedy measurements the text equals plain greedy decoding." in said
    limits = section(text, "Limits")
    assert "Measured on heldout, gsm8k only" in limits and "Greedy decoding only" not in limits


def test_numbers_of_another_head_in_the_same_report_stay_out(run, hub, made):
    made.report(run, [made.result(), made.result(head="other", tau=4.9)])
    assert [row[6] for row in table(parts(card_of(run))[1])[1:]] == ["2.50"]


def test_a_report_about_other_weights_is_not_quoted(run, hub):
    path = run / "report" / "report.json"
    path.write_text(path.read_text().replace(json.loads(path.read_text())["heads"][0]["sha256"], 64 * "0"))
    files, facts = gather(run / "head", "ann/mine")
    text = files["README.md"].decode()
    assert {"report.json", "report.html"}.isdisjoint(files) and "2.50" not in text
    assert "Not measured" in text and "Neither acceptance nor speed was measured." in text
    assert commit_message(facts) == "EAGLE-3 head, not measured"


@pytest.mark.parametrize(("rows", "words"), [
    ([{}], ["Greedy decoding only", "Speed was not measured", "Nothing was measured in a serving engine",
            "128 of the target's 384 tokens"]),
    ([{"identical_to_plain": False}], ["Speculative text differed from plain greedy text"]),
    ([{"rule": "typical"}], ["Greedy decoding only"]),
])  # fmt: skip
def test_what_was_not_measured_is_named(rows, words, run, hub, made):
    made.report(run, [made.result(**row) for row in rows])
    text = parts(card_of(run))[1]
    assert all(word in section(text, "Limits") for word in words)
    assert ("typical acceptance (changes the output)" in text) == ("rule" in rows[0])


def test_the_message_quotes_only_lossless_greedy_chains_of_the_head_alone(run, hub, made):
    others = [{"rule": "typical"}, {"temperature": 1.0}, {"tree": "4x16"}, {"kind": "speed"}, {"tau": None}]
    made.report(run, [made.result("head+ngram", tau=9.0)] + [made.result(**{"tau": 9.0} | row) for row in others])
    assert commit_message(gather(run / "head", "a/b")[1]) == "EAGLE-3 head, not measured"


def test_data_is_named_not_located_and_counted_and_its_policy_said(run, hub, made):
    said = section(parts(card_of(run))[1], "Data")
    assert "prompts from: chats.jsonl, package:talks/t.json" in said and "the target's own answers (on-policy)" in said
    assert "20,000 responses, 5,000,000 tokens" in said and "left out of prompts: too long 7" in said
    data = {"on_policy": False, "sources": ["chats.jsonl"], "stages": {}}
    made.report(run, [made.result()], data=data)
    text = parts(card_of(run))[1]
    assert "(off-policy)" in section(text, "Data") and "not the target's own" in section(text, "Limits")


def test_without_a_run_folder_the_card_says_that_data_and_recipe_are_unknown(run, hub):
    for path in (run / "config.yaml", run / "report" / "report.json"):
        path.unlink()
    text = parts(card_of(run))[1]
    assert "Unknown: neither the run" in section(text, "Data") and "## Recipe" not in text


def test_settings_and_data_of_an_evaluation_alone_are_not_taken_for_those_the_head_was_made_with(run, hub, made):
    made.report(run, [made.result()], training={"steps": None})
    said = section(parts(card_of(run))[1], "Data")
    assert "chats.jsonl, package:talks/t.json" in said and "20,000" not in said, "of the run's config, not the report"
    shutil.rmtree(run / "training")
    text = parts(card_of(run))[1]
    assert "Unknown: neither the run" in section(text, "Data") and "## Recipe" not in text and "2.50" in text


def test_the_recipe_is_whole_but_for_what_only_this_machine_has(run, hub, made):
    text = card_of(run)
    kept = yaml.safe_load(section(text, "Recipe").split("```yaml\n")[1].split("```")[0])
    assert kept["train"] == made.config["train"] and kept["head"]["init_from"] == "head" and kept["seed"] == 0
    assert kept["eval"]["suites"] == ["heldout", "own=own.jsonl"]
    assert kept["data"]["prompts"] == [{"source": "chats.jsonl"}, {"source": "package:talks/t.json"}]
    assert kept["target"]["model"] == "lab/Target-1B" and "device" not in kept["target"]
    for word in ("/home", "secret-client", "run_dir", "hostfile", "wandb", str(run)):
        assert word not in text, word


@pytest.mark.parametrize(("place", "name"), [
    ("lab/Target-1B", "lab/Target-1B"), ("package:talks/t.json", "package:talks/t.json"), ("gsm8k", "gsm8k"),
    ("/data/a/b.jsonl", "b.jsonl"), ("../client/models/x/", "x"), ("~/own", "own"), ("o=a/b/c.jsonl", "o=c.jsonl"),
])  # fmt: skip
def test_places_are_called_by_names(place, name):
    own = {"device": "cuda:1", "urls": ["http://10.0.0.1:8000"]}  # of one machine, one network
    assert name_of(place) == name and cleaned({"a": [place], "b": own}) == {"a": [name], "b": {}}


def test_a_hub_id_that_is_a_folder_here_is_a_local_place(tmp_path, monkeypatch):
    (tmp_path / "lab" / "Target-1B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert name_of("lab/Target-1B") == "Target-1B"


# ------------------------------------------------------------------------------------------------ target and licence


@pytest.mark.parametrize(("readme", "found"), [
    ("---\nlicense: apache-2.0\n---\ntext", {"license": "apache-2.0"}),
    ("---\nlicense: other\nlicense_name: l3\nlicense_link: http://x.example\ntags: [a]\n---\n",
     {"license": "other", "license_name": "l3", "license_link": "http://x.example"}),
    *((text, {}) for text in ("no metadata", "text\n---\nlicense: mit\n---\n", "---\n: [\n---\n", "---\n- a\n---", "")),
])  # fmt: skip
def test_the_licence_is_read_from_the_targets_own_card(readme, found, tmp_path):
    (tmp_path / "README.md").write_text(readme)
    assert read_licence(tmp_path) == found


def test_a_local_targets_licence_is_found_beside_it_and_its_place_is_not_told(run, hub, made, tmp_path):
    target = tmp_path / "client" / "tuned"
    target.mkdir(parents=True)
    (target / "README.md").write_text("---\nlicense: mit\n---\n")
    (target / "LICENSE").write_text("MIT License")
    made.head(run, made_for={"target": {"model": "tuned", "content": "0123"}})
    config = made.config | {"target": {"model": str(target)}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    files, _ = gather(run / "head", "ann/mine")
    metadata, text = parts(files["README.md"].decode())
    assert metadata["license"] == "mit" and "base_model" not in metadata
    assert files["LICENSE"].read_text() == "MIT License"
    assert "The target's licence applies: mit." in text and "for tuned\n" in text and "client" not in text
    assert "vllm serve TARGET" in text and "TARGET: the place of the target." in text


def test_a_licence_that_is_not_found_is_said_not_to_be(run, hub):
    metadata, text = parts(card_of(run))
    assert "license" not in metadata and "The target's licence applies; it was not found beside the target." in text


def test_an_adapter_of_the_target_is_named_and_is_a_base_model_too(run, hub, made):
    target = {"model": "lab/Target-1B", "commit": 40 * "c", "adapter": {"model": "ann/lora", "commit": 40 * "d"}}
    made.head(run, made_for={"target": target})
    metadata, text = parts(card_of(run))
    assert metadata["base_model"] == ["lab/Target-1B", "ann/lora"]
    assert "with the adapter ann/lora merged into it" in text and "vllm serve TARGET" in text


# ------------------------------------------------------------------------------------------------ every kind of head


OTHERS = ["SGLang", "TensorRT-LLM", "llama.cpp"]
COMMANDS = {  # what stands in the commands of a kind, and which engines are refused by name
    "eagle": (["vllm serve lab/Target-1B", '"method": "eagle"', "out=served format=sglang"], OTHERS[1:]),
    "eagle3": (['"model": "ann/mine"', "EAGLE3 --speculative-draft-model-path ann/mine", "decoding_type: Eagle3",
                "out=served format=gguf target=TARGET.gguf"], []),
    "medusa": (["vLLM 0.32.0", '"method": "medusa"', '"num_speculative_tokens": 3'], OTHERS),
    "mtp": (["vllm serve FOLDER", '"method": "mtp"', "headtrain export", "decoding_type: MTP"], ["llama.cpp"]),
    "peagle": (['"parallel_drafting": true'], OTHERS),
}


@pytest.mark.parametrize("kind", HEAD_TYPES)
def test_a_head_of_every_kind_gets_a_card_with_commands_that_fit_it(kind, kinds, hub):
    files, facts = gather(kinds[kind], "ann/mine")
    metadata, text = parts(files["README.md"].decode())
    assert metadata["tags"][-1] == kind and f"# {KINDS[kind]} draft head for Target-1B" in text
    said, (wanted, refused) = section(text, "Serving"), COMMANDS[kind]
    assert "headtrain eval head=ann/mine target=lab/Target-1B" in said
    assert all(word in said for word in wanted), said
    assert sorted(line[2:].split(":")[0] for line in said.splitlines() if line.startswith("- ")) == refused
    assert said.count("```") == 2 * (5 - len(refused))
    assert commit_message(facts) == f"{KINDS[kind]} head, not measured"
    assert set(files) == {"README.md", "config.json", "model.safetensors"}


def test_engines_that_do_not_read_a_setting_of_the_head_get_no_command(run, hub, made):
    made.head(run, norm_before_residual=True)
    said = section(parts(card_of(run))[1], "Serving")
    assert "vllm serve" in said and "- SGLang: it does not read norm_before_residual" in said and "sglang." not in said
    made.head(run, norm_output=True)
    said = section(parts(card_of(run))[1], "Serving")
    assert "- llama.cpp: it does not read norm_output" in said and "sglang.launch_server" in said
    for taps in ([2, 4, 8], [2, 4, 5, 6]):
        made.head(run, taps=taps)
        assert f"- llama.cpp: it reads three taps, none after the last block; this head has {taps}" in card_of(run)


def test_taps_that_releases_count_in_two_ways_are_exported_for_a_release_first(run, hub, made):
    made.head(run, taps=[3, 4, 5])
    said = section(parts(card_of(run))[1], "Serving")
    assert "headtrain export head=head out=served format=sglang engine_version=" in said
    assert "eagle3_layers_to_capture: [2, 3, 4]" in said


@pytest.mark.parametrize("draft", [128, 384])
def test_a_medusa_head_with_a_reduced_vocabulary_has_no_command_of_an_engine_that_stops_at_it(draft, run, made):
    made.head(run, type="medusa", unroll=3, taps=[], draft_vocab_size=draft)
    assert ("vllm serve" in card_of(run)) == (draft == 384)
