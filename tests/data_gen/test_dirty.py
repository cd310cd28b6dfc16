"""Prompt files as they come: every form of row in every form of file, and files with any dirt in them.

Whatever a file holds, each row read is a prompt or a reject with its own number, or the file is refused in one line.
"""

import copy
import datetime
import decimal
import gzip
import json
import sqlite3

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headtrain.config import DataConfig, PromptSource, RecipeConfig, ResponsesConfig
from headtrain.data_gen import prompts, readers
from headtrain.files import write_json

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ANSWER = {"role": "assistant", "content": "It is 4."}
ASK = {"role": "user", "content": "How warm?"}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "4"}
LOOP = [{**ANSWER, "content": None, "tool_calls": [CALL]}, RESULT, ANSWER]
FORMS = {
    "sharegpt": {"id": "7", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "sharegpt tools": {"tools": json.dumps([TOOL]), "conversations": [
        {"from": "system", "value": "s"}, {"from": "human", "value": "How warm?"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "4"}, {"from": "gpt", "value": "It is 4."}]},
    "openai": {"tools": [TOOL], "messages": [{"role": "developer", "content": "d"}, ASK, *LOOP]},
    "older openai": {"functions": [TOOL["function"]], "messages": [
        ASK, {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "f", "content": "4"}, ANSWER]},
    "tools of a message": {"messages": [{"role": "system", "content": "s", "tools": json.dumps([TOOL])}, ASK, *LOOP]},
    "parts": {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "warm?"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "4"}]}]},
    "thought": {"messages": [ASK, {**ANSWER, "reasoning_content": "look it up"}], "finish_reason": "stop"},
    "messages as text": {"messages": json.dumps([ASK, ANSWER])},
    "alpaca": {
        "instruction": "Translate.", "input": "chat", "output": "cat", "history": [["Hi", "Salut"]], "system": "s"},
    "columns": {"prompt": "How warm?", "response": "It is 4.", "score": 3},
    "columns of messages": {"prompt": [ASK], "completion": [ANSWER]},
    "ids": {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "prompt": "Hi", "finish_reason": "stop"},
}  # fmt: skip


def zstd(data):
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(path, rows):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def saved(path, rows):
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(path)


WRITERS = {
    "rows.json": lambda path, rows: path.write_bytes(json.dumps(rows).encode()),
    "cut.json": lambda path, rows: path.write_bytes(json.dumps([*rows, rows[0]]).encode()[:-9]),
    "rows.jsonl": lambda path, rows: path.write_bytes(lines(rows)),
    "rows.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows)) + gzip.compress(b"")),
    "rows.jsonl.zst": lambda path, rows: path.write_bytes(b"".join(zstd(lines([row])) for row in rows)),
    "wrong name.parquet": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
    "rows.parquet": table,
    "saved": saved,
}


def select(path, backend="given", turns=1, **more):
    """(the prompts, the Selection, its rejects as (row, reason))."""
    rejects = []
    data = DataConfig(
        prompts=[PromptSource(str(path))], turns=turns, held_out=0, valid=0, **more,
        responses=ResponsesConfig(backend=backend),
    )  # fmt: skip
    found = prompts.Selection(data, lambda **facts: rejects.append((facts["row"], facts["reason"])))
    return list(found), found, rejects


