"""Helpers for the tests at the top of this folder: the command line in a child process, small recipes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment of every child: one thread, no network."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "COLUMNS": "200"}


@pytest.fixture
def headtrain(environment, tmp_path):
    """headtrain(*arguments) -> CompletedProcess of `python -m headtrain …` in an empty folder."""

    def call(*arguments: str, **more) -> subprocess.CompletedProcess:
        options = {"cwd": tmp_path, "env": environment, "timeout": 400} | more
        return subprocess.run(
            [sys.executable, "-m", "headtrain", *arguments], capture_output=True, text=True, check=False, **options
        )

    return call


@pytest.fixture
def recipe(tmp_path) -> Path:
    """A recipe of a tiny llama with three prompts of its own."""
    rows = [{"messages": [{"role": "user", "content": f"Count to {n}."}]} for n in range(3, 6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "target:\n  model: ./model\n  family: llama\n"
        "  shape: {layers: 8, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, intermediate: 128, vocab: 384}\n"
        f"data:\n  prompts: [{tmp_path / 'prompts.jsonl'}]\n"
        "head: {draft_vocab: 128}\ntrain: {steps: 4}\n"
    )
    return path


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub of hub_server.py; the client of this process talks to it, without waiting between its tries.

    `hub.log_in(role)` gives this process a token of user ann; `hub.environment` is for child processes.
    """
    import logging
    import time
    import types

    from huggingface_hub import constants

    spec = importlib.util.spec_from_file_location("headtrain_hub", Path(__file__).parent / "export" / "hub_server.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look there
    spec.loader.exec_module(module)
    hub, home = module.Hub(), tmp_path / "hf"
    links = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    mine = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": links, "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True, "HF_TOKEN_PATH": str(home / "token"), "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_DISABLE_PROGRESS_BARS": True}  # fmt: skip
    for name, value in mine.items():
        monkeypatch.setattr(constants, name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for handler in logging.getLogger("huggingface_hub").handlers:  # made when another test's stderr was the stream
        now = types.SimpleNamespace(write=lambda text: sys.stderr.write(text), flush=lambda: None)
        monkeypatch.setattr(handler, "stream", now)
    monkeypatch.setattr(time, "sleep", lambda seconds: hub.waits.append(seconds))
    hub.environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | {
        "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home), "OMP_NUM_THREADS": "1",
    }  # fmt: skip

    def log_in(role: str = "write") -> str:
        token = "hf_" + "".join(chr(ord("a") + i * 7 % 26) for i in range(34))
        hub.users[token] = {"name": "ann", "orgs": ["lab"], "role": role}
        monkeypatch.setenv("HF_TOKEN", token)
        hub.environment["HF_TOKEN"] = token
        return token

    hub.log_in = log_in
    yield hub
    hub.close()


@pytest.fixture(scope="session")
def mtp_targets():
    """The module mtp_targets.py: tiny targets with an MTP module."""
    place = Path(__file__).with_name("mtp_targets.py")
    spec = importlib.util.spec_from_file_location("headtrain_mtp_targets", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
