"""What a report shows: results side by side, τ by output depth, and the cost model applied to them; all by hand."""

import random

import pytest

from headtrain.eval.acceptance import metrics, tau_interval
from headtrain.eval.cost import BATCHES
from headtrain.eval.report_cost import apply_costs
from headtrain.eval.report_data import (
    accepted_per_node,
    by_depth,
    by_domain,
    by_temperature,
    comparisons,
    labels,
    main_comparison,
    pick,
)


def row(drafter="head", accepted=((2, 0), (1,)), k=3, kind="acceptance", **more):
    """A result with these accepted counts per prompt, as evaluation writes it."""
    plain = drafter == "none"
    k = 0 if plain else k
    steps = [[(k, a) for a in counts] for counts in accepted]
    prompts = [{"id": i, "steps": len(c), "tokens": 1 + sum(a + 1 for a in c)} for i, c in enumerate(accepted)]
    return {
        "kind": kind, "suite": "heldout", "head": "head" if "head" in drafter else None, "drafter": drafter,
        "temperature": 0.0, "k": k, "tree": "chain", "rule": "exact", "batch": 1 if kind == "speed" else 8,
        "prompts": len(accepted), "per_prompt": prompts, "accepted_per_step": [a for c in accepted for a in c],
        "drafted_per_step": [k for c in accepted for _ in c], "nodes_per_step": None, **metrics(steps, k),
        "tau_ci": tau_interval(steps, 50), "tokens_per_s": None, "plain_tokens_per_s": None, "speedup": None,
        "draft_share": None, "verify_share": None, "prefill_share": None, "identical_to_plain": None if plain else True,
        "near_ties": 0,
    } | more  # fmt: skip


# ---------------------------------------------------------------------------------------------- comparisons


def test_drafters_of_several_heads_stand_side_by_side_under_names_of_their_own():
    rows = [row(head="a"), row(head="b", accepted=((3, 3),)), row("ngram"), row("none", accepted=((0,),))]
    (group,) = comparisons(rows)
    assert list(group["drafters"]) == ["head: a", "head: b", "ngram", "none"]
    assert pick(group, "head")["head"] == "b", "the better of them"
    assert labels(rows[:1]) == {("head", "a"): "head"}, "one head needs no name"


def test_trees_and_lossy_rules_are_comparisons_of_their_own_and_plain_decoding_stands_in_each():
    rows = [row(), row(tree="4x16", nodes_per_step=[16] * 3), row(rule="typical", accepted=((3, 3),)), row("none")]
    groups = comparisons(rows)
    assert [(g["tree"], g["rule"]) for g in groups] == [("chain", "exact"), ("4x16", "exact"), ("chain", "typical")]
    assert all(list(g["drafters"]) == ["head", "none"] for g in groups)
    assert main_comparison(groups)["rule"] == "exact", "a lossy rule is never the headline"
    assert main_comparison(groups[2:])["rule"] == "typical", "unless nothing else was measured"


def test_the_headline_is_about_a_setting_that_has_the_head_and_about_what_the_head_gains_there():
    alone = row("ngram", k=7, kind="speed", speedup=3.0)
    slow, fast = row(k=3, kind="speed", speedup=0.6), row(k=5, kind="speed", speedup=0.8)
    helped = row("ngram", k=3, kind="speed", speedup=2.0)
    assert main_comparison(comparisons([alone, slow, helped, fast]))["k"] == 5
    assert main_comparison(comparisons([alone, helped]))["k"] == 7, "without a head the best of any drafter"
    assert main_comparison(comparisons([alone, slow | {"rule": "typical"}]))["rule"] == "typical"


def test_a_trees_rate_counts_its_depth_and_its_nodes_separately():
    # One step of a tree 2 deep with 6 nodes whose two right ones lie on one path.
    tree = row(accepted=((2,),), k=2, tree="2x6", nodes_per_step=[6])
    assert tree["draft_acceptance_rate"] == 1.0 and accepted_per_node(tree) == pytest.approx(2 / 6)
    assert accepted_per_node(row()) is None, "nodes of a chain are its drafted tokens"