@pytest.mark.parametrize("backend", ["local", "given"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_row_is_the_same_prompt_in_every_form_of_file(tmp_path, form, backend):
    found = {}
    for name, write in WRITERS.items():
        write(tmp_path / name, [FORMS[form]])
        (prompt,), _, rejects = select(tmp_path / name, backend)
        assert rejects == ([(1, "cut_off")] if name == "cut.json" else []), (name, rejects)
        found[name] = prompt.id, prompt.messages, prompt.token_ids and [*map(list, prompt.token_ids)]
    assert all(one == found["rows.json"] for one in found.values())


def test_a_list_of_strings_is_a_list_of_prompts(tmp_path):
    WRITERS["rows.json"](tmp_path / "a.json", ["one", " ", "two"])
    kept, _, rejects = select(tmp_path / "a.json", "local")
    assert sorted(p.messages[0]["content"] for p in kept) == ["one", "two"] and rejects == [(1, "empty_user")]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.jsonl.gz"])
def test_a_row_may_be_its_list_of_messages_alone(tmp_path, name):
    rows = [[ASK, {**ANSWER, "content": "long " * 20_000}], [{**ASK, "content": "And now?"}, ANSWER], [], [3]]
    WRITERS[name](tmp_path / name, rows)
    kept, _, rejects = select(tmp_path / name)
    assert {p.row: p.messages[0]["content"] for p in kept} == {0: "How warm?", 1: "And now?"}
    assert rejects == [(2, "empty_conversation"), (3, "turn_is_not_an_object")]


def test_what_a_table_holds_beside_texts_goes_on_as_text(tmp_path):
    odd = {"at": datetime.datetime(2024, 5, 6), "d": decimal.Decimal("1.5"), "b": b"x"}
    rows = [{"conversation": [{"role": "user", "content": "q", **odd}, {"role": "assistant", "content": "a", **odd}]}]
    table(tmp_path / "rows.parquet", [row | odd for row in rows])
    for backend in ("local", "given"):
        (prompt,), *_ = select(tmp_path / "rows.parquet", backend)
        assert prompt.messages[0]["at"] == "2024-05-06 00:00:00" and prompt.messages[0]["d"] == "1.5"
    table(tmp_path / "bytes.parquet", [{"messages": [{"role": "user", "content": b"q"}]}])
    assert select(tmp_path / "bytes.parquet", "local")[2] == [(0, "content_is_not_text")]


# ------------------------------------------------------------------------------------------------- any dirt

TEXT = st.text(st.characters() | st.sampled_from("\0\ud800\udfff\u2028\ufeff\x1b\n"), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.sampled_from(["role", "content"]), inner),
    max_leaves=4,
)
DIRT = [b"\xff", b"\xe9", b"\0", b"\xef\xbb\xbf", b"\r\n", b"\n", "\u2028".encode(), b'"', b"]", b"{", b",", b"\\"]


@st.composite
def spoiled(draw):
    """A row of a known form with any value, or none, at one or two places."""
    row = {"at": copy.deepcopy(draw(st.sampled_from(list(FORMS.values()))))}
    for _ in range(draw(st.integers(0, 2))):
        place, key = row, "at"
        while isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 3)):
            place = place[key]
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if isinstance(place, dict) and place is not row and draw(st.booleans()):
            extra = draw(st.sampled_from(["system", "history", "input", "tools", "weight", "image", "name", "content"]))
            place[extra] = draw(JSON)
        else:
            place[key] = draw(JSON)
    return row["at"]


ROWS = st.lists(spoiled() | JSON | st.just(FORMS["columns"]), max_size=6)
GOOD = {"prompt": "a good one", "response": "indeed"}


@settings(max_examples=250, deadline=None)
@given(
    ROWS, st.sampled_from([lines, lambda rows: json.dumps(rows).encode()]),
    st.sampled_from([bytes, gzip.compress, zstd]), st.sampled_from(["local", "given"]),
    st.lists(st.tuples(st.sampled_from(DIRT), st.integers(0, 400)), max_size=2), st.none() | st.integers(1, 60),
)  # fmt: skip
@example([{"messages": [{"role": "\ud800\n", "content": "x"}]}], lines, bytes, "local", [], None)
def test_whatever_a_file_holds_each_row_read_is_a_prompt_or_a_reject_of_its_own_number(
    tmp_path_factory, rows, form, pack, backend, dirt, cut
):
    path = tmp_path_factory.mktemp("dirty") / "rows.data"
    data = form([GOOD, *rows])
    for piece, at in dirt:
        at %= len(data)
        data = data[:at] + piece + data[at:]
    path.write_bytes(pack(data)[: -cut if cut else None])
    try:
        kept, found, rejects = select(path, backend, turns=1 if backend == "given" else 3)
    except readers.ReadError as error:
        assert dirt and str(path) in str(error) and "\n" not in str(error)
        return
    assert sorted([p.row for p in kept] + [row for row, _ in rejects]) == list(range(found.counts["read"]))
    assert found.counts["prompts"] == len(kept) and sum(found.left_out.values()) == len(rejects)
    assert all(reason.isprintable() for reason in found.left_out)
    write_json(path.with_suffix(".manifest"), dict(found.left_out))
    for prompt in kept:
        assert json.loads(prompts._line(prompt))["messages"] == json.loads(json.dumps(prompt.messages))
        assert prompt.token_ids or all(isinstance(m["content"], str) for m in prompt.messages)
    if not dirt and not cut:
        assert found.counts["read"] == len(rows) + 1 and 0 in [p.row for p in kept]


