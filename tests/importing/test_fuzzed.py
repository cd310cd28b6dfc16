"""Broken and hostile checkpoints of every format: one line that names what is wrong, no traceback, nothing written."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import importing_checkpoints as made
import pytest
import torch
from safetensors.torch import load_file, save_file

from headtrain.cli import main
from headtrain.importing import import_head

FORMATS = {
    "sglang": made.sglang, "trtllm": made.trtllm, "speculators": made.speculators, "peagle": made.peagle,
    "eagle": made.eagle, "medusa": made.medusa, "ours": made.sglang,
}  # fmt: skip
INDEX = "model.safetensors.index.json"


@pytest.fixture
def refused(tmp_path, target, capsys):
    """refused(place): the one line that `headtrain import` prints of the checkpoint there."""

    def call(place: Path, *more: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        status = main(["import", f"head={place}", f"out={tmp_path / 'out'}", f"target={target}", *more])
        said = capsys.readouterr()
        assert status == 2, said.err + said.out
        lines = said.err.strip().splitlines()
        assert lines[0].startswith("error: ") and "Traceback" not in said.err and not said.out
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        return said.err

    return call


@pytest.fixture
def theirs(tmp_path, target):
    """theirs(format): such a checkpoint's folder, new; `ours` is what the import of one has become."""

    def write(format: str) -> Path:
        for name in ("theirs", "made"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        place = made.write(tmp_path / "theirs", *FORMATS[format]())
        return import_head(str(place), tmp_path / "made", target=str(target)).folder if format == "ours" else place

    return write


def some_matrix(tensors: dict) -> str:
    """A weight that every format has and that is not square."""
    names = sorted(n for n, t in tensors.items() if t.dim() == 2 and t.shape[0] != t.shape[1] and "fc" not in n)
    return next((n for n in names if "down_proj" in n), names[0])


# ------------------------------------------------------------------------------------------------- tensors

TENSORS = {  # what happens to a tensor, and what is said of it
    "missing": (lambda t, n: t.pop(n), "missing"),
    "extra": (lambda t, n: t.update({"surprise.weight": torch.ones(3)}), "surprise.weight is not a tensor of this"),
    "transposed": (lambda t, n: t.update({n: t[n].T.contiguous()}), "transposed|columns"),
    "cut": (lambda t, n: t.update({n: t[n][:, :-1].contiguous()}), "has shape|columns"),
    "flat": (lambda t, n: t.update({n: t[n].flatten()}), "has shape|missing"),
    "empty": (lambda t, n: t.update({n: t[n][:0]}), "has shape|missing"),
    "a scalar": (lambda t, n: t.update({n: torch.tensor(1.0)}), "has shape|missing"),
    "NaN": (lambda t, n: t[n].view(-1)[3].fill_(torch.nan), "1 values that are NaN or infinite"),
    "infinite": (lambda t, n: t[n].view(-1)[3].fill_(torch.inf), "1 values that are NaN or infinite"),
    "whole numbers": (lambda t, n: t.update({n: t[n].long()}), "torch.int64"),
    "fp8": (lambda t, n: t.update({n: t[n].to(torch.float8_e4m3fn)}), "stored as F8_E4M3.*before it was quantised"),
    "int8": (lambda t, n: t.update({n: t[n].to(torch.int8)}), "stored as I8"),
    "double": (lambda t, n: t.update({n: t[n].double()}), "stored as F64"),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_broken_tensor_is_named(format, kind, theirs, refused):
    place, (spoil, words) = theirs(format), TENSORS[kind]
    tensors = load_file(place / "model.safetensors")
    name = some_matrix(tensors)
    spoil(tensors, name)
    save_file(tensors, place / "model.safetensors")
    said = refused(place)
    known = {name, name.replace("layers.0.", "midlayer."), "surprise.weight"}
    if format == "medusa":
        known |= {"blocks.0.layers.0.weight", "lm_heads.0.weight"}
    assert any(n in said for n in known), said
    assert re.search(words, said), said


@pytest.mark.parametrize("format", FORMATS)
def test_every_missing_tensor_is_noticed(format, theirs, refused):
    """But for what follows: biases that are zeros where they are not there, t2d from d2t and d2t from t2d."""
    place = theirs(format)
    tensors = load_file(place / "model.safetensors")
    for name in tensors:
        if name.endswith("bias") or (name in ("d2t", "t2d") and tensors.keys() >= {"d2t", "t2d"}):
            continue
        save_file({n: t for n, t in tensors.items() if n != name}, place / "model.safetensors")
        said = refused(place)
        assert name.split(".")[-2 if "." in name else 0] in said or "missing" in said, (name, said)


# ------------------------------------------------------------------------------------------------- files


def rewritten(change):
    """A change of the bytes of model.safetensors."""
    return lambda place: (place / "model.safetensors").write_bytes(change((place / "model.safetensors").read_bytes()))


def linked(name: str):
    """A file of the folder moved out of it, with a link in its place."""

    def change(place: Path) -> None:
        outside = place.parent / f"outside-{name}"
        (place / name).rename(outside)
        (place / name).symlink_to(outside)

    return change


def pickled(name: str, legacy: bool = False):
    def change(place: Path) -> None:
        tensors = load_file(place / "model.safetensors")
        (place / "model.safetensors").unlink()
        torch.save(tensors, place / name, _use_new_zipfile_serialization=not legacy)

    return change


FILES = {
    "cut": (rewritten(lambda b: b[:-10]), r"model\.safetensors: cannot be read as safetensors"),
    "cut in the header": (rewritten(lambda b: b[:40]), r"model\.safetensors: cannot be read as safetensors"),
    "zero bytes": (rewritten(lambda b: b""), r"model\.safetensors: cannot be read as safetensors"),
    "seven bytes": (rewritten(lambda b: b[:7]), r"model\.safetensors: cannot be read as safetensors"),
    "longer": (rewritten(lambda b: b + b"more"), r"model\.safetensors: cannot be read as safetensors"),
    "huge header": (rewritten(lambda b: struct.pack("<Q", 2**62) + b[8:]), "cannot be read as safetensors"),
    "large header": (rewritten(lambda b: struct.pack("<Q", 2**30) + b[8:]), "cannot be read as safetensors"),
    "header of zeros": (rewritten(lambda b: b[:8] + bytes(len(b) - 8)), "cannot be read as safetensors"),
    "git lfs": (rewritten(lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "git lfs pull"),
    "pickle by another name": (rewritten(lambda b: pickle.dumps({"a": b})), "can run code.*convert.*weights_only=True"),
    "torch file by another name": (pickled("model.safetensors"), "can run code.*convert.*weights_only=True"),
    "pickle": (pickled("pytorch_model.bin"), r"pytorch_model\.bin: pickled weights can run code.*weights_only=True"),
    "old pickle": (pickled("pytorch_model.bin", legacy=True), r"pytorch_model\.bin: pickled weights can run code"),
    "medusa's pickle": (pickled("medusa_lm_head.pt"), r"medusa_lm_head\.pt: pickled weights can run code"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no .safetensors file"),
    "a folder": (lambda p: [(p / "model.safetensors").unlink(), (p / "model.safetensors").mkdir()], "model.safe"),
    "two files": (
        lambda p: [(p / "model.safetensors").rename(p / "b.safetensors"), save_file({}, p / "a.safetensors")],
        "a.safetensors, b.safetensors.* and no model.safetensors.index",
    ),
    "link out": (linked("model.safetensors"), "model.safetensors: a link to .*out of the head's folder"),
    "config link": (linked("config.json"), "config.json: a link to .*out of the head's folder"),
    "no config": (lambda p: (p / "config.json").unlink(), "config.json is missing"),
    "no JSON": (lambda p: (p / "config.json").write_text("{'hidden_size': 3"), "config.json: not valid JSON"),
    "empty config": (lambda p: (p / "config.json").write_text(""), "config.json: not valid JSON"),
    "bytes": (lambda p: (p / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json: not valid JSON"),
    "nested JSON": (lambda p: (p / "config.json").write_text("[" * 100000), "config.json: not valid JSON"),
    "a list": (lambda p: (p / "config.json").write_text("[1, 2]"), "config.json: holds a list, not an object"),
    "a number": (lambda p: (p / "config.json").write_text("NaN"), "config.json: holds a float, not an object"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("format", ["sglang", "medusa", "ours"])
def test_a_broken_or_strange_file_is_named(format, kind, theirs, refused):
    place, (spoil, words) = theirs(format), FILES[kind]
    spoil(place)
    assert re.search(words, refused(place), re.DOTALL)


def test_the_command_that_is_printed_converts_a_pickle(theirs, refused, target, tmp_path):
    place = theirs("sglang")
    tensors = load_file(place / "model.safetensors")
    pickled("pytorch_model.bin")(place)
    command = refused(place).strip().splitlines()[-1].strip()
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True, timeout=120)
    assert all(torch.equal(t, tensors[n]) for n, t in load_file(place / "model.safetensors").items())
    assert import_head(str(place), tmp_path / "ours", target=str(target)).type == "eagle3"


# ------------------------------------------------------------------------------------------------- the index


def sharded(place: Path) -> tuple[dict, dict]:
    """Splits the weights in two and writes an index; returns (the index, tensors of the second file)."""
    tensors = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, place / file)
    index = {"metadata": {}, "weight_map": {n: file for file, part in halves.items() for n in part}}
    (place / INDEX).write_text(json.dumps(index))
    return index, {n: tensors[n] for n in halves["b.safetensors"]}


def test_a_checkpoint_in_shards_is_the_same_head(theirs, tmp_path, target):
    place = theirs("sglang")
    whole = load_file(place / "model.safetensors")
    sharded(place)
    written = load_file(import_head(str(place), tmp_path / "o", target=str(target)).folder / "model.safetensors")
    assert all(torch.equal(written[n], t) for n, t in whole.items())


def moved(name: str):
    """The first tensor of the index said to be in another file."""

    def change(index: dict, place: Path) -> None:
        index["weight_map"][min(index["weight_map"])] = name.format(place=place)

    return change


INDEXES = {
    "up and away": (moved("../theirs/a.safetensors"), r"'\.\./theirs/a\.safetensors'"),
    "absolute": (moved("{place}/a.safetensors"), "a .safetensors file of this folder must be named"),
    "backslashes": (moved("..\\a.safetensors"), "must be named"),
    "a pickle": (moved("pytorch_model.bin"), "must be named"),
    "a name that is none": (moved(""), "must be named"),
    "a shard that is not there": (moved("c.safetensors"), r"names c\.safetensors, which is not there"),
    "a tensor of the other shard": (moved("b.safetensors"), "which .* does not list there|is missing"),
    "a number": (lambda i, p: i["weight_map"].update({min(i["weight_map"]): 3}), "must be named"),
    "a tensor that is nowhere": (lambda i, p: i["weight_map"].update({"gone": "a.safetensors"}), "gone is missing"),
    "a tensor that is not listed": (lambda i, p: i["weight_map"].pop(min(i["weight_map"])), "does not list there"),
    "no map": (lambda i, p: i.pop("weight_map"), "weight_map must be an object"),
    "an empty map": (lambda i, p: i.update(weight_map={}), "weight_map must be an object"),
    "a list": (lambda i, p: i.update(weight_map=["a.safetensors"]), "weight_map must be an object"),
    "a link out": (lambda i, p: linked("a.safetensors")(p), "a link to .*out of the head's folder"),
    "one more file": (lambda i, p: shutil.copy(p / "a.safetensors", p / "model.safetensors"), "which lies beside it"),
}  # fmt: skip


@pytest.mark.parametrize("kind", INDEXES)
@pytest.mark.parametrize("format", ["trtllm", "eagle"])
def test_an_index_that_points_elsewhere_is_refused(format, kind, theirs, refused):
    place, (spoil, words) = theirs(format), INDEXES[kind]
    index, _ = sharded(place)
    spoil(index, place)
    (place / INDEX).write_text(json.dumps(index))
    assert re.search(words, refused(place))


def test_a_tensor_in_two_shards_is_refused_with_both(theirs, refused):
    place = theirs("sglang")
    index, second = sharded(place)
    name = next(n for n, file in index["weight_map"].items() if file == "a.safetensors")
    save_file(second | {name: torch.ones(2)}, place / "b.safetensors")
    assert f"tensor {name} is in a.safetensors and in b.safetensors" in refused(place)


def test_an_index_that_is_no_json_is_named(theirs, refused):
    place = theirs("sglang")
    sharded(place)
    (place / INDEX).write_text("{")
    assert f"{INDEX}: not valid JSON" in refused(place)


# ------------------------------------------------------------------------------------------------- config.json

WRONG = [[], {}, "x", 0, -3, 2.5, 1e400, 2**70, True, [None], {"a": 1}]
KEYS = {
    "sglang": ["hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps", "rope_theta", "draft_vocab_size",
               "eagle_config", "rope_scaling", "norm_before_residual", "architectures", "num_hidden_layers"],
    "speculators": ["speculators_config", "transformer_layer_config", "speculators_model_type", "draft_vocab_size",
                    "eagle_aux_hidden_state_layer_ids"],
    "peagle": ["mask_token_id"],
    "eagle": ["hidden_size", "head_dim", "num_key_value_heads", "max_position_embeddings", "rope_parameters"],
    "medusa": ["medusa_num_heads", "medusa_num_layers", "vocab_size", "original_lm_head"],
}  # fmt: skip


def attempt(place: Path, target: Path, out: Path, capsys) -> str:
    """What `headtrain import` says; either it worked or it is one line."""
    status = main(["import", f"head={place}", f"out={out}", f"target={target}"])
    said = capsys.readouterr()
    assert status in (0, 2) and "Traceback" not in said.err, said.err
    assert (out / "model.safetensors").is_file() == (status == 0)
    shutil.rmtree(out, ignore_errors=True)
    return said.err


@pytest.mark.parametrize(("format", "key"), [(format, key) for format, keys in KEYS.items() for key in keys])
def test_a_config_value_of_a_wrong_type_is_named(format, key, theirs, target, tmp_path, capsys):
    place = theirs(format)
    config, names = json.loads((place / "config.json").read_text()), 0
    for value in WRONG:
        if type(value) is type(config.get(key)) and value:
            continue
        (place / "config.json").write_text(json.dumps({**config, key: value}))
        names += key in attempt(place, target, tmp_path / "out", capsys)
    assert names >= 5  # an empty object or list may be as good as none


def test_our_own_section_with_anything_in_it_is_one_line(theirs, target, tmp_path, capsys):
    place = theirs("ours")
    config = json.loads((place / "config.json").read_text())
    for key in config["headtrain"]:
        for value in WRONG:
            (place / "config.json").write_text(json.dumps(config | {"headtrain": config["headtrain"] | {key: value}}))
            attempt(place, target, tmp_path / "out", capsys)
    for section in (*WRONG, {"type": "eagle3"}, {"type": "medusa"}, {"type": ["x"]}, {"unheard_of": 1}):
        (place / "config.json").write_text(json.dumps(config | {"headtrain": section}))
        assert attempt(place, target, tmp_path / "out", capsys)


def test_random_bytes_in_a_checkpoint_never_end_in_a_traceback(theirs, target, tmp_path, capsys):
    place, g = theirs("sglang"), torch.Generator().manual_seed(0)
    for name in ("config.json", "model.safetensors"):
        whole = (place / name).read_bytes()
        for _ in range(40):
            spoilt = bytearray(whole)
            for at in torch.randint(0, min(len(whole), 1500), (3,), generator=g).tolist():
                spoilt[at] = int(torch.randint(0, 256, (), generator=g))
            (place / name).write_bytes(bytes(spoilt))
            attempt(place, target, tmp_path / "out", capsys)
        (place / name).write_bytes(whole)