def test_settings_that_differ_only_in_the_suite_or_the_temperature_are_found():
    changes = [{}, {"suite": "gsm8k"}, {"suite": "gsm8k", "k": 2}, {"temperature": 1.0}]
    groups = comparisons([row(**change) for change in [*changes, {"suite": "gsm8k", "temperature": 1.0}]])
    assert set(by_domain(groups, groups[0])) == {"heldout", "gsm8k"}
    assert list(by_temperature(groups, groups[-1])) == [0.0, 1.0], "in order"


def test_output_depth_counts_steps_by_the_tokens_before_them():
    # 30 steps of 1 accepted: they begin at 1, 3, 5 … 59. Fewer than 16: 8 steps, too few to say anything;
    # 16 … 31: 8; 32 … 63: 14. Twice as many prompts double that.
    short = row(accepted=([1] * 30,))
    assert by_depth(short) == []
    found = by_depth(row(accepted=([1] * 30, [0] * 30, [1] * 30)))
    assert [(d["from"], d["to"], d["steps"]) for d in found] == [(0, 16, 31), (16, 32, 31), (32, 64, 28)]
    # Before 16: 16 steps that accept 1, and 15 (at 1 … 15) that accept none.
    assert found[0]["tau"] == pytest.approx(1 + 16 / 31) and found[2]["tau"] == 2.0
    assert by_depth({"accepted_per_step": [1, 2]}) == [], "results without prompts have no depth"


# ----------------------------------------------------------------------------------------------- cost model

OVERHEAD = 0.001


def verify_s(n, batch):
    return 0.010 + 0.0007 * n * batch


def draft_s(drafter, k, batch):
    return 0.0002 if drafter == "ngram" else 0.0015 * k + 0.0001 * k * batch


def cost_rows(drafters=(("head", "head", "chain"), ("ngram", None, "chain")), batches=(1, 8), sizes=(1, 2, 4, 8, 32)):
    rows = [{"what": "verify", "tokens": n, "batch": b, "context": 9, "seconds": verify_s(n, b)}
            for b in batches for n in sizes]  # fmt: skip
    for name, head, tree in drafters:
        rows += [
            {"what": "draft", "drafter": name, "head": head, "tree": tree, "k": k, "tokens": k, "batch": b,
             "context": 9, "seconds": draft_s(name, k, b)}
            for b in batches for k in sizes
        ]  # fmt: skip
    return rows


def timed(drafter, accepted, k, batch=1, kind="speed", prefill_s=0.05, **more):
    """A row whose times are what the costs above say: its prompts one after the other, each with a prefill."""
    steps = sum(map(len, accepted))
    forward = verify_s(1 + (0 if drafter == "none" else k), batch)
    draft = 0.0 if drafter == "none" else draft_s(drafter, k, batch)
    seconds = steps * (forward + draft + OVERHEAD) + prefill_s
    tokens = sum(1 + sum(a + 1 for a in c) for c in accepted)
    shares = {"verify_share": steps * forward / seconds, "prefill_share": prefill_s / seconds, "tokens_per_s": 0.0}
    made = row(drafter, accepted, k, kind, batch=batch, draft_share=steps * draft / seconds, **shares, **more)
    return made | {"tokens": tokens, "tokens_per_s": tokens / seconds, "seconds": seconds}


def chains(chances, k, length, prompts, seed):
    """Accepted counts of prompts whose answers have `length` tokens."""
    rng, out = random.Random(seed), []
    for _ in range(prompts):
        counts, left = [], length - 1
        while left:
            a = 0
            while a < min(k, left - 1) and rng.random() < chances[a]:
                a += 1
            counts.append(a)
            left -= a + 1
        out.append(counts)
    return out


def swept(ks=(1, 3, 5), **more):
    """Plain, head and n-gram, all timed in turn with every K on answers of the same length, and measured in batches."""
    plain = timed("none", [[0] * 199] * 6, 0)
    rows = [plain, timed("none", [[0] * 199] * 6, 0, 8, "acceptance")]
    for name, chances in (("head", [0.8, 0.7, 0.6, 0.6, 0.5]), ("ngram", [0.6, 0.6, 0.5, 0.5, 0.5])):
        for k in ks:
            for kind, batch, base in (("speed", 1, plain), ("acceptance", 8, rows[1])):
                made = timed(name, chains(chances, k, 200, 6, seed=k), k, batch, kind, **more)
                rows.append(made | {"speedup": made["tokens_per_s"] / base["tokens_per_s"]})
    return rows


