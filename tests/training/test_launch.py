"""Starting the training stage: arguments, several processes over gloo, failures, and a killed parent."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from headtrain.config import RecipeConfig
from headtrain.training.launch import command, from_slurm, processes, status
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


def logged(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "training" / "log.jsonl").read_text().splitlines()]


VARIANTS = {f"{precision}-zero{stage}": {"precision": precision, "zero_stage": stage}
            for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)}  # fmt: skip
VARIANTS |= {"bf16-muon": {"precision": "bf16", "optimizer": "muon"}}
VARIANTS |= {"fp32-noise": {"zero_stage": 3, "precision": "fp32", "noise": 0.1, "ema": 0.9}}
VARIANTS |= {f"fp32-lora-zero{stage}": {"zero_stage": stage, "precision": "fp32", "lora": 4} for stage in (0, 2, 3)}
UNEVEN = {"steps": None, "epochs": 1, "batch_tokens": 20, "log_every": 1}


@pytest.fixture(scope="module")
def two(toy, tmp_path_factory) -> Path:
    """The folder of the runs that two processes have trained, one after another: VARIANTS and UNEVEN."""
    from headtrain.training.ranks import free_port

    folder, arguments = tmp_path_factory.mktemp("two"), []
    for name, options in VARIANTS.items():
        toy.make_run(folder / name)
        arguments += [str(folder / name), json.dumps({"steps": 6, "log_every": 1} | options)]
    toy.make_run(folder / "uneven", train=5)
    arguments += [str(folder / "uneven"), json.dumps(UNEVEN)]
    ended = launched(config(gpus=2, master_port=int(free_port())), *arguments, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_processes_train_the_weights_of_one_with_the_same_global_batch(
    precision, two, toy, train, weights, tmp_path
):
    before, single = toy.toy_head().state_dict(), {}
    for name, options in VARIANTS.items():
        if options["precision"] != precision:
            continue
        kind = tuple(sorted((key, value) for key, value in options.items() if key != "zero_stage"))
        if kind not in single:
            run = tmp_path / f"one-{len(single)}"
            single[kind] = train(run, steps=6, log_every=1, accumulate=2, **dict(kind)), weights(run)
        log, one = single[kind]
        both = weights(two / name)
        keys = [key for key in one if "lora_B" in key] or ["fc.weight", "mix.weight", "lm_head.weight", "norm"]
        for key in keys:  # in bf16 too gradients are added up in fp32
            moved = one[key] - before.get(key, 0)
            assert (one[key] - both[key]).abs().max() < 1e-4 < moved.abs().max(), (name, key)
        for a, b in zip(log, logged(two / name), strict=True):
            assert a.get("tokens") == b.get("tokens") and a.get("steps") == b.get("steps")
            if "loss" in a:
                assert a["loss"] == pytest.approx(b["loss"], rel=1e-4), name
                assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4), name
                assert b["seconds"]["communication"] > 0
            else:
                assert a["tau"] == b["tau"]


def test_data_that_does_not_divide_by_the_processes_ends_on_all_of_them_at_once(two):
    """Five rows, one to a micro-batch, two processes: two steps of one epoch, with the same end for both."""
    assert [line["step"] for line in logged(two / "uneven") if "loss" in line] == [1, 2]
    assert (two / "uneven" / "head" / "config.json").is_file()


def test_a_run_resumes_with_another_number_of_processes_as_if_it_had_always_had_it(
    toy, train, weights, tmp_path, free_port
):
    """Stopped after step 4 of 8 with two processes and gone on with one, and the other way round; other ZeRO stages."""
    common = {"steps": 8, "save_every": 4, "keep": 9, "noise": 0.1, "ema": 0.9, "log_every": 1, "spike": 50.0}
    train(tmp_path / "one", accumulate=2, **common)
    going = tmp_path / "one-to-two"
    for run in ("two", "one-to-two"):
        toy.make_run(tmp_path / run)
    shutil.copytree(tmp_path / "one" / "training" / "checkpoints" / "step-00000004",
                    going / "training" / "checkpoints" / "step-00000004")  # fmt: skip
    ended = launched(
        config(gpus=2, master_port=free_port),
        str(tmp_path / "two"), json.dumps(common | {"zero_stage": 2}),
        str(going), json.dumps(common | {"zero_stage": 3}),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step-00000004: going on from step 4\nwritten by 1 processes, now 2 with train.accumulate=1" in ended.stdout
    back = tmp_path / "two-to-one"
    shutil.copytree(tmp_path / "two" / "training" / "checkpoints" / "step-00000004",
                    back / "training" / "checkpoints" / "step-00000004")  # fmt: skip
    toy.make_run(back)
    train(back, zero_stage=1, **common)  # train.accumulate is 1: the checkpoint says that a step has two micro-batches
    expected, losses = weights(tmp_path / "one"), [line["loss"] for line in logged(tmp_path / "one") if "loss" in line]
    for run in ("two", "one-to-two", "two-to-one"):
        found = weights(tmp_path / run)
        assert all(torch.allclose(found[name].float(), expected[name].float(), atol=1e-4) for name in expected), run
        mine = [line["loss"] for line in logged(tmp_path / run) if "loss" in line]
        assert mine == pytest.approx(losses[-len(mine) :], rel=1e-4), run


def rank_pids(launcher: int) -> dict[str, int]:
    """The training processes under a launcher's process: rank -> pid."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "environ").read_bytes().split(b"\0") if parent == launcher else []
        except OSError:
            continue
        found |= {word[5:].decode(): int(path.name) for word in words if word.startswith(b"RANK=")}
    return found


