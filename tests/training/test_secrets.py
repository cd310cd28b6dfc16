"""What a training run writes has no token of its environment in it, whatever it logs to."""

from __future__ import annotations

import pytest

SECRETS = {
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567", "CLUSTER_PASSWORD": "correct-horse-battery-staple",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
}  # fmt: skip


@pytest.mark.parametrize("debug", [False, True])
def test_no_token_of_the_environment_gets_into_a_file_of_the_run(debug, train, tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    secrets = dict(SECRETS)
    if debug:
        monkeypatch.setenv("WANDB_DEBUG", "true")
        del secrets["WANDB_API_KEY"]  # wandb writes its own key into its debugging file, says docs/push.md
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    train(tmp_path, steps=4, save_every=2, logger="wandb")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(path.suffix == ".wandb" for path in files) and any("checkpoint" in str(path) for path in files)
    said = capfd.readouterr()
    files["printed"] = (said.out + said.err).encode()
    for name, value in secrets.items():
        assert [path for path, data in files.items() if value.encode() in data] == [], name
