import gzip
import hashlib
import json
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headtrain.config import PromptSource
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


FAULTS = [
    '{"a" 2}', '{"a": "x\n}]"}', "oops", "tru", "[1 2]", "1" * 5000, '{"a": [{}, "]\\"}"], }', "[" * 3000 + "]" * 3000,
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(JSON, st.none() | st.sampled_from(FAULTS)), min_size=1, max_size=6),
    chunk=st.integers(1, 40), space=st.sampled_from(["", " \n"]),
)  # fmt: skip
def test_a_fault_in_one_element_of_an_array_costs_that_element_alone(tmp_path_factory, rows, chunk, space):
    path = tmp_path_factory.mktemp("faults") / "rows.json"
    path.write_text("[" + f"{space},".join(fault or json.dumps(row) for row, fault in rows) + f"{space}]")
    whole, readers.CHUNK = readers.CHUNK, chunk
    try:
        found = [row for _, row in readers.rows(str(path))]
    finally:
        readers.CHUNK = whole
    assert [getattr(row, "reason", row) for row in found] == ["broken_json" if f else row for row, f in rows]


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


# ------------------------------------------------------------------------------------------------- other forms

ROWS = [{"prompt": "one\u2028two", "n": 1}, {"prompt": "ä", "n": 2}, {"prompt": "b", "n": 3}]


def jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def zstd(data):
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def parquet(path, rows):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
@pytest.mark.parametrize("data", [jsonl(ROWS), json.dumps(ROWS, ensure_ascii=False).encode()])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.anything"])
def test_what_a_file_is_its_first_bytes_say(tmp_path, pack, data, name):
    (tmp_path / name).write_bytes(pack(data))
    assert list(readers.rows(str(tmp_path / name))) == list(enumerate(ROWS))


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
@pytest.mark.parametrize("form", [jsonl, lambda rows: json.dumps(rows).encode()])
def test_a_compressed_file_cut_anywhere_gives_whole_rows_and_then_says_so(tmp_path, pack, form):
    rows = [{"n": n, "text": hashlib.sha256(str(n).encode()).hexdigest()} for n in range(400)]
    whole = pack(form(rows))
    for size in range(len(whole) // 7, len(whole) - 9, len(whole) // 7):
        (tmp_path / "cut.gz").write_bytes(whole[:size])
        *found, last = [row for _, row in readers.rows(str(tmp_path / "cut.gz"))]
        assert found == rows[: len(found)] and isinstance(last, readers.Broken) and last.reason == "cut_off"


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
def test_a_text_file_is_one_prompt_per_line(tmp_path, pack):
    text = "\ufeffFirst?\r\n\r\n  Second\u2028line? \n{\"prompt\": 3}\nlast".encode() + b" \xff\n"
    (tmp_path / "prompts.txt.zst").write_bytes(pack(text))
    *found, odd = [row for _, row in readers.rows(str(tmp_path / "prompts.txt.zst"))]
    assert [row["prompt"] for row in found] == ["First?", "Second\u2028line?", '{"prompt": 3}']
    assert odd.reason == "invalid_utf8" and odd.detail.startswith("line 5")


def test_a_cut_compressed_text_file_keeps_no_half_prompt(tmp_path):
    lines = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(20000)]
    (tmp_path / "prompts.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode())[:-5000])
    *found, last = [row for _, row in readers.rows(str(tmp_path / "prompts.txt.gz"))]
    assert found == [{"prompt": line} for line in lines[: len(found)]] and len(found) > 9000
    assert last.reason == "cut_off"


def test_a_table_has_no_keys_that_its_rows_did_not_have(tmp_path):
    calling = {"role": "assistant", "tool_calls": [{"id": "c"}]}
    rows = [
        {"messages": [{"role": "user", "content": "b", "name": "me"}], "tools": ["x"]},
        {"messages": [{"role": "user", "content": "a"}, calling]},
    ]
    parquet(tmp_path / "rows.parquet", rows)
    assert [row for _, row in readers.rows(str(tmp_path / "rows.parquet"))] == rows


def test_a_data_set_that_was_saved_is_read_with_its_splits(tmp_path):
    from datasets import Dataset, DatasetDict

    own = Dataset.from_list(ROWS)
    own.save_to_disk(tmp_path / "one")
    DatasetDict(train=own, test=own.select([0])).save_to_disk(tmp_path / "two")
    assert [row for _, row in readers.rows(str(tmp_path / "one"))] == ROWS
    assert [row for _, row in readers.rows(str(tmp_path / "two"))] == ROWS
    assert [row for _, row in readers.rows(PromptSource(str(tmp_path / "two"), split="test"))] == ROWS[:1]
    for name, more, words in (
        ("two", {"split": "dev"}, "no split 'dev'; split may be train, test"),
        ("one", {"split": "dev"}, "it has no splits"), ("one", {"subset": "a"}, "only Hub data sets have a subset"),
    ):  # fmt: skip
        with pytest.raises(readers.ReadError, match=words):
            list(readers.rows(PromptSource(str(tmp_path / name), **more)))


def test_a_hub_data_set_is_asked_for_its_subset_at_the_pinned_commit(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*names, **more):
        asked.append((names, more))
        if names[0] == "me/none":
            raise ConnectionError("no route")
        return datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    place = PromptSource("me/chats", subset="en", revision="a" * 40)
    assert [row for _, row in readers.rows(place)] == ROWS
    assert asked == [(("me/chats", "en"), {"revision": "a" * 40})]
    with pytest.raises(readers.ReadError, match=r"me/none: no such file, and not readable as .* \(no route\)"):
        list(readers.rows("me/none"))


@pytest.mark.parametrize("source", ["chats.jsonl", "data/chats.jsonl", "./chats", "/data/chats", "a/b/c", "x/y.txt.gz"])
def test_a_path_is_no_hub_data_set(source):
    assert not readers.is_hub_id(source) and readers.is_hub_id("user/name-v1.5")


def test_a_folder_is_all_its_files_of_one_form_in_order(tmp_path):
    for n, row in enumerate(ROWS):
        (tmp_path / f"part-{n}.jsonl.gz").write_bytes(gzip.compress(jsonl([row])))
    (tmp_path / "LICENSE.txt").write_text("none")
    found = [(name, list(rows)) for name, rows in readers.files(PromptSource(str(tmp_path)))]
    assert found == [(f"part-{n}.jsonl.gz", [(0, row)]) for n, row in enumerate(ROWS)]
    parquet(tmp_path / "more.parquet", ROWS)
    with pytest.raises(readers.ReadError, match=r"data files of one form .*more\.parquet.*part-0"):
        list(readers.rows(str(tmp_path)))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json.zst", "rows.parquet"])
def test_memory_does_not_grow_with_a_file_of_any_form(tmp_path, name):
    """The peak of a process of its own that reads 20 times as many rows."""
    peaks = []
    path = tmp_path / name
    for count in (2000, 40000):
        rows = [{"messages": [{"role": "user", "content": f"{n} " + "x" * 1500}]} for n in range(count)]
        if name == "rows.parquet":
            parquet(path, rows)
        else:
            data = jsonl(rows) if ".jsonl" in name else json.dumps(rows).encode()
            path.write_bytes({".gz": gzip.compress, ".zst": zstd}.get(path.suffix, bytes)(data))
        code = (
            "import sys; from headtrain.data_gen import readers; n = sum(1 for _ in readers.rows(sys.argv[1])); "
            "peak = open('/proc/self/status').read().split('VmHWM:')[1].split()[0]; "  # ru_maxrss has the parent's
            "print(n, peak, 'torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
        n, peak, torch = done.stdout.split()
        assert (int(n), torch) == (count, "False")
        peaks.append(int(peak) / 1024)
    assert peaks[1] < peaks[0] + 25 and peaks[1] < 300  # MiB; the larger file holds 60