def test_predictions_stand_beside_measurements_and_agree_on_a_machine_that_keeps_to_the_model():
    cost = apply_costs(swept(), cost_rows())
    assert cost["overhead_s"] == pytest.approx(OVERHEAD)
    for one in cost["series"]:
        assert {p["k"] for p in one["predictions"]} == {1, 2, 3, 4, 5} and one["oracle_k"] > 1
        assert {p["batch"] for p in one["predictions"]} == set(BATCHES)
        settings = [(kind, k) for kind in ("speed", "acceptance") for k in (1, 3, 5)]
        assert [(check["kind"], check["k"]) for check in one["checks"]] == settings
        for check in one["checks"]:  # at the K that is predicted from itself exactly, at smaller ones estimated
            assert check["error"] == pytest.approx(0, abs=1e-9 if check["k"] == 5 else 0.08)
    head = cost["series"][0]
    assert [p["extrapolated"] for p in head["best"]] == [batch > 8 for batch in BATCHES]
    assert head["best"][0]["k"] > head["best"][-1]["k"] and 1 < head["stops_paying"] <= 128


def test_the_measured_speed_up_leaves_the_prefill_out():
    rows = [timed("none", [[0] * 99], 0), timed("head", [[3] * 24], 3)]
    rows[1]["speedup"] = rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"]
    (check,) = apply_costs(rows, cost_rows())["series"][0]["checks"]
    per_token = [(r["seconds"] - 0.05) / r["tokens"] for r in rows]
    assert check["measured"] == pytest.approx(per_token[0] / per_token[1])


def test_the_bounds_lie_above_every_prediction_and_those_of_several_drafters_above_each_alone():
    cost = apply_costs(swept(), cost_rows())
    alone = [one["oracle_k"] for one in cost["series"]]
    assert all(one["oracle_k"] >= one["best"][0]["speedup"] for one in cost["series"])
    (both,) = cost["combined"]
    assert both["drafters"] == ["head", "ngram"] and both["speedup"] > max(alone)
    # By hand: one prompt of 4 tokens, 2 accepted at once; drafting 2 and verifying 3 replaces 3 plain steps.
    tiny = apply_costs([row(accepted=((2,),))], cost_rows())["series"][0]["oracle_k"]
    assert tiny == pytest.approx(3 * verify_s(1, 1) / (draft_s("head", 2, 1) + verify_s(3, 1)))


@pytest.mark.parametrize("spoiled", [{"near_ties": 1}, {"identical_to_plain": False}, {"temperature": 1.0}])
def test_runs_that_did_not_write_the_same_text_have_no_bound(spoiled):
    cost = apply_costs([row(accepted=((2,),)) | spoiled], cost_rows())
    assert cost["series"][0]["oracle_k"] is None and cost["combined"] == []


def test_a_tree_is_predicted_at_the_depths_it_was_decoded_with_and_for_all_its_nodes():
    labels_of = ("head", "head", "4x16")
    rows = [row(accepted=((3, 1),), k=k, tree="4x16", nodes_per_step=[16, 9]) for k in (3, 5)]
    (one,) = apply_costs(rows, cost_rows((labels_of,)))["series"]
    found = {p["k"]: p for p in one["predictions"] if p["batch"] == 1}
    assert found.keys() == {3, 5}
    forward = (verify_s(17, 1) + verify_s(10, 1)) / 2
    assert found[3]["speedup"] == pytest.approx(3 * verify_s(1, 1) / (forward + draft_s("head", 3, 1)))


def test_results_without_steps_or_of_drafters_that_were_not_timed_are_left_out_of_the_model():
    rows = [row(), row("suffix"), row(k=5, accepted_per_step=None)]
    cost = apply_costs(rows, cost_rows())
    assert [one["drafter"] for one in cost["series"]] == ["head"] and cost["series"][0]["checks"] == []
    assert apply_costs(rows, []) is None
