"""The pure parts of benchmarks/, and our own contender at a tiny size."""

import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks/ is not installed
from benchmarks import acceptance, measure, memory, peers, steps, train_step
from headtrain.training.optim import Clock

TINY = steps.Shape(hidden=16, intermediate=24, heads=4, kv_heads=2, head_dim=8, vocab=64)


def tiny(**options) -> steps.Case:
    return steps.Case(**{"length": 20, "depths": 3, "draft_vocab": 32, "shape": TINY} | options)


def test_the_flop_formula_counts_the_matrix_products_of_the_step():
    case = tiny(supervised=0.6)
    inputs = steps.make_inputs(case)
    _, step = steps.headtrain_step(case, inputs)
    with FlopCounterMode(display=False) as counter:
        step()
    # tokens 8 … 19 are supervised: slots 7 … 17, 16, 15 at depths 0, 1, 2; slot p sees p+1 keys of depth 0
    keys = sum(slot + 1 for depth in range(3) for slot in range(7, 18 - depth))
    attention = 3 * 4 * (4 * 8) * keys  # in torch's flash kernel on a CPU, which the counter does not know
    spare = counter.get_total_flops() - (steps.step_flops(case, inputs.batch) - attention)
    taught = 11
    assert 0 <= spare <= 2 * 2 * taught * 16 * 32  # sums over the teacher instead of passes over every pair


def test_the_flop_formula_follows_the_share_of_positions_that_is_kept():
    whole, half = tiny(), tiny(keep=0.5)
    batch = steps.make_inputs(whole).batch
    assert steps.expected_pairs(whole, batch).tolist() == [18, 17, 16]
    assert steps.expected_pairs(half, batch).tolist() == [18, 8.5, 4]
    assert 0.3 < steps.step_flops(half, batch) / steps.step_flops(whole, batch) < 0.9


def test_the_target_chooses_a_token_of_the_draft_vocabulary_everywhere_and_has_unit_size():
    inputs = steps.make_inputs(tiny(length=200))
    choice = (inputs.batch.last_NT @ inputs.lm_head_VH.T).argmax(-1)
    assert torch.equal(choice, inputs.batch.argmax_N) and bool(inputs.t2d[choice].all())
    assert torch.allclose(inputs.batch.last_NT.square().mean(-1), torch.ones(200))


def test_every_contender_gets_the_same_inputs_and_documents_are_supervised_at_their_ends():
    one, other = (steps.make_inputs(tiny(contender=name, documents=2, supervised=0.5)) for name in ("a", "b"))
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    assert torch.equal(one.batch.taps_NAT, other.batch.taps_NAT) and torch.equal(one.lm_head_VH, other.lm_head_VH)
    assert one.batch.supervised_N.nonzero()[:, 0].tolist() == [*range(5, 10), *range(15, 20)]


@pytest.mark.parametrize("options", [{"dtype": "fp32"}, {"dtype": "bf16"}, {"keep": 0.5}])
def test_our_step_is_measured_and_its_loss_is_the_sum_of_its_parts(options):
    case = tiny(**options)
    torch.manual_seed(0)
    found = measure.measure_step(case.to_dict(), repeats=8)
    assert found["memory"] >= 0 and len(found["times"]) == 8 and min(t["core_s"] for t in found["times"]) > 0
    assert found["flops"] > 0
    whole = [18, 17, 16]
    if case.keep == 1:
        assert found["pairs_D"] == whole
        parts = sum(0.8**d * s / n for d, (s, n) in enumerate(zip(found["sum_D"], whole, strict=True)))
        assert found["loss"] == pytest.approx(parts, rel=1e-5)
    else:
        assert min(t["pairs"] for t in found["times"]) < sum(whole)
    if case.dtype == "fp32":  # cross-entropy is at least the teacher's entropy
        assert all(0 < e <= s + 1e-4 for e, s in zip(found["entropy_D"], found["sum_D"], strict=True) if s)


def test_a_measurement_runs_in_a_process_of_its_own_and_a_failed_one_says_why():
    found = measure.run({"matmul": "fp32"})
    assert found["flops_per_s"] > 1e8 and found["others"] >= 0
    with pytest.raises(RuntimeError, match=r"exit status 1(.|\n)*KeyError: 'fp7'"):
        measure.run({"matmul": "fp7"})


def test_memory_above_the_baseline_is_what_the_work_adds_at_its_peak():
    def work():
        big = torch.ones(20_000_000)  # 80 MB, given back before the end
        return big[:10].clone()

    measure.memory_above(work)
    _, first = measure.memory_above(work)
    assert 70e6 < first < 110e6


