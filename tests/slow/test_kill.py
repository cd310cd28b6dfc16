"""`kill -9` at random moments of every stage: the next start goes on and ends with the same data and a working head."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from headtrain.files import Manifest, read_json

pytestmark = pytest.mark.slow

STAGES = {
    "prompts": ["prompts"], "responses": ["responses", "captures"], "training": ["training", "head"],
    "report": ["report"],
}  # fmt: skip
KILLS = 10  # per stage


@pytest.fixture(scope="module")
def start():
    """start(run) -> a running `headtrain fit` of a small run in that folder."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    more = ["recipe=eagle3_llama8b", "smoke=true", "data.held_out=3"]

    def begin(run) -> subprocess.Popen:
        argv = [sys.executable, "-m", "headtrain", "fit", f"run_dir={run}", *more]
        return subprocess.Popen(
            argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    return begin


def finish(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return said


def response_ids(run) -> dict[str, list[int]]:
    from headtrain.data_gen.store import ResponseStore

    store = ResponseStore(run / "responses")
    return {row.id: store.read(row).ids.tolist() for row in store.rows}


@pytest.fixture(scope="module")
def unbroken(start, tmp_path_factory):
    run = tmp_path_factory.mktemp("unbroken") / "run"
    finish(start(run))
    return response_ids(run)


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_is_killed_ten_times_in_a_stage_ends_like_an_unbroken_one(stage, start, unbroken, tmp_path):
    from headtrain.heads.base import load_head

    run, dice = tmp_path / "run", random.Random(stage)
    for _ in range(KILLS):
        if Manifest(run / stage).data.get("complete"):  # so that every kill falls before or into the stage
            for name in STAGES[stage]:
                shutil.rmtree(run / name)
        process, deadline = start(run), time.monotonic() + 300
        while not (run / stage / "manifest.json").is_file() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            process.wait(timeout=dice.uniform(0, 14))  # a child needs some seconds for its imports
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.communicate()
        time.sleep(0.3)  # the kernel ends the children
    finish(start(run))
    assert response_ids(run) == unbroken
    assert all(Manifest(run / name).data["complete"] for name in ("responses", "captures", "training", "report"))
    head = load_head(run / "head")
    assert all(bool(tensor.isfinite().all()) for tensor in head.parameters())
    assert read_json(run / "report" / "report.json")["results"]
    assert not [path for path in run.rglob("*.part") if "head" in path.parts]
