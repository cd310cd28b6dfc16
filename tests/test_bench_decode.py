"""The tables of benchmarks/decode.py, and contenders that take turns."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks/ is not installed
from benchmarks import decode
from benchmarks.decode import GENERATE


def rows(*core_s, ids=(1, 2, 3, 4)):
    """One prompt, answered in each of these times."""
    return [{"ids": list(ids), "times": [{"core_s": t, "wall_s": 2 * t} for t in core_s]}]


def test_contenders_take_turns_and_one_that_cannot_run_is_a_row_with_its_error():
    turns = []

    def contender(name):
        return lambda: lambda ids, new: turns.append((name, ids, new)) or ids * new

    def broken():
        raise ImportError("no such library\nand more")

    found = decode.race({"a": contender("a"), "b": contender("b"), "c": broken}, [[7], [8]], new=3, rounds=2)
    assert found["c"] == "ImportError: no such library"
    assert [row["ids"] for row in found["b"]] == [[7] * 3, [8] * 3] and len(found["a"][0]["times"]) == 2
    assert [(name, ids) for name, ids, new in turns if new == 3] == [("a", [7]), ("b", [7]), ("a", [8]), ("b", [8])] * 2


def test_rates_are_of_the_best_turn_of_every_prompt():
    found = decode.rates(rows(3.0, 1.0) + rows(2.0, 5.0, ids=(1, 2)))
    assert found == {"core_s": pytest.approx(6 / 3), "wall_s": pytest.approx(6 / 6)}


def test_a_set_is_compared_with_transformers_and_with_our_plain_decoding_and_goals_stand_beside():
    found = {GENERATE: rows(4.0), "none": rows(2.0), "ngram": rows(1.25, ids=(1, 2, 3, 5)), "x": "ValueError: why"}
    assert decode.set_cells("copy", found) == [
        [GENERATE, "1.0", "0.5", "1.00×", "0.50×", "1 of 1", ""],
        ["ours, plain", "2.0", "1.0", "2.00×", "1.00×", "1 of 1", ""],
        ["ours, n-gram", "3.2", "1.6", "3.20×", "1.60×", "0 of 1", "≥ 1.8: **missed**"],
        ["x", "does not run here: ValueError: why", "", "", "", "", ""],
    ]
    assert decode.set_cells("chat", found)[1][-1] == "≥ 1.6: met"


def test_the_report_shows_the_cost_of_verifying_and_says_what_was_skipped_and_disturbed():
    forwards = {"1": (0.050, 0.020), "6": (0.100, 0.025), "16": (0.200, 0.050)}  # JSON's keys are strings
    times = {w: {GENERATE: [{"core_s": a}], "none": [{"core_s": b}]} for w, (a, b) in forwards.items()}
    sets = {"chat": {GENERATE: rows(4.0), "none": rows(2.0)}, "copy": {GENERATE: rows(4.0), "none": rows(2.0)}}
    about = {"cpu": "a CPU", "bf16": False, "rounds": 3, "new": 64, "versions": {"torch": "2"}}
    found = {"forwards": times, "sets": sets, "others": 0.5}
    text = decode.markdown({"machine": about, "dtypes": {"fp32": found, "bf16": found}})
    assert "| 6 | 100.0 | 2.00 | 25.0 | 1.25 | ≤ 1.3: met |" in text
    assert "| 16 | 200.0 | 4.00 | 50.0 | 2.50 |  |" in text
    assert "Skipped: no trained head was given" in text and "no bf16 instructions" in text
    assert "**The machine was not idle**; anything else kept at most 0.50 cores busy" in text
