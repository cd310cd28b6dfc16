import json
from collections import Counter

import pytest
import torch

from headtrain import files
from headtrain.data_gen import store, sums
from headtrain.data_gen.store import CaptureStore, ResponseStore, RowInfo, StoreError

FACTS = {"norm": "post_norm", "taps": [1, 2], "dtype": "bfloat16", "hidden": 8, "vocab": 50}


def fill(folder, lengths=((5, 61), (7,)), kind="captures", prompt=2, **changes):
    """Writes files of rows with the given lengths; returns the flat tensors of each file."""
    generator, files = torch.Generator().manual_seed(0), []
    for batch, sizes in enumerate(lengths):
        total = sum(sizes)
        rows = [RowInfo(f"{batch}-{n}", "train", "s", t, "stop", prompt, t - prompt) for n, t in enumerate(sizes)]
        tensors = {
            "ids": torch.randint(0, 50, (total,), generator=generator, dtype=torch.int32),
            "supervised": torch.cat([torch.arange(t) >= prompt for t in sizes]),
        }
        facts = {"on_policy": True}
        if kind == "captures":
            facts = {k: v for k, v in {**FACTS, **changes}.items() if v is not None}
            tensors["taps"] = torch.randn(total, 2, 8, generator=generator).bfloat16()
            tensors["last"] = torch.randn(total, 8, generator=generator).bfloat16()
            tensors["argmax"] = torch.randint(0, 50, (total,), generator=generator, dtype=torch.int32)
            tensors["logsumexp"] = torch.randn(total, generator=generator)
        store.write_unit(folder, kind, batch, rows, tensors, **facts)
        files.append(tensors)
    store.write_index(folder, kind, len(lengths))
    return files


def test_rows_come_back_as_they_were_written(tmp_path):
    first, second = fill(tmp_path)
    opened = CaptureStore(tmp_path)
    assert [(r.id, r.tokens, r.file) for r in opened.rows] == [
        ("0-0", 5, "captures-00000.safetensors"), ("0-1", 61, "captures-00000.safetensors"),
        ("1-0", 7, "captures-00001.safetensors"),
    ]  # fmt: skip
    for row, tensors, start in zip(opened.rows, (first, first, second), (0, 5, 0), strict=True):
        read = opened.read(row)
        for name, tensor in tensors.items():
            assert torch.equal(getattr(read, name), tensor[start : start + row.tokens])
    assert (opened.norm, opened.taps, opened.hidden, opened.dtype) == ("post_norm", [1, 2], 8, "bfloat16")


def test_reading_a_row_copies_nothing(tmp_path):
    fill(tmp_path)
    opened = CaptureStore(tmp_path)
    first, again = opened.read(opened.rows[0]), opened.read(opened.rows[1])
    gap = again.taps.data_ptr() - first.taps.data_ptr()
    assert gap == first.taps.numel() * first.taps.element_size()


def test_a_61_token_capture_is_cut_to_the_maximal_length(tmp_path):  # case 09
    fill(tmp_path)
    opened = CaptureStore(tmp_path, max_length=40)
    assert [r.tokens for r in opened.rows] == [5, 40, 7] and opened.rows[1].finish == "length"
    read = opened.read(opened.rows[1])
    assert {len(t) for t in vars(read).values()} == {40}
    assert opened.left_out == {"cut_to_max_length": 1}


def test_rows_with_nothing_supervised_after_the_cut_are_counted_and_left_out(tmp_path):  # case 09
    fill(tmp_path, lengths=((61, 50),), prompt=45)
    opened = CaptureStore(tmp_path, max_length=46)
    assert [r.tokens for r in opened.rows] == [46, 46]
    opened = CaptureStore(tmp_path, max_length=45)
    assert not opened.rows and opened.left_out == {"no_supervised_tokens_after_truncation": 2}


def test_a_damaged_file_is_named_before_it_is_used(tmp_path):
    fill(tmp_path)
    path = tmp_path / "captures-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    opened = CaptureStore(tmp_path)
    opened.read(opened.rows[0])
    with pytest.raises(StoreError, match=r"captures-00001\.safetensors is damaged: its checksum is an"):
        opened.read(opened.rows[2])


