"""A process of a launcher: its share of the machine's devices, and what it says when the first one is not there."""

from __future__ import annotations

import pytest

from headtrain import launched, pipeline
from headtrain.config import ConfigError, RecipeConfig
from headtrain.configload import load
from headtrain.data_gen import claims
from headtrain.files import claimed, write_json


def test_each_process_of_a_machine_has_its_share_of_the_devices(monkeypatch):
    config = RecipeConfig()
    config.target.gpus = 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launched.own_device(config) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"LOCAL_RANK=2: 5 GPUs are enough for 2 processes of target\.gpus=2"):
        launched.own_device(config)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")  # the launcher has chosen
    assert launched.own_device(config) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    config.target.device = "cpu"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launched.own_device(config) == {"OMP_NUM_THREADS": "3", "DS_ACCELERATOR": "cpu"}
    config.target.split = "tensor"
    with pytest.raises(ConfigError, match=r"target\.split=tensor: headtrain starts"):
        launched.own_device(config)
    config.target.split, config.data.captures.backend = "layers", "vllm"
    with pytest.raises(ConfigError, match=r"captures\.backend=vllm: headtrain starts its engines itself"):
        launched.own_device(config)


def test_a_process_whose_first_one_never_begins_says_so(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(launched, "WAIT", 1.0)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = load(str(recipe), [f"target.model={tmp_path / 'model'}", f"run_dir={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match="rank 0 does not work in it; is it on a file system that all machines"):
        launched._wait_for_the_first(pipeline.Job(config))


@pytest.mark.parametrize("stage", ["responses", "captures"])
def test_there_is_something_to_do_while_a_batch_of_the_stage_is_neither_done_nor_in_work(stage, tmp_path):
    for name in ("responses", stage):
        (tmp_path / name).mkdir(exist_ok=True)
    planned = {"responses": [0, 1, 2], "captures": [0, 2]}[stage]  # online training: batch 1 has no row to capture
    write_json(tmp_path / "responses" / "plan.json", {"batches": [[], [], []]})
    write_json(tmp_path / "responses" / "index.json", {"files": [{"rows": 1, "tokens": 9}] * 3})
    if stage == "captures":
        write_json(tmp_path / stage / "plan.json", {n: {"rows": 1, "tokens": 9} for n in planned})
    for n in planned[:-1]:
        (tmp_path / stage / claims.file_name(stage, n)).touch()
    assert launched._something_to_do(tmp_path, stage)
    with claimed(tmp_path / stage / "claims" / f"{planned[-1]}.lock"):
        assert not launched._something_to_do(tmp_path, stage)
    (tmp_path / stage / claims.file_name(stage, planned[-1])).touch()
    assert launched._something_to_do(tmp_path, stage)  # it is to be completed


def test_fit_is_not_for_launchers(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="under a launcher run headtrain generate, then headtrain train"):
        pipeline.fit(RecipeConfig())
