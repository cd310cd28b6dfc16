"""The cost model: its arithmetic by hand, its predictions against a simulated decoder, its timings on a tiny target."""

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from headtrain.eval import cost
from headtrain.eval.cost import (
    Costs,
    at,
    best,
    cut,
    longest,
    measure_costs,
    oracle,
    overhead_seconds,
    predict,
    stops_paying,
    without_prefill,
)
from headtrain.eval.decoder.drafters import make_drafter

HEAD = ("head", "head", "chain")
STEPS = Counter([(4, 4), (4, 2), (4, 0), (4, 3), (4, 1)])


def verify_s(tokens, batch):
    return 0.010 + 0.001 * tokens * batch


def draft_s(k, batch):
    return 0.002 * k + 0.00015 * k * batch


def table(batches=(1, 4), sizes=(1, 2, 4, 8), labels=HEAD):
    """Rows as `measure_costs` makes them, on a machine with the costs above."""
    names = dict(zip(("drafter", "head", "tree"), labels, strict=True))
    rows = [{"what": "verify", "tokens": n, "batch": b, "seconds": verify_s(n, b)} for b in batches for n in sizes]
    return rows + [
        {"what": "draft", **names, "k": k, "tokens": k, "batch": b, "seconds": draft_s(k, b)}
        for b in batches for k in sizes
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(("x", "y"), [(1, 10), (2, 20), (3, 25), (4, 30), (6, 40), (0.5, 5)])
def test_times_are_interpolated_between_measured_sizes_and_go_on_beyond_them(x, y):
    assert at({4: 30, 1: 10, 2: 20}, x) == pytest.approx(y)


def test_a_fall_at_the_end_is_noise_and_not_continued():
    assert at({1: 10, 2: 12, 4: 11}, 8) == 11 and at({1: 10, 2: 12, 4: 11}, 3) == 11.5
    assert at({4: 7.0}, 1) == at({4: 7.0}, 9) == 7.0


def test_costs_are_read_at_sizes_and_batches_that_were_not_measured():
    costs = Costs(table())
    assert costs.verify(3, 2) == pytest.approx(verify_s(3, 2))
    assert costs.verify(12, 64) == pytest.approx(verify_s(12, 64)), "linear beyond both ends"
    assert costs.draft(HEAD, 5, 128) == pytest.approx(draft_s(5, 128))
    assert HEAD in costs and ("ngram", None, "chain") not in costs
    with pytest.raises(ValueError, match="verify"):
        Costs([row for row in table() if row["what"] == "draft"])


def test_a_prediction_worked_by_hand():
    # K = 2 of steps at K = 4 that accepted 4, 2, 0, 3, 1. Truncated they settle 3, 3, 1, 3, 2 tokens: tau = 12 / 5.
    # Cut, the first is 5 / 3 steps, the fourth two: 15 tokens in 20 / 3 steps, which is less.
    # A step: verify 3 positions 0.013, draft 2 0.0043, overhead 0.001; a plain one: 0.011 + 0.001.
    found = predict(Costs(table()), HEAD, STEPS, 2, 1, overhead=0.001)
    assert found["tau"] == pytest.approx(2.4)
    assert found["step"] == pytest.approx(0.0183 / 0.012)
    assert found["speedup"] == pytest.approx(2.4 * 0.012 / 0.0183)
    assert found["verify_share"] == pytest.approx(0.013 / 0.0183)
    assert not found["extrapolated"]


def test_a_cut_step_is_as_many_as_its_tokens_need():
    assert [cut(8, accepted, 2) for accepted in (0, 2, 3, 6, 8)] == [1, 1, 2, 3, 3], "9 tokens: 3 steps of 3"
    assert cut(8, 8, 4) == 9 / 5, "all held: it would have gone on"
    assert cut(2, 2, 4) == 1 == cut(0, 0, 4), "a short draft is one step at any larger K"


def test_a_batch_is_predicted_to_be_as_wide_as_its_longest_draft():
    # Half of the steps draft 4, half none: of two requests, three in four pairs are 4 wide.
    assert longest({0: 9, 4: 9}, 4, 1) == {0: 0.5, 4: 0.5}
    assert longest({0: 9, 4: 9}, 4, 2) == {0: 0.25, 4: 0.75}
    assert longest({0: 1, 1: 1, 4: 1, 3: 1}, 2, 1) == {0: 0.25, 1: 0.25, 2: 0.5}
    for batch, k in ((3, 4), (3, 2)):
        drafted = [0, 1, 1, 4]
        tuples = list(itertools.product([min(d, k) for d in drafted], repeat=batch))
        for width, share in longest(Counter(drafted), k, batch).items():
            assert share == pytest.approx(sum(max(t) == width for t in tuples) / len(tuples))


def test_a_trees_nodes_are_all_verified_at_any_depth():
    labels = ("head", "head", "4x16")
    found = predict(Costs(table(labels=labels)), labels, Counter([(16, 3), (16, 1)]), 4, 1)
    assert found["tau"] == 3 and found["step"] == pytest.approx((verify_s(17, 1) + draft_s(4, 1)) / verify_s(1, 1))


def test_the_best_k_is_the_fastest_and_among_equals_the_shallowest():
    assert best([{"k": 3, "speedup": 1.2}, {"k": 2, "speedup": 1.2}, {"k": 1, "speedup": 1.1}])["k"] == 2


def test_the_batch_where_drafting_stops_paying_is_the_first_slower_than_plain():
    assert stops_paying(lambda batch: 2 / batch) == 3
    assert stops_paying(lambda batch: 1.0) is None
    costs = Costs(table())
    batch = stops_paying(lambda b: best(predict(costs, HEAD, STEPS, k, b) for k in range(1, 5))["speedup"])
    # By the formula with the machine's costs: the best K at batch b, written out again.
    tau = {1: 1.8, 2: 2.4, 3: 15 / 5.25, 4: 3.0}
    exact = [
        max(tau[k] * verify_s(1, b) / (verify_s(k + 1, b) + draft_s(k, b)) for k in tau) for b in (batch - 1, batch)
    ]
    assert exact[1] < 1 <= exact[0]


def test_bookkeeping_is_what_a_plain_run_spends_beside_its_forwards():
    # 10 s in all: 2 s prefill, 6 s forwards, 2 s bookkeeping: a third of a forward's time.
    costs = Costs(table())
    assert overhead_seconds(costs, {"verify_share": 0.6, "prefill_share": 0.2}) == pytest.approx(verify_s(1, 1) / 3)
    # Plain: 10 s, 2 of them prefill. Drafted: 6 s with the same prefill. Without it 8 s against 4 s.
    assert without_prefill({"speedup": 10 / 6, "prefill_share": 2 / 6}, {"prefill_share": 0.2}) == pytest.approx(2.0)


# ------------------------------------------------------------------------------------ against a simulation


def simulate(chances, k, batch, tokens, overhead, rng):
    """(speed-up, steps) of decoding with a drafter whose position i holds with chances[i], on the machine above."""
    seconds, emitted, steps = 0.0, 0, []
    while emitted < tokens * batch:
        for _ in range(batch):
            accepted = 0
            while accepted < k and rng.random() < chances[accepted]:
                accepted += 1
            steps.append((k, accepted))
            emitted += accepted + 1
        seconds += verify_s(1 + k, batch) + draft_s(k, batch) + overhead
    return emitted / batch * (verify_s(1, batch) + overhead) / seconds, Counter(steps)


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_predictions_for_every_k_follow_from_steps_at_the_largest(batch):
    chances, rng = [0.8, 0.75, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5], random.Random(1)
    _, steps = simulate(chances, 8, 1, 60_000, 0.001, rng)
    costs = Costs(table(batches=(1, 4, 32)))
    for k in range(1, 9):
        measured, own = simulate(chances, k, batch, 60_000 // batch, 0.001, rng)
        assert predict(costs, HEAD, own, k, batch, 0.001)["speedup"] == pytest.approx(measured, rel=1e-9)
        assert predict(costs, HEAD, steps, k, batch, 0.001)["speedup"] == pytest.approx(measured, rel=0.04)


def test_text_that_alternates_between_copies_and_new_words_is_predicted_for_every_k():
    # 80 tokens can be copied to their end, then 20 cannot: an n-gram's steps at K = 8 cross the copy in few steps.
    def run(k):
        steps, at = [], 0
        while at < 10_000:
            right = max(0, 80 - at % 100 - 1)
            steps.append((k, min(k, right)))
            at += steps[-1][1] + 1
        return Counter(steps)

    costs, long = Costs(table()), run(8)
    for k in range(1, 9):
        tau = 1 + sum(a * n for (_, a), n in run(k).items()) / sum(run(k).values())
        assert predict(costs, HEAD, long, k, 1)["tau"] == pytest.approx(tau, rel=0.02)
    truncated = 1 + sum(min(a, 1) * n for (_, a), n in long.items()) / sum(long.values())
    assert truncated < 0.85 * (1 + sum(a * n for (_, a), n in run(1).items()) / sum(run(1).values()))


# -------------------------------------------------------------------------------------------------- bounds


def test_the_oracle_takes_the_cheapest_way_through_the_answer():
    # 6 tokens, 1 from the prefill. Run a starts steps at 1 (accepts 2) and 4 (0); run b at 1 (0), 2 (3).
    # Plain steps cost 1, a step with n drafts 1 + n / 10. Best: plain to 2, then b's 3 drafts to 6: 1 + 1.3.
    runs = [([2, 0, 0], lambda n: 1 + n / 10), ([0, 3], lambda n: 1 + n / 10)]
    assert oracle(6, runs, 1.0) == pytest.approx(2.3)
    # a alone: 2 drafts to 4, then two plain steps: 1.2 + 2.
    assert oracle(6, runs[:1], 1.0) == pytest.approx(3.2)
    # Where drafts cost more than they save, plain decoding is the bound; one token is the prefill's.
    assert oracle(6, [([4], lambda n: 9.0)], 1.0) == 5.0 and oracle(1, [], 1.0) == 0.0


def test_the_oracle_equals_a_search_over_all_ways():
    rng = random.Random(0)

    def ways(at_token, tokens, offers):
        if at_token == tokens:
            return 0.0
        found = [1.0 + ways(at_token + 1, tokens, offers)]
        for a, price in offers.get(at_token, []):
            found += [price(n) + ways(min(tokens, at_token + n + 1), tokens, offers) for n in range(1, a + 1)]
        return min(found)

    for _ in range(30):
        tokens, runs, offers = 10, [], {}
        for _ in range(2):
            accepted, start, slope = [], 1, rng.choice((0.05, 0.3, 1.2))
            while start < tokens:
                a = min(rng.randrange(4), tokens - start - 1)
                offers.setdefault(start, []).append((a, lambda n, slope=slope: 1 + slope * n))
                accepted.append(a)
                start += a + 1
            runs.append((accepted, lambda n, slope=slope: 1 + slope * n))
        assert oracle(tokens, runs, 1.0) == pytest.approx(ways(1, tokens, offers))


# ----------------------------------------------------------------------------------------------- measuring


def test_every_size_batch_and_drafter_is_timed(target, head, prompts):
    texts = [(prompt, [7, 8, 9, 7, 8, 9, 7, 8]) for prompt in prompts[:3]]
    runs = [
        ({"drafter": "head", "head": "a", "tree": "chain"}, make_drafter("head", head), 3),
        ({"drafter": "head+ngram", "head": "a", "tree": "chain"}, make_drafter("head+ngram", head), 3),
        ({"drafter": "ngram", "head": None, "tree": "chain"}, make_drafter("ngram"), 3),
    ]
    rows = measure_costs(target, runs, texts, [2, 1, 5], rounds=3)
    forwards = [(row["batch"], row["tokens"]) for row in rows if row["what"] == "verify"]
    assert forwards == [(b, n) for b in (1, 2, 5) for n in (1, 2, 3, 4)]
    drafts = [(row["batch"], row["drafter"], row["k"]) for row in rows if row["what"] == "draft"]
    assert drafts == [(b, d, k) for b in (1, 2, 5) for d in ("head", "head+ngram", "ngram") for k in (1, 2, 3)]
    assert all(row["seconds"] > 0 and row["context"] > 0 for row in rows)
    costs = Costs(rows)
    assert costs.draft(("head", "a", "chain"), 3, 1) > costs.draft(("ngram", None, "chain"), 3, 1)


def test_medians_of_turns_taken_in_order_are_what_a_clock_says(target, monkeypatch):
    now = itertools.count()  # a clock that moves by one at every look
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    runs = [({"drafter": "ngram", "head": None, "tree": "chain"}, make_drafter("ngram"), 2)]
    rows = measure_costs(target, runs, [([3, 4], [5, 6, 7])], [1], rounds=2)
    assert [(row["what"], row["tokens"], row["seconds"]) for row in rows] == [
        ("verify", 1, 1.0), ("verify", 2, 1.0), ("verify", 3, 1.0), ("draft", 1, 1.0), ("draft", 2, 1.0)
    ]  # fmt: skip


def test_a_drafter_is_timed_on_what_the_answer_says(target):
    told = []

    class Spy(type(make_drafter("ngram"))):
        def observe(self, news):
            told.append([row[: int(n)] for row, n in zip(news.tokens, news.counts_B, strict=True)])
            assert news.tokens_BL.tolist() == news.tokens
            super().observe(news)

    texts = [([3, 4, 5], [6, 7, 8, 9, 10])]
    measure_costs(target, [({"drafter": "ngram", "head": None, "tree": "chain"}, Spy(), 1)], texts, [1], rounds=2)
    assert told == [[[4, 5, 6]], [[7, 8]], [[9, 10]], [[4, 5, 6]], [[7, 8]]]


def test_a_drafter_on_the_targets_own_layers_is_timed_with_a_cache_of_the_text(target):
    from headtrain.eval.decoder.drafters import Drafting

    drafter = make_drafter("layer_skip", target=target, drafting=Drafting(skip_from=1))
    texts = [([3, 4, 5], [6, 7, 8, 9, 10, 11]), ([3, 4], [6, 7, 8, 9, 10, 11])]
    rows = measure_costs(target, [({"drafter": "layer_skip"}, drafter, 4)], texts, [2], rounds=2)
    assert [row["k"] for row in rows if row["what"] == "draft"] == [1, 2, 4]


def test_a_forward_of_a_target_with_running_states_is_timed_from_the_same_states_each_time(make, monkeypatch):
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    delta = {f"linear_{a}_head_dim": 8 for a in ("key", "value")} | {"linear_num_key_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    target, _ = make[0]("qwen3_next", layer_types=kinds, linear_num_value_heads=4, **delta, **experts)
    found, logits = {}, target.logits
    monkeypatch.setattr(target, "logits", lambda last: found.setdefault(last.shape[1], []).append(last) or logits(last))
    runs = [({"drafter": "ngram"}, make_drafter("ngram"), 2)]
    rows = measure_costs(target, runs, [([3, 4, 5], [6, 7, 8, 9]), ([3, 4], [6, 7, 8])], [2], rounds=3)
    assert [(row["what"], row["tokens"]) for row in rows] == [("verify", n) for n in (1, 2, 3)] + [
        ("draft", 1), ("draft", 2)
    ]  # fmt: skip
    assert {n: len(same) for n, same in found.items()} == {1: 4, 2: 4, 3: 4}
    assert all(again.equal(same[0]) for same in found.values() for again in same)


def test_without_texts_there_is_nothing_to_time_on(target):
    with pytest.raises(ValueError, match="at least one prompt"):
        measure_costs(target, [], [], [1])
