"""The evaluation stage: its plan, its workers, its restart, and the numbers it reports."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time

import pytest

from headtrain.config import ConfigError, RecipeConfig
from headtrain.eval.evaluate import Run, plan_units, positions_of, status, work
from headtrain.eval.results import finish
from headtrain.eval.speed import race
from headtrain.eval.suites import EvalPrompt
from headtrain.files import claimed, read_json, write_json

# What every result must have, whatever else it has.
KEYS = {
    "suite", "head", "drafter", "temperature", "top_p", "top_k", "k", "tree", "batch", "dtype", "template",
    "max_new_tokens", "min_p", "rule", "nodes_per_step", "prompts", "steps", "accepted", "accepted_per_step",
    "tokens", "tau", "alpha", "alpha_conditional", "tokens_per_s", "plain_tokens_per_s", "speedup", "draft_share",
    "verify_share", "identical_to_plain",
}  # fmt: skip


@pytest.fixture
def config():
    config = RecipeConfig()
    config.eval.k, config.eval.batch, config.eval.max_new_tokens = [3], [4], 16
    config.eval.speed_prompts, config.eval.speed_tokens, config.eval.cost_batches = [2], 8, []
    return config


@pytest.fixture
def questions(prompts):
    heldout = [EvalPrompt(f"p{i}", "heldout", [], ids) for i, ids in enumerate(prompts * 2)]
    return heldout + [EvalPrompt(f"q{i}", "other", [], ids) for i, ids in enumerate(prompts[:3])]


def by(results, **wanted):
    return [r for r in results if all(r[key] == value for key, value in wanted.items())]


def test_the_plan_covers_every_prompt_once_per_drafter_and_plain_texts_come_first(config, questions):
    units = plan_units(config, questions)
    assert units == plan_units(config, questions) and len({unit.name for unit in units}) == len(units)
    done = set()
    for unit in units:
        assert unit.needs is None or unit.needs in done
        done.add(unit.name)
    runs = [Run(), Run("head", 3, head="head"), Run("ngram", 3), Run("head+ngram", 3, head="head")]
    for run in runs:
        mine = [unit for unit in units if unit.kind == "acceptance" and unit.runs == [run]]
        assert sorted(p.id for unit in mine for p in unit.prompts) == sorted(p.id for p in questions)
    timed = [unit for unit in units if unit.kind == "speed"]
    assert [(unit.suite, unit.prompts[0].id) for unit in timed] == [
        ("heldout", "p0"), ("heldout", "p1"), ("other", "q0"), ("other", "q1"),
    ]  # fmt: skip
    assert all(unit.runs == runs and unit.batch == 1 for unit in timed)


def test_only_drafters_with_a_head_are_run_for_every_head_and_tree(config, questions):
    config.eval.tree, config.eval.temperature = ["chain", "2x6", "iid-2x4"], [0.0, 1.0]
    config.eval.drafters = ["ngram", "head"]
    units = plan_units(config, questions, heads=["a", "b"])
    for temperature, trees in ((0.0, ["chain", "2x6"]), (1.0, ["chain", "2x6", "iid-2x4"])):
        wanted = [Run(), Run("ngram", 3), *(Run("head", 3, tree, head) for head in "ab" for tree in trees)]
        timed = next(unit for unit in units if unit.kind == "speed" and unit.temperature == temperature)
        assert timed.runs == wanted
        mine = [unit.runs[0] for unit in units if unit.kind == "acceptance" and unit.temperature == temperature]
        assert set(mine) == set(wanted)


def test_costs_are_timed_once_per_head_at_the_largest_k_after_everything_else(config, questions):
    config.eval.cost_batches, config.eval.k, config.eval.temperature = [1, 4], [2, 5], [0.7, 0.0]
    first, second = plan_units(config, questions, heads=["a", "b"])[-2:]
    assert (first.kind, first.suite, first.temperature) == ("cost", "heldout", 0.0)
    assert "none-chain-k0-t0" in first.needs
    assert first.runs == [Run("head", 5, head="a"), Run("ngram", 5), Run("head+ngram", 5, head="a")]
    assert second.runs == [Run("head", 5, head="b"), Run("head+ngram", 5, head="b")]
    config.eval.drafters = ["ngram"]
    assert [unit.runs for unit in plan_units(config, questions) if unit.kind == "cost"] == [[Run("ngram", 5)]]


def test_the_tasks_of_a_suite_share_its_number_of_timed_prompts(config, questions):
    config.eval.speed_prompts = [1, 2]
    tasks = [EvalPrompt(f"{part}{i}", f"bench/{part}", [], [7]) for part in ("qa", "rag") for i in range(3)]
    timed = [unit.prompts[0].id for unit in plan_units(config, [*questions[:3], *tasks]) if unit.kind == "speed"]
    assert timed == ["p0", "qa0", "qa1", "rag0", "rag1"]


def test_speed_prompts_may_differ_per_suite(config, questions):
    config.eval.speed_prompts = [3, 0]
    timed = [unit.suite for unit in plan_units(config, questions) if unit.kind == "speed"]
    assert timed == ["heldout"] * 3
    config.eval.speed_prompts = [1, 2, 3]
    with pytest.raises(ValueError, match="one for each of 2 suites"):
        plan_units(config, questions)


def test_a_sweep_has_one_result_per_combination(config, questions, target, head, tmp_path):
    config.eval.k, config.eval.temperature, config.eval.batch = [1, 3], [0.0, 0.8], [2, 8]
    config.eval.speed_prompts = [1]
    units = plan_units(config, questions[-3:])
    work(config, target, {"head": head}, units, tmp_path)
    results = finish(units, tmp_path)["results"]
    assert len(by(results, kind="acceptance")) == 2 * 2 * (1 + 3 * 2)  # temperatures, batches, plain + drafters x k
    assert len(by(results, kind="speed")) == 2 * (1 + 3 * 2)
    alike = by(results, kind="acceptance", drafter="head", k=3, temperature=0.8)
    assert [r["batch"] for r in alike] == [2, 8] and alike[0]["accepted_per_step"] == alike[1]["accepted_per_step"]


def test_results_have_every_key_and_follow_from_the_raw_counts(config, questions, target, head, tmp_path):
    units = plan_units(config, questions)
    work(config, target, {"head": head}, units, tmp_path, workers=2)
    made = finish(units, tmp_path, [{"id": "head", "path": "head"}])
    json.dumps(made)
    assert made["heads"] == [{"id": "head", "path": "head"}] and made["costs"] == []
    assert made["units"] == len(units) and made["left_out"] == {} and status(tmp_path, units)["done"] == len(units)
    for r in made["results"]:
        assert not KEYS - r.keys()
        steps = len(r["accepted_per_step"])
        assert r["steps"] == steps and r["accepted"] == sum(r["accepted_per_step"])
        assert r["tau"] == pytest.approx(1 + r["accepted"] / steps)
        for depth, alpha in enumerate(r["alpha"], 1):
            assert alpha == pytest.approx(sum(a >= depth for a in r["accepted_per_step"]) / steps)
        assert len(r["alpha"]) == len(r["alpha_conditional"]) == r["k"]
        assert r["tokens"] == r["prompts"] + steps + r["accepted"]  # prefill's token, bonus tokens, drafts
        assert r["tau_ci"][0] <= r["tau"] <= r["tau_ci"][1]
        assert r["speedup"] == pytest.approx(r["tokens_per_s"] / r["plain_tokens_per_s"])
        assert 0 < r["draft_share"] + r["verify_share"] <= 1 and r["concurrent_workers"] == 2
        assert r["head"] == ("head" if "head" in r["drafter"] else None)
        assert [a for row in r["per_prompt"] for a in row["accepted"]] == r["accepted_per_step"]
        assert [d for row in r["per_prompt"] for d in row["drafted"]] == r["drafted_per_step"]
        assert r["nodes_per_step"] is None and r["tree"] == "chain" and r["rule"] == "exact"
        assert r["identical_to_plain"] is (None if r["drafter"] == "none" else True)
    plain = by(made["results"], kind="acceptance", suite="heldout", drafter="none")[0]
    assert plain["tau"] == 1 and plain["speedup"] == 1 and plain["prompts"] == 16
    assert len(by(made["results"], suite="other", kind="speed")) == 4


def test_two_heads_and_a_tree_are_measured_in_one_evaluation(config, questions, target, head, make, tmp_path):
    config.eval.drafters, config.eval.tree, config.eval.cost_batches = ["head", "ngram"], ["chain", "2x4"], [1]
    config.eval.speed_prompts = [1]
    heads = {"a": head, "b": make[1](target)}
    units = plan_units(config, questions[:4], list(heads))
    work(config, target, heads, units, tmp_path)
    made = finish(units, tmp_path)
    results = by(made["results"], kind="acceptance", drafter="head")
    assert [(r["head"], r["tree"]) for r in results] == [(h, t) for h in "ab" for t in ("chain", "2x4")]
    assert all(r["identical_to_plain"] for r in by(made["results"], drafter="head"))
    for r in by(results, tree="2x4"):
        assert max(r["nodes_per_step"]) == 4 and max(r["drafted_per_step"]) <= 3
        assert [n for row in r["per_prompt"] for n in row["nodes"]] == r["nodes_per_step"]
    assert len(by(made["results"], kind="acceptance", drafter="ngram")) == 1
    assert {row["what"] for row in made["costs"]} == {"draft", "verify"}


class Letters:
    """A tokenizer and a template for conversations: token = letter."""

    eos_token_id, chat_template = 5, "a template"

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(i) for i in ids if i != 5 or not skip_special_tokens)

    @staticmethod
    def encode(messages):
        return [min(ord(letter), 96) for message in messages for letter in message["content"]]


def test_a_later_turn_follows_the_targets_own_plain_answer(config, target, head, monkeypatch, tmp_path):
    monkeypatch.setattr(target, "tokenizer", Letters())
    config.eval.speed_prompts, config.eval.max_new_tokens = [1], 6
    asked = {"x": ["ABC", "DE", "FG"], "y": ["HI"], "z": ["JK", "L" * 500]}
    first = {name: [{"role": "user", "content": turns[0]}] for name, turns in asked.items()}
    talk = [EvalPrompt(name, "talks", first[name], Letters.encode(first[name]), asked[name][1:]) for name in asked]
    units = plan_units(config, talk)
    work(config, target, {"head": head}, units, tmp_path, tokenise=Letters.encode)
    plain = {row["id"]: row for unit in units if unit.runs == [Run()] and unit.kind == "acceptance"
             for row in read_json(tmp_path / "units" / f"{unit.name}.json")["rows"]}  # fmt: skip
    answers = [Letters().decode(plain[name]["ids"], True) for name in ("x", "x turn 2")]
    assert plain["x turn 3"]["prompt_tokens"] == len("ABC" + answers[0] + "DE" + answers[1] + "FG")
    assert plain["z turn 2"]["left_out"]
    made = finish(units, tmp_path)
    for drafter in ("none", "head", "ngram"):
        (result,) = by(made["results"], kind="acceptance", drafter=drafter)
        assert [row["id"] for row in result["per_prompt"]] == ["y", "z", "x", "x turn 2", "x turn 3"]
        assert result["identical_to_plain"] is (None if drafter == "none" else True)
    assert made["left_out"] == {"longer_than_the_target's_positions": 1}
    with pytest.raises(ValueError, match="z of suite talks has later turns: work\\(\\) needs tokenise="):
        work(config, target, {"head": head}, units[:1], tmp_path / "again")


def test_a_lossy_rule_is_named_and_not_compared_with_the_plain_text(config, questions, target, head, tmp_path):
    config.eval.rule, config.eval.temperature, config.eval.min_p, config.eval.speed_prompts = "typical", [0.8], 0.1, [0]
    units = plan_units(config, questions[:3])
    work(config, target, {"head": head}, units, tmp_path)
    for result in finish(units, tmp_path)["results"]:
        assert (result["rule"], result["min_p"], result["identical_to_plain"]) == ("typical", 0.1, None)


def test_a_text_that_differs_from_the_plain_one_is_reported_with_both_logits(config, questions, target, head, tmp_path):
    config.eval.drafters, config.eval.speed_prompts = ["ngram"], [0]
    units = plan_units(config, questions[:4])
    work(config, target, {}, units[:1], tmp_path)
    path = tmp_path / "units" / f"{units[0].name}.json"
    written = read_json(path)
    written["rows"][2]["ids"][5] += 1  # the stored plain text is now wrong in one place
    write_json(path, written)
    work(config, target, {}, units, tmp_path)
    result = by(finish(units, tmp_path)["results"], drafter="ngram")[0]
    assert result["identical_to_plain"] is False
    assert len(result["differences"]) == 1 and "token 5: plain" in result["differences"][0]


def test_a_prompt_beyond_the_targets_positions_is_left_out_and_counted(config, questions, target, tmp_path):
    config.eval.drafters = ["ngram"]
    long = EvalPrompt("long", "heldout", [], [7] * 505)
    units = plan_units(config, [*questions[:3], long])
    work(config, target, {}, units, tmp_path)
    made = finish(units, tmp_path)
    assert made["left_out"] == {"longer_than_the_target's_positions": 1}
    assert {r["prompts"] for r in by(made["results"], kind="acceptance")} == {3}


def test_costs_are_timed_on_the_first_suite_with_a_prompt_that_fits(config, questions, target, tmp_path):
    config.eval.drafters, config.eval.cost_batches = ["ngram"], [1]
    long = [EvalPrompt(f"long{i}", "essays", [], [7] * 505) for i in range(2)]
    units = plan_units(config, long + questions[:3], positions=positions_of(target))
    assert [unit.suite for unit in units if unit.kind == "cost"] == ["heldout"]
    work(config, target, {}, units, tmp_path / "some")
    made = finish(units, tmp_path / "some")
    assert made["costs"] and {r["suite"] for r in made["results"]} == {"heldout"}
    units = plan_units(config, long, positions=positions_of(target))
    work(config, target, {}, units, tmp_path / "none")
    made = finish(units, tmp_path / "none")
    assert (made["results"], made["costs"]) == ([], []) and set(made["left_out"].values()) == {2}


@pytest.mark.parametrize("setting, said", [
    ({"tree": ["chain", "41x50"]}, "head a, eval.tree=41x50: .*the head has 40"),
    ({"tree": ["static-4"]}, "head a, eval.tree=static-4: a static tree is for heads that draft by depth"),
    ({"k": [2, 5]}, "head b, eval.k=5: .*drafts at most 3 tokens"),
    ({"drafters": ["layer_skip"]}, "eval.drafters=layer_skip: "),
])  # fmt: skip
def test_what_a_head_cannot_do_is_said_before_anything_is_decoded(
    setting, said, config, questions, target, head, tmp_path
):
    from headtrain.heads.medusa import MedusaConfig, MedusaHead

    vars(config.eval).update(setting)
    medusa = MedusaHead(MedusaConfig(
        hidden_size=64, target_hidden_size=64, vocab_size=97, draft_vocab_size=97, unroll=3, target_layers=3,
    ))  # fmt: skip
    heads = {"a": head, "b": medusa}
    units = plan_units(config, questions, list(heads))
    with pytest.raises(ConfigError, match=said):
        work(config, target, heads, units, tmp_path)
    assert status(tmp_path, units)["done"] == 0


def test_drafters_that_are_timed_remember_nothing_of_the_warm_up(config, questions, target, tmp_path, monkeypatch):
    config.eval.drafters = ["suffix"]
    timed = [unit for unit in plan_units(config, questions) if unit.kind == "speed"]
    raced = []
    spy = lambda target, runs, *rest, **more: raced.append([d for d, _ in runs]) or race(target, runs, *rest, **more)  # noqa: E731
    monkeypatch.setattr("headtrain.eval.speed.race", spy)
    work(config, target, {}, timed[:1], tmp_path)
    warm, real = raced
    assert len(warm) == len(real) == 2 and not {*map(id, warm)} & {*map(id, real)}


def test_unfinished_or_untokenised_work_is_refused(config, questions, tmp_path):
    units = plan_units(config, questions)
    with pytest.raises(ValueError, match="not finished; start it again"):
        finish(units, tmp_path)
    with pytest.raises(ValueError, match="prompt x of suite heldout has no token ids"):
        plan_units(config, [EvalPrompt("x", "heldout", [])])


def test_units_claimed_by_another_process_are_left_to_it(config, questions, target, tmp_path):
    config.eval.drafters, config.eval.speed_prompts = ["ngram"], [0]
    units = plan_units(config, questions[:4])[:1]
    asleep, file = [], tmp_path / "units" / f"{units[0].name}.json"
    with claimed(tmp_path / "claims" / f"{units[0].name}.lock") as mine, pytest.MonkeyPatch.context() as patch:
        assert mine
        patch.setattr(time, "sleep", lambda seconds: asleep.append(seconds) or write_json(file, {}))
        work(config, target, {}, units, tmp_path)  # returns once the other one has left its file
    assert asleep and read_json(file) == {}


def _worker(make_units, folder):
    import torch

    torch.set_num_threads(1)
    config, target, units = make_units()
    work(config, target, {}, units, folder, workers=2)


def test_a_killed_worker_loses_its_unit_only_and_the_texts_are_the_same_as_alone(config, questions, target, tmp_path):
    config.eval.drafters, config.eval.speed_prompts, config.eval.batch = ["ngram"], [0], [1]
    config.eval.temperature, config.eval.max_new_tokens = [0.0, 0.9], 8
    units = plan_units(config, questions[:16])
    start, made = multiprocessing.get_context("fork"), lambda: (config, target, units)
    workers = [start.Process(target=_worker, args=(made, tmp_path / "shared")) for _ in range(2)]
    for process in workers:
        process.start()
    while status(tmp_path / "shared", units)["done"] < 3:
        time.sleep(0.005)
        assert any(process.is_alive() for process in workers)
    os.kill(workers[0].pid, signal.SIGKILL)
    for process in workers:
        process.join()
    assert workers[1].exitcode == 0 and status(tmp_path / "shared", units)["done"] == len(units)
    work(config, target, {}, units, tmp_path / "alone")
    for unit in units:
        rows = [read_json(tmp_path / where / "units" / f"{unit.name}.json")["rows"] for where in ("shared", "alone")]
        assert [r["ids"] for r in rows[0]] == [r["ids"] for r in rows[1]]
