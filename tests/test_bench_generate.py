"""benchmarks/generate.py and loading.py at a tiny size: both ways give the same answers and states."""

import json
import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks/ is not installed
from benchmarks import generate, loading


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A recipe over a tiny random target, prompts of several lengths in two batches."""
    from headtrain.configload import load
    from headtrain.smoke import build_target, shrink

    folder = tmp_path_factory.mktemp("bench")
    config = shrink(load("eagle3_llama8b", ["smoke=true", f"run_dir={folder}"]))
    build_target(config, Path(config.target.model))
    texts = [f"Tell me about {n}{' and more' * (n % 5)}." for n in range(14)]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "tiny.yaml"
    path.write_text(
        f"target: {{model: {config.target.model}, family: llama, dtype: float32, device: cpu}}\n"
        f"data: {{prompts: [{folder / 'prompts.jsonl'}], held_out: 2, valid: 2, max_length: 192,"
        " responses: {max_new_tokens: 30, batch_tokens: 800}}\n"
    )
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_ways_answer_the_same_batches_and_their_answers_and_states_are_compared(dtype, tiny, monkeypatch):
    monkeypatch.setattr(logging, "disable", lambda level: None)  # it is for a process of its own
    request = {"recipe": str(tiny), "overrides": [], "dtype": dtype, "batches": [0, 1], "rounds": 2}
    found = generate.measure(request)
    assert sum(batch["rows"] for batch in found["batches"]) == 12 and found["lean"]
    for batch in found["batches"]:
        assert len(batch["ours"]) == len(batch["plain"]) == 2 and batch["prompt_tokens"] > 20 * batch["rows"]
        assert min(spent["core_s"] for who in ("ours", "plain") for spent in batch[who]) > 0
        if dtype == "float32":
            assert batch["same"] + batch["ties"] == batch["rows"] and batch["same"] > 0
            assert batch["ours"][0]["new"] > batch["rows"] and batch["argmax"] == 0 and batch["logsumexp"] < 1e-3
    generate.check(dtype, found)


def batch(**more):
    times = {"plain": [{"core_s": 4.0, "wall_s": 8.0, "new": 100}, {"core_s": 2.0, "wall_s": 5.0, "new": 100}],
             "ours": [{"core_s": 1.0, "wall_s": 2.0, "new": 100}]}  # fmt: skip
    facts = {"rows": 3, "prompt_tokens": 60, "same": 3, "ties": 0, "taps": 1e-3, "last": 1e-3, "logsumexp": 0.0}
    return times | facts | {"argmax": 0.0} | more


def test_a_difference_without_a_near_tie_or_of_states_is_an_error_in_fp32_alone():
    generate.check("float32", {"batches": [batch(same=2, ties=1)]})
    with pytest.raises(RuntimeError, match="1 answers differ without a near-tie"):
        generate.check("float32", {"batches": [batch(same=2)]})
    with pytest.raises(RuntimeError, match=r"taps by 0\.02, last by 0\.001"):
        generate.check("float32", {"batches": [batch(taps=0.02)]})
    generate.check("bfloat16", {"batches": [batch(same=0, taps=0.1)]})


def test_the_report_compares_best_turns_and_says_what_was_not_watched():
    store = {"batch_s": 0.1, "core_s": 0.1, "bytes": 2e8, "waited_s": 0.0, "step_s": 0.3, "tokens": 8192, "size": 1e9,
             "hidden": 4096}  # fmt: skip
    about = {"cpu": "a CPU", "rounds": 2, "new": 160, "versions": {"torch": "2"}}
    result = {"machine": about, "dtypes": {"float32": {"batches": [batch(), batch()], "others": 0.5}}}
    text = generate.markdown(result | {"loading": {"store": store}})
    assert "| 3 rows | 60 | 100 | 50 | 20 | 100 | 50 | **2.00×** | 3 of 3 | 1.0e-03 | 1.0e-03 |  |" in text
    assert "| all | 120 | 200 | 50 | 20 | 100 | 50 | **2.00×** | 6 of 6 | 1.0e-03 | 1.0e-03 | ≥ 2.0: met |" in text
    assert "**The machine was not idle**; anything else kept at most 0.50 cores busy" in text
    assert "2.0 GB/s, 81,920 tokens/s" in text and "a step waits 0.0 ms, 0.0 % of its time" in text
    assert "none was given (`ARGS=--run=DIR`)" in text
    watched = {"steps": 20, "seconds": {"data": 0.001, "forward": 0.04, "backward": 0.059}}
    text = "".join(loading.text({"store": store, "training": watched}))
    assert "data 1.0, forward 40.0, backward 59.0. It waits for data 1.0 % of its time" in text


def test_a_store_of_random_captures_is_read_by_the_trainings_reader(tmp_path):
    size = loading.write_store(tmp_path, hidden=64, tokens=2 * 16 * loading.ROW)
    assert size > 2 * 16 * loading.ROW * 4 * 64 * 2
    found = loading.read_store(tmp_path, budget=4 * loading.ROW, step_s=0.02)
    assert found["tokens"] == 4 * loading.ROW and found["bytes"] == 4 * loading.ROW * 4 * 64 * 2
    assert 0 < found["core_s"] < 1 and found["waited_s"] < 0.5
    assert loading.gpu_step(8192) == pytest.approx(4 * loading.gpu_step(2048), rel=0.01)
