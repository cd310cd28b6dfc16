"""A whole run that ends on the Hub, with every library's debugging output on, and the head measured from there."""

from __future__ import annotations

import pytest

from headtrain.files import read_json

pytestmark = pytest.mark.slow


def test_a_fit_uploads_its_head_which_is_measured_by_its_hub_id_and_no_token_is_left_anywhere(hub, headtrain, tmp_path):
    token, run = hub.log_in(), tmp_path / "run"
    talk = {"HF_DEBUG": "1", "HF_HUB_VERBOSITY": "debug", "WANDB_MODE": "offline", "COLUMNS": "200",
            "HEADTRAIN_CACHE": str(tmp_path / "cache")}  # fmt: skip

    def call(*words: str) -> str:
        done = headtrain(*words, env=hub.environment | talk)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    said = call("fit", "recipe=eagle3_llama8b", "smoke=true", f"run_dir={tmp_path / 'tiny'}", "push.repo=ann/tiny")
    assert "would upload to ann/tiny (private)" in said and hub.asked("^(PUT|POST)") == []
    again = ("recipe=" + str(tmp_path / "tiny" / "config.yaml"), "smoke=false")
    said += call("fit", *again, f"run_dir={run}", "logger=wandb", "push.repo=ann/tiny", "push.dry_run=false")
    assert hub.files("ann/tiny")["model.safetensors"] == (run / "head" / "model.safetensors").read_bytes()
    target = tmp_path / "tiny" / "target" / "tiny-random-llama"
    made = tmp_path / "from-hub"
    said += call("eval", "head=ann/tiny", f"target={target}", *again, f"run_dir={made}", "drafters=[head]",
                 "speed_prompts=0", "cost_batches=[]")  # fmt: skip
    tau = {read_json(place / "report" / "report.json")["results"][1]["tau"] for place in (run, made)}
    assert len(tau) == 1, "the head from the Hub drafts as the one that was uploaded"
    assert hub.messages("ann/tiny")[-1].startswith(f"EAGLE-3 head, tau {tau.pop():.2f} (heldout")
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    sent = b"".join([*hub.bodies, *hub.blobs.values()])
    assert token.encode() not in written + sent + said.encode()
    assert str(tmp_path).encode() not in sent and b"5ca1ab1e5ca1ab1e" not in said.encode()
