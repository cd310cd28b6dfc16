"""Starting the training stage: arguments, several processes over gloo, failures, and a killed parent."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headtrain.config import RecipeConfig
from headtrain.training.launch import command, processes, status
from headtrain.training.parent import PARENT, start_time

TOY = str(Path(__file__).with_name("toy.py"))


def config(**launch) -> RecipeConfig:
    recipe = RecipeConfig()
    for key, value in launch.items():
        setattr(recipe.launch, key, value)
    return recipe


def world_of(argv: list[str]) -> dict:
    return json.loads(base64.urlsafe_b64decode(next(a for a in argv if a.startswith("--world_info=")).split("=", 1)[1]))


def test_one_process_starts_plainly_with_its_rank_set():
    argv, env = command(config(), ["stage", "training", "run_dir=a b"])
    assert argv[0] == sys.executable and argv[-4:] == ["headtrain", "stage", "training", "run_dir=a b"]
    assert not any("deepspeed" in word for word in argv)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("0", "1", "0")
    assert env["DS_ACCELERATOR"] == "cpu" and "MASTER_PORT" not in env  # several runs on one machine do not collide
    assert env[PARENT] == f"{os.getpid()}:{start_time(os.getpid())}"


def test_several_processes_start_through_deepspeeds_launcher_without_local_rank_arguments():
    argv, env = command(config(gpus=2), ["stage", "training"])
    assert "deepspeed.launcher.launch" in argv and "--no_local_rank" in argv and "--module" in argv
    assert world_of(argv) == {"localhost": [0, 1]}
    assert "RANK" not in env
    assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_the_users_choice_of_devices_is_kept():
    recipe = config()
    assert processes(recipe, ["2", "5"]) == 2 and processes(recipe) == 1
    argv, env = command(recipe, ["stage"], gpus=["2", "5"])
    assert world_of(argv) == {"localhost": [2, 5]} and "DS_ACCELERATOR" not in env
    assert command(config(gpus=1), ["stage"], gpus=["2", "5"])[1]["CUDA_VISIBLE_DEVICES"] == "2"
    with pytest.raises(ValueError, match=r"launch\.gpus=3: this machine has 2 CUDA devices"):
        command(config(gpus=3), ["stage"], gpus=["2", "5"])


def test_a_hostfile_goes_to_deepspeeds_ssh_launcher(tmp_path):
    argv, _ = command(config(hostfile=str(tmp_path / "hosts"), gpus=4), ["stage"])
    assert "deepspeed.launcher.runner" in argv
    assert argv[argv.index("--hostfile") + 1] == str(tmp_path / "hosts")
    assert argv[argv.index("--num_gpus") + 1] == "4"


def test_threads_are_the_configs_when_it_names_them():
    recipe = config(gpus=2)
    recipe.train.threads = 3
    assert command(recipe, ["stage"])[1]["OMP_NUM_THREADS"] == "3"


def test_status_is_the_last_whole_line_of_the_log(tmp_path):
    assert status(tmp_path) is None
    log = tmp_path / "training" / "log.jsonl"
    log.parent.mkdir()
    log.write_text("")
    assert status(tmp_path) is None
    log.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert status(tmp_path) == {"step": 2}
    log.write_text('{"step": 1}\n' * 20_000 + '{"step": 3}\n')
    assert status(tmp_path) == {"step": 3}


def test_the_launching_side_imports_nothing_heavy():
    code = (
        "import sys, headtrain.training.launch; "
        "heavy = {'torch', 'deepspeed', 'transformers', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def launched(recipe: RecipeConfig, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess:
    """Runs the command that `command` makes, with the toy in the place of `headtrain`."""
    argv, env = command(recipe, ["stage"])
    argv = [word for word in argv[: argv.index("headtrain")] if word != "--module"]
    return subprocess.run(
        [*argv, TOY, *arguments], env=os.environ | env, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_two_processes_train_the_weights_of_one_with_the_same_global_batch(toy, train, weights, tmp_path, free_port):
    variants = {
        "zero0": {}, "zero1": {"zero_stage": 1}, "zero2": {"zero_stage": 2},
        "bf16": {"precision": "bf16", "log_every": 6}, "muon": {"precision": "bf16", "optimizer": "muon"},
    }  # fmt: skip
    arguments = []
    for name, options in variants.items():
        toy.make_run(tmp_path / name)
        arguments += [str(tmp_path / name), json.dumps({"steps": 6} | options)]
    ended = launched(config(gpus=2, master_port=free_port), *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for name, options in variants.items():
        exact = options.get("precision") != "bf16"  # in bf16 rounding differs with the packing of a sum
        single = {key: value for key, value in options.items() if key != "zero_stage"}
        log = train(tmp_path / f"{name}-one", steps=6, accumulate=2, **single)
        one, two, before = weights(tmp_path / f"{name}-one"), weights(tmp_path / name), toy.toy_head().state_dict()
        for key in ("fc.weight", "mix.weight", "lm_head.weight", "norm"):
            apart, moved = (one[key] - two[key]).abs(), (one[key] - before[key]).abs()
            assert apart.max() < 1e-4 if exact else apart.mean() < 0.1 * moved.mean(), (name, key)
        both = [json.loads(line) for line in (tmp_path / name / "training" / "log.jsonl").read_text().splitlines()]
        for a, b in zip(log, both, strict=True):
            assert a.get("tokens") == b.get("tokens") and a.get("steps") == b.get("steps")
            if "loss" in a:
                assert a["loss"] == pytest.approx(b["loss"], rel=1e-5 if exact else 1e-3)
        states = list((tmp_path / name / "training" / "checkpoints").glob("*/rng-*.safetensors"))
        assert len(states) == 2


def test_a_failing_process_ends_the_others_and_shows_its_error(toy, tmp_path, free_port):
    toy.make_run(tmp_path)
    began = time.monotonic()
    ended = launched(config(gpus=2, master_port=free_port), str(tmp_path), json.dumps({"steps": 50, "fail_rank": 1}))
    assert ended.returncode != 0
    assert "process 1 fails on purpose" in ended.stderr
    assert time.monotonic() - began < 100


def test_a_process_ends_when_the_one_that_started_the_run_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        code = "from headtrain.training.parent import end_with_parent as e; e(); import time; time.sleep(60)"
        env = os.environ | {PARENT: f"{parent.pid}:{start_time(parent.pid)}"}
        child = subprocess.Popen([sys.executable, "-c", code], env=env)
        time.sleep(1.0)
        assert child.poll() is None
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert child.wait(timeout=10) == 143
    finally:
        parent.kill()
        parent.wait()