def test_kill_9_of_one_process_ends_the_job_in_seconds_and_names_it(toy, tmp_path, free_port):
    toy.make_run(tmp_path)
    argv, env = command(config(gpus=2, master_port=free_port), ["stage"])
    argv = [word for word in argv[: argv.index("headtrain")] if word != "--module"]
    options = {"steps": 10**6, "log_every": 1, "eval_every": 10**6, "save_every": 10**6}
    job = subprocess.Popen(
        [*argv, TOY, str(tmp_path), json.dumps(options)],
        env=os.environ | env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while status(tmp_path) is None or status(tmp_path)["step"] < 5:
            assert job.poll() is None, job.stderr.read()
            time.sleep(0.1)
        victim = rank_pids(job.pid)["1"]
        os.kill(victim, signal.SIGKILL)
        said = job.communicate(timeout=60)[1]
    finally:
        job.kill()
    assert job.returncode != 0
    assert f"training process 1 (pid {victim}) of 2 has ended before the others" in said


def slurm(**more) -> dict[str, str]:
    return {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"} | more


@pytest.mark.parametrize(
    ("nodes", "master"),
    [("gpu[003-006,9],other", "gpu003"), ("a1,a2", "a1"), ("solo", "solo"), ("n[7,9]-ib", "n7-ib")],
)
def test_a_task_of_srun_knows_its_place(nodes, master):
    assert from_slurm(slurm(SLURM_STEP_NODELIST=nodes), 29500) == {
        "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": master, "MASTER_PORT": "29500",
    }  # fmt: skip


def test_srun_is_not_seen_where_there_is_another_launcher_or_only_the_jobs_script():
    nodes = {"SLURM_STEP_NODELIST": "a1"}
    assert from_slurm(slurm(RANK="0", **nodes), 1) == from_slurm(slurm(SLURM_NTASKS="1", **nodes), 1) == {}
    script = slurm(**nodes)
    del script["SLURM_STEP_ID"]
    assert from_slurm(script, 1) == {}
    assert from_slurm(slurm(MASTER_ADDR="here", MASTER_PORT="7", **nodes), 1)["MASTER_ADDR"] == "here"


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