@pytest.mark.parametrize("form", [lines, lambda rows: json.dumps(rows).encode()])
def test_a_row_nested_deeper_than_python_goes_is_left_out_alone(tmp_path, form):
    for depth in (300, 900, 5000, 200_000):
        deep = '{"messages": [{"role": "user", "content": "q", "x": ' + "[" * depth + "]" * depth + "}]}"
        data = form([GOOD, "here", {"prompt": "last"}]).replace(b'"here"', deep.encode())
        (tmp_path / "deep.json").write_bytes(data)
        kept, found, rejects = select(tmp_path / "deep.json", "local")
        assert {p.row for p in kept} - {1} == {0, 2}
        assert found.counts["read"] == 3 and rejects in ([], [(1, "nested_too_deeply")], [(1, "broken_json")])


@settings(max_examples=60, deadline=None)
@given(
    texts=st.sets(st.text("abAB ", min_size=1, max_size=4).filter(str.strip), min_size=1, max_size=30),
    more=st.lists(st.text("abAB ", max_size=4), max_size=30), at=st.integers(0, 30),
    shares=st.sampled_from([(0.2, 0.2), (0.0, 0.5), (0.5, 0.0), (0.05, 0.1)]),
)  # fmt: skip
def test_rows_added_anywhere_move_no_prompt_to_another_split(tmp_path_factory, texts, more, at, shares):
    texts, path = sorted(texts), tmp_path_factory.mktemp("splits") / "rows.json"
    found = []
    for rows in (texts, [*texts[:at], *more, *texts[at:]]):
        path.write_text(json.dumps(rows))
        data = DataConfig(prompts=[PromptSource(str(path))], held_out=shares[0], valid=shares[1])
        found.append({p.id: p.split for p in prompts.Selection(data)})
    before, after = found
    assert all(after[name] == before[name] for name in before.keys() & after.keys()) and before


# ------------------------------------------------------------------------------------------------- refused in one line

@pytest.mark.parametrize(
    ("data", "words"),
    [
        ('[{"prompt": "a"}]'.encode("utf-16"), "UTF-16 is not read"), (b"BZh91AY&SY", "bzip2 is not read"),
        (gzip.compress('{"prompt": "a"}'.encode("utf-16")), "UTF-16 is not read"), (b"PK\3\4\0", "zip is not read"),
        (b"x" * 3000, "line 1 is longer than"), (b'[{"a": "' + b"x" * 9000, "row 0 is longer than"),
        (b'[1, {"a" "b"}, {"c": [1}]', "row 2 (from 0) is not valid JSON, and where it ends cannot be told"),
        (b'[{"prompt": "a}, {"prompt": "b"}]', "row 0 (from 0) is not valid JSON"),
    ],
    ids=["utf-16", "bzip2", "utf-16-in-gzip", "zip", "line", "row", "row-behind-rows", "open-text"],
)  # fmt: skip
def test_a_file_whose_rows_cannot_be_told_apart_is_refused_in_one_line(tmp_path, monkeypatch, data, words):
    monkeypatch.setattr(readers, "LARGEST", 2048)
    monkeypatch.setattr(readers, "CHUNK", 512)
    (tmp_path / "odd.jsonl").write_bytes(data)
    with pytest.raises(readers.ReadError) as error:
        select(tmp_path / "odd.jsonl")
    assert words in str(error.value) and "odd.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_unknown_words_do_not_fill_the_manifest(tmp_path):
    rows = [{"messages": [{"role": f"name {n}", "content": "x"}]} for n in range(200)]
    WRITERS["rows.jsonl"](tmp_path / "rows.jsonl", rows)
    _, found, rejects = select(tmp_path / "rows.jsonl", "local")
    assert len(found.left_out) == prompts.MOST_REASONS + 1 and sum(found.left_out.values()) == 200 == len(rejects)
    assert found.left_out["unknown_role"] == 200 - prompts.MOST_REASONS


def test_a_full_disk_under_the_temporary_file_is_one_line(tmp_path, monkeypatch):
    connect = sqlite3.connect

    def small(*names, **more):
        made = connect(*names, **more)
        made.execute("PRAGMA max_page_count=20")
        return made

    monkeypatch.setattr(sqlite3, "connect", small)
    WRITERS["rows.jsonl"](tmp_path / "rows.jsonl", [{"prompt": f"{n} " + "x" * 500} for n in range(300)])
    config = RecipeConfig(data=DataConfig(prompts=[PromptSource(str(tmp_path / "rows.jsonl"))]))
    with pytest.raises(readers.ReadError, match="temporary file: database or disk is full; set TMPDIR"):
        prompts.gather(config, tmp_path / "prompts")
    assert not list((tmp_path / "prompts").iterdir())