def test_a_file_is_hashed_when_it_is_written_and_again_when_it_changed(tmp_path, monkeypatch):
    hashed = []
    for module in (store, sums):
        monkeypatch.setattr(module, "sha256_file", lambda path: hashed.append(path.name) or files.sha256_file(path))
    fill(tmp_path)
    assert len(hashed) == 2
    for touched in (False, True, False):
        if touched:
            (tmp_path / "captures-00000.safetensors").touch()
        opened = CaptureStore(tmp_path)
        for row in opened.rows:
            opened.read(row)
        assert hashed[2:] == ["captures-00000.safetensors"] * (len(hashed) > 2)
    assert len(hashed) == 3


def test_a_cut_off_file_and_an_unfinished_folder_say_what_to_do(tmp_path):
    fill(tmp_path)
    path = tmp_path / "captures-00000.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StoreError, match=r"cannot be read.*`headtrain generate`"):
        list(CaptureStore(tmp_path).rows)
    (tmp_path / "index.json").unlink()
    with pytest.raises(StoreError, match="stage is not finished"):
        CaptureStore(tmp_path)


def test_untagged_captures_are_refused(tmp_path):  # case 52
    fill(tmp_path, norm=None)
    with pytest.raises(StoreError, match="untagged captures are refused"):
        CaptureStore(tmp_path)


def test_both_norm_tags_lead_to_the_same_logits_and_a_second_norm_would_not(tmp_path):  # case 52
    weight, before = torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0]])

    def rms(h):
        return h / (h * h).mean(-1, keepdim=True).sqrt() * weight

    right = torch.tensor([[0.848528, 2.262742]])
    for norm, stored in (("pre_norm", before), ("post_norm", right)):
        folder = tmp_path / norm
        tensors = {
            "ids": torch.zeros(1, dtype=torch.int32), "supervised": torch.ones(1, dtype=torch.bool),
            "taps": torch.zeros(1, 1, 2), "last": stored, "argmax": torch.zeros(1, dtype=torch.int32),
            "logsumexp": torch.zeros(1),
        }  # fmt: skip
        store.write_unit(folder, "captures", 0, [RowInfo("r", "train", "s", 1, "stop", 0, 1)], tensors, norm=norm)
        store.write_index(folder, "captures", 1)
        opened = CaptureStore(folder, final_norm=rms)
        torch.testing.assert_close(opened.read(opened.rows[0]).last @ torch.eye(2), right, atol=1e-6, rtol=0)
    assert rms(right)[0, 0].item() == pytest.approx(0.496564, abs=1e-6)  # what a second norm would give
    with pytest.raises(StoreError, match="pass the target's final_norm"):
        CaptureStore(tmp_path / "pre_norm")


def test_files_made_with_different_taps_are_not_indexed_together(tmp_path):
    fill(tmp_path)
    fill(tmp_path / "other", taps=[1, 3])
    for name in ("captures-00001.safetensors", "sums/captures-00001.safetensors.json"):
        (tmp_path / "other" / name).rename(tmp_path / name)
    with pytest.raises(StoreError, match=r"captures-00001\.safetensors was made with other settings"):
        store.write_index(tmp_path, "captures", 2)


def test_token_counts_are_those_of_a_plain_counter(tmp_path):
    fill(tmp_path, kind="responses")
    opened = ResponseStore(tmp_path)
    supervised, everything = opened.token_counts("train", 50)
    plain_all, plain_supervised = Counter(), Counter()
    for row in opened.rows:
        read = opened.read(row)
        plain_all.update(read.ids.tolist())
        plain_supervised.update(i for i, s in zip(read.ids.tolist(), read.supervised.tolist(), strict=True) if s)
    assert everything.tolist() == [plain_all[i] for i in range(50)]
    assert supervised.tolist() == [plain_supervised[i] for i in range(50)]
    assert int(opened.token_counts("valid", 50)[1].sum()) == 0
    assert int(opened.token_counts("train", 50, {"other"})[1].sum()) == 0
    streamed = ResponseStore(tmp_path)
    streamed.token_counts("train", 50)
    assert not streamed._open and "rows" not in vars(streamed)  # nothing that grows with the rows
    with pytest.raises(StoreError, match="the vocabulary has 10"):
        opened.token_counts("train", 10)


def test_a_killed_writer_leaves_nothing_visible(tmp_path, monkeypatch):
    import safetensors.torch

    def die(tensors, path, metadata):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.torch, "save_file", die)
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_index_tells_files_rows_and_tokens(tmp_path):
    fill(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    assert [(f["rows"], f["tokens"], f["supervised"]) for f in index["files"]] == [(2, 66, 62), (1, 7, 5)]
