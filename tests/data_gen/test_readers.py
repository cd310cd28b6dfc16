import gzip
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headtrain.data_gen import readers

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(JSON, max_size=6), chunk=st.integers(1, 40), indent=st.sampled_from([None, 1]))
def test_an_array_read_in_chunks_of_any_size_equals_json_loads(tmp_path_factory, rows, chunk, indent):
    path = tmp_path_factory.mktemp("array") / "rows.json"
    path.write_text(json.dumps(rows, indent=indent, ensure_ascii=False), encoding="utf-8", errors="surrogatepass")
    try:
        expected = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return
    whole, readers.CHUNK = readers.CHUNK, chunk
    try:
        assert [row for _, row in readers.rows(str(path))] == expected
    finally:
        readers.CHUNK = whole


def test_a_file_cut_at_any_byte_gives_every_row_before_the_cut_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK", 7)
    pieces = [json.dumps({"n": n, "text": "ä\\\"}, {" * n}, ensure_ascii=False).encode() for n in range(4)]
    whole = b"[" + b",\n".join(pieces) + b"]"
    ends = [whole.index(piece) + len(piece) for piece in pieces]
    path = tmp_path / "cut.json"
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        *good, last = [row for _, row in readers.rows(str(path))]
        assert [row["n"] for row in good] == list(range(sum(end <= size for end in ends)))
        assert isinstance(last, readers.Broken) and last.reason == "cut_off"


def test_a_fault_inside_an_array_is_an_error_that_shows_the_place(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('[{"a": 1}, {"a" 2}, {"a": 3}, {"a": 4}]')
    with pytest.raises(readers.ReadError, match=r"after row 1 is not valid JSON .*\"a\" 2"):
        list(readers.rows(str(path)))


def test_text_after_an_array_is_an_error_not_ignored(tmp_path):
    path = tmp_path / "lists.jsonl"
    path.write_text('[1]\n{"a": 2}\n')
    with pytest.raises(readers.ReadError, match="text follows the closing bracket"):
        list(readers.rows(str(path)))


def test_broken_lines_come_out_with_their_reason_and_the_rest_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n\n{"a": "\xff"}\n{"a": 2}\n{"a": ')
    found = [row for _, row in readers.rows(str(path))]
    assert [row if isinstance(row, dict) else row.reason for row in found] == [
        {"a": 1}, "broken_json", "invalid_utf8", {"a": 2}, "cut_off",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_gzip_bom_and_crlf_change_nothing(tmp_path, name):
    rows = [{"text": "one\u2028two"}, {"text": "ä\r\n"}]
    text = json.dumps(rows) if name == "rows.json" else "\r\n\r\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    (tmp_path / name).write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))
    assert [row for _, row in readers.rows(str(tmp_path / name))] == rows


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK", 1 << 14)
    path = tmp_path / "many.json"
    with open(path, "w") as handle:
        handle.write("[" + ",".join(json.dumps({"text": "x" * 200}) for _ in range(20000)) + "]")
    tracemalloc.start()
    assert sum(1 for _ in readers.rows(str(path))) == 20000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 19 < path.stat().st_size / 8


def test_a_missing_file_is_named():
    with pytest.raises(readers.ReadError, match=r"nowhere\.jsonl: no such file"):
        list(readers.rows("nowhere.jsonl"))
