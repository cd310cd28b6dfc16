"""A store that several processes write to while another reads it; and what reading it costs in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from headtrain.data_gen import store
from headtrain.data_gen.store import CaptureStore, ResponseStore, RowInfo, StoreError

BATCHES, HIDDEN = 30, 64
FACTS = {"norm": "post_norm", "taps": [1, 2], "dtype": "float32", "hidden": HIDDEN, "vocab": 50}

WRITER = """
import importlib.util, sys
from pathlib import Path
from headtrain.data_gen import claims
spec = importlib.util.spec_from_file_location("shared", sys.argv[1])
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)
folder = Path(sys.argv[2])
(folder / f"ready-{sys.argv[3]}").touch()
while len(list(folder.glob("ready-*"))) < 2:
    pass
done = [shared.write(folder, batch, sys.argv[3]) for batch in claims.unfinished(folder, "captures", shared.BATCHES)]
print(len(done))
"""


def write(folder, batch, source="s"):
    """Three rows that anybody can tell are whole: every number of a row is its own."""
    sizes = [40 + batch, 3, 200]
    rows = [RowInfo(f"{batch}-{n}", "train", source, size, "stop", 1, size - 1) for n, size in enumerate(sizes)]
    number = torch.cat([torch.full((size,), float(100 * batch + n)) for n, size in enumerate(sizes)])
    tensors = {
        "ids": number.int(), "supervised": torch.ones(len(number), dtype=torch.bool),
        "taps": number[:, None, None].expand(-1, 2, HIDDEN).contiguous(),
        "last": number[:, None].expand(-1, HIDDEN).contiguous(), "argmax": number.int(), "logsumexp": number,
    }  # fmt: skip
    store.write_unit(folder, "captures", batch, rows, tensors, **FACTS)


def check(opened, row):
    batch, n = map(int, row.id.split("-"))
    read = opened.read(row)
    for name in ("ids", "taps", "last", "argmax", "logsumexp"):
        tensor = getattr(read, name)
        assert len(tensor) == row.tokens == [40 + batch, 3, 200][n]
        assert bool((tensor == 100 * batch + n).all())


def test_two_writers_and_a_reader_at_once_all_rows_once_and_whole(tmp_path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, __file__, str(tmp_path), str(n)], stdout=subprocess.PIPE,
                         env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True)
        for n in range(2)
    ]  # fmt: skip
    opened, looks, alive = CaptureStore(tmp_path, so_far=True), Counter(), True
    assert not opened.rows and opened.norm is None
    while alive:
        alive = any(writer.poll() is None for writer in writers)
        before = len(opened.rows)
        assert opened.refresh() == len(opened.rows) - before
        for row in opened.rows[before:]:
            check(opened, row)
        looks[len(opened.rows)] += 1
    shares = [int(writer.communicate()[0]) for writer in writers]
    assert sum(shares) == BATCHES and min(shares) > 0
    assert len(looks) > 3, "the reader saw the store grow"
    expected = sorted(f"{batch}-{n}" for batch in range(BATCHES) for n in range(3))
    assert sorted(row.id for row in opened.rows) == expected
    with pytest.raises(StoreError, match="not finished"):
        CaptureStore(tmp_path)
    store.write_index(tmp_path, "captures", BATCHES)
    finished = CaptureStore(tmp_path)
    assert Counter(row.source for row in finished.rows) == {str(n): 3 * share for n, share in enumerate(shares)}
    assert sorted(row.id for row in finished.rows) == expected
    for row in finished.rows:
        check(finished, row)
    assert (opened.norm, opened.taps, opened.hidden, opened.dtype) == ("post_norm", [1, 2], HIDDEN, "float32")


def test_a_store_opened_so_far_does_not_see_what_is_being_written(tmp_path):
    write(tmp_path, 0)
    (tmp_path / ".captures-00001.safetensors.host-1.part").write_bytes(b"half")
    opened = CaptureStore(tmp_path, so_far=True, max_length=100)
    assert [row.tokens for row in opened.rows] == [40, 3, 100] and opened.refresh() == 0
    write(tmp_path, 1)
    assert opened.refresh() == 3 and opened.left_out == {"cut_to_max_length": 2}
    assert ResponseStore(tmp_path, so_far=True).rows == []


def mapped_from(address: int) -> str:
    """The file that an address of this process is mapped from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return line.split(maxsplit=5)[5] if len(line.split()) > 5 else ""
    return ""


def own_memory() -> int:
    """Bytes of this process that are not mapped from files."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("RssAnon:")[1].split()[0])


def test_rows_are_read_from_the_mapped_file_without_a_copy(tmp_path):
    count, hidden = 4, 4096
    rows = [RowInfo(str(n), "train", "s", 1000, "stop", 0, 1000) for n in range(count)]
    total = 1000 * count
    tensors = {
        "ids": torch.zeros(total, dtype=torch.int32), "supervised": torch.ones(total, dtype=torch.bool),
        "taps": torch.ones(total, 3, hidden, dtype=torch.bfloat16), "argmax": torch.zeros(total, dtype=torch.int32),
        "last": torch.ones(total, hidden, dtype=torch.bfloat16), "logsumexp": torch.zeros(total),
    }  # fmt: skip
    path = store.write_unit(tmp_path, "captures", 0, rows, tensors, **FACTS | {"dtype": "bfloat16"})
    store.write_index(tmp_path, "captures", 1)
    del tensors
    write(tmp_path / "other", 0)  # what a first read loads is not what a read costs
    other = CaptureStore(tmp_path / "other", so_far=True)
    check(other, other.rows[0])
    opened, before = CaptureStore(tmp_path), own_memory()
    read = [opened.read(row) for row in opened.rows]
    assert own_memory() - before < path.stat().st_size / 20
    for row in read:
        assert {mapped_from(tensor.data_ptr()) for tensor in vars(row).values()} == {str(path)}