def test_without_the_peers_the_message_says_what_to_run(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(peers.PeerMissing, match=r"specforge.*not installed.*make bench-train"):
        peers.check()
    monkeypatch.setitem(sys.modules, "speculators", None)
    with pytest.raises(peers.PeerMissing, match=r"speculators.*make bench-train"):
        peers.speculators_step(tiny(contender="speculators"), steps.make_inputs(tiny()))
    with pytest.raises(ValueError, match="one document and keep=1 only, not 2 and 1"):
        peers.specforge_step(tiny(contender="specforge", documents=2), steps.make_inputs(tiny()))


def contender(core_s, memory_mb, **more):
    return {"core_s": core_s, "median_core_s": core_s, "memory": memory_mb * 1e6, "rounds": []} | more


def result(others):
    ours = {"sum_D": [80.0, 40.0], "pairs_D": [10.0, 8.0], "entropy_D": [30.0, 24.0], "flops": 5e9}
    side = {
        "specforge": contender(6.0, 300, loss=80 / 20 + 0.8 * 40 / 20),
        "speculators": contender(5.0, 200, loss=50 / 10 + 0.8 * 16 / 8),
        "headtrain": contender(2.0, 50, **ours),
    }
    draws = [{"times": [{"core_s": 0.9, "pairs": 8.0}, {"core_s": 1.1, "pairs": 10.0}]}]
    dropping = contender(0.9, 40, pairs_D=[9.0, 0.0], flops=1e9) | {"rounds": draws}
    drop = {"headtrain": contender(2.0, 50, **ours), "dropping": dropping}
    row = {"case": tiny().to_dict(), "matmul_flops_per_s": 5e9, "others": others}
    about = {"cpu": "a CPU", "rounds": 3, "steps_per_round": 1, "versions": {"torch": "2"}}
    return {"machine": about, "rows": [row | {"contenders": side}, row | {"contenders": drop}]}


def test_the_report_compares_with_the_faster_peer_and_says_when_the_machine_was_not_idle():
    text = train_step.markdown(result(others=0.01))
    row = "| 20 × 3 fp32 | 6.00 | 5.00 | 2.00 | **2.50×** | 300 | 200 | 50 | **0.25×** | 10 | 50% |"
    assert row in text
    # 9 of 18 pairs took 1.0 s on average, all 18 took 2.0 s: the expected 15.6 take 1.73 s
    assert "| 20 × 3 fp32 | 2.00 | 1.00 | 50.0% | 1.73 | 86.7% | **1.15×** | 12% |" in text
    assert "| specforge, 20 × 3 fp32 | 5.600000 | 5.600000 | 0.0e+00 |" in text
    assert "| speculators, 20 × 3 fp32 | 6.600000 | 6.600000 |" in text
    assert "otherwise idle" in text and "not idle" not in text
    assert "**The machine was not idle**: anything else kept at most 0.80 cores" in train_step.markdown(result(0.8))


def test_a_peers_loss_that_differs_from_ours_is_an_error():
    row = result(others=0.0)["rows"][0]
    train_step.check_losses(row)
    row["contenders"]["speculators"]["loss"] *= 1.001
    with pytest.raises(RuntimeError, match=r"20 × 3 fp32: speculators's loss is 6\.6\d+, ours by its formula 6\.6"):
        train_step.check_losses(row)


def test_the_line_through_the_memory_points_has_the_largest_deviation_from_it():
    points = [{"length": n, "memory_mb": 100 + 0.5 * n} for n in (100, 200, 400)]
    assert memory.line(points, "length") == pytest.approx({"slope": 0.5, "offset": 100, "deviation": 0}, abs=1e-6)
    points[1]["memory_mb"] = 300
    assert memory.line(points, "length")["deviation"] > 0.1


def test_the_memory_report_and_its_plot_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    points = [{"length": n, "draft_vocab": 8192, "memory_mb": 100 + 0.5 * n, "core_s": 1.0} for n in (1024, 2048)]
    found = {"lengths": points, "vocabs": points[:1], "line": memory.line(points, "length")}
    text = memory.markdown(found)
    assert "500 MB per 1,000 tokens" in text and "| 2,048 | 1,124 | 1,124 |" in text and "| 8,192 | 612 | 9 |" in text
    memory.plot(found, tmp_path / "img" / "plot.svg")
    assert (tmp_path / "img" / "plot.svg").read_text().count("tokens in a batch") >= 1


# ------------------------------------------------------------------------------------------------- acceptance


def test_the_acceptance_table_shows_means_and_spreads_of_seeds_and_one_value_without_a_spread():
    def line(name, seed, tau):
        suites = {"heldout": {"tau": tau}, "humaneval": {"tau": tau - 0.5}}
        return {"name": name, "seed": seed, "seconds": 600.0, "epoch": 4, "valid_tau": tau, **suites}

    text = acceptance.table([line("default", 0, 1.9), line("plain", 0, 1.4), line("default", 1, 2.0)])
    assert "| 600 | default | 2 | 1.950 (1.900 … 2.000) | 1.450 (1.400 … 1.500) | 1.950 (1.900 … 2.000) |" in text
    assert "| 600 | plain | 1 | 1.400 | 0.900 | 1.400 |  | 4 |" in text


def test_the_acceptance_budget_is_cpu_time():
    clock = acceptance.cpu_clock(Clock)(None, 100.0, 0.0, elapsed=7.0)
    time.sleep(0.3)
    assert 7.0 <= clock.elapsed < 7.25
    while clock.elapsed < 7.3:
        pass
    assert clock.progress(0) >= 0.073
