"""A head's folder with optimizer states, hidden states, a log and a cache in it: only the head goes to the Hub."""

from __future__ import annotations

import json

import pytest

from headtrain import cli

TREE = ("global_step180/mp_rank_00_model_states.pt", "global_step180/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "hidden/000001.safetensors", "train.log", ".cache/x")  # fmt: skip


@pytest.fixture
def out(tmp_path):
    out = tmp_path / "out"
    for name in TREE:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123456789")
    ours = {"type": "eagle", "vocab_size": 9, "draft_vocab_size": 9, "unroll": 3}
    (out / "config.json").write_text(json.dumps({"headtrain": ours}))
    (out / "model.safetensors").write_bytes(bytes(60_000))
    (out / "README.md").write_text("an older card")
    return out


def push(out, *more: str) -> int:
    return cli.main(["push", f"head={out}", "repo=ann/out", *more])


def test_the_dry_run_lists_the_head_and_nothing_else(out, hub, capsys):
    assert push(out, "dry_run=true") == 0 and hub.log == []
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith(" B")]
    assert listed == ["README.md", "config.json", "model.safetensors"]


def test_only_the_file_that_failed_twice_is_sent_again(out, hub):
    hub.log_in()
    hub.fail("PUT /lfs", 502, times=2)
    assert push(out) == 0 and hub.repos["ann/out"].private
    assert len(hub.asked("PUT /lfs")) == 3 and len(hub.asked("/preupload/")) == len(hub.asked("/commit/")) == 1
    assert set(hub.files("ann/out")) == {"README.md", "config.json", "model.safetensors"}


def test_a_403_for_ever_ends_at_once_and_the_head_stays(out, hub, capsys):
    token = hub.log_in()
    hub.fail("/commit/", 403)
    assert push(out) == 2 and len(hub.asked("/commit/")) == 1 and hub.waits == []
    said = capsys.readouterr()
    assert "may not write there" in said.err and token not in said.out + said.err
    assert (out / "model.safetensors").stat().st_size == 60_000


def test_a_token_that_the_hub_rejects_stops_before_anything_is_sent(out, hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz0123456789")
    assert push(out) == 2 and hub.repos == {} and hub.asked("^(PUT|POST)") == []
    assert "does not accept the token" in capsys.readouterr().err
