"""How the training stage is started, and how far it is. Imports nothing heavy: the parent of a run uses it."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headtrain.config import RecipeConfig
from headtrain.training.parent import PARENT, start_time

TARGET_GPUS = "HEADTRAIN_TARGET_GPUS"  # launch.target=apart: devices of this machine's targets, process by process
TAIL = 1 << 16  # bytes of the log's end that are read for the last line


def processes(config: RecipeConfig, gpus: Sequence[str] = ()) -> int:
    """Processes of the training stage on each machine: `launch.gpus`, where auto = the CUDA devices, or 1 on a CPU.

    With launch.target=apart, as many as have a device of their own and another for the target.
    """
    return max(1, len(gpus) // _each(config)) if config.launch.gpus == "auto" else int(config.launch.gpus)


def _each(config: RecipeConfig) -> int:
    """Devices that one training process and its target take."""
    return 1 + config.target.gpus if config.launch.target == "apart" else 1


def command(
    config: RecipeConfig, module_args: Sequence[str], gpus: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """(argv, additions to the environment) of the training stage.

    module_args: arguments of `headtrain` that make a child train, such as ["stage", "train", "run_dir=…"].
    gpus: the CUDA devices to use, as in CUDA_VISIBLE_DEVICES; none on a CPU. One process is started plainly, several
    through DeepSpeed's launcher: its per-machine half here, its ssh half with `launch.hostfile`. The processes of this
    machine end with the process that calls this function, even when it is killed.
    Raises ValueError when launch.gpus asks for more devices than there are.
    """
    count, port, each = processes(config, gpus), str(config.launch.master_port), _each(config)
    if gpus and count * each > len(gpus):
        more = f" with launch.target=apart takes {count * each}" if each > 1 else ""
        raise ValueError(f"launch.gpus={count}{more}: this machine has {len(gpus)} CUDA devices")
    env = {
        "OMP_NUM_THREADS": str(config.train.threads or max(1, len(os.sched_getaffinity(0)) // (count * each))),
        "TOKENIZERS_PARALLELISM": "false",
        PARENT: f"{os.getpid()}:{start_time(os.getpid())}",
    }
    if not gpus:
        env["DS_ACCELERATOR"] = "cpu"
    elif each > 1:
        env[TARGET_GPUS] = ",".join(gpus[count : count * each])
    python, target = [sys.executable, "-u", "-m"], ["headtrain", *module_args]
    flags = ["--quiet", "--no_local_rank", "--module"]
    if config.launch.hostfile:
        hosts = ["--hostfile", str(Path(config.launch.hostfile).absolute())]
        limit = [] if config.launch.gpus == "auto" else ["--num_gpus", str(count)]
        return [*python, "deepspeed.launcher.runner", *hosts, *limit, "--master_port", port, *flags, *target], env
    if count == 1:
        env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # it picks a free port, so that runs do not collide
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = gpus[0]
        return [*python, *target], env
    devices = [int(d) if d.isdigit() else d for d in gpus[:count]] or list(range(count))
    world = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
    where = [f"--world_info={world}", "--master_addr=127.0.0.1", f"--master_port={port}"]
    return [*python, "deepspeed.launcher.launch", *where, *flags, *target], env


def target_devices(environ: Mapping[str, str], gpus: Sequence[str], rank: int, local: int, each: int) -> list[str]:
    """The `each` CUDA devices of the target beside this machine's training process number `rank` of `local`.

    Those that `command` chose; where another launcher started the processes, the ones behind those of all of them, or,
    where each sees devices of its own only, its others. ValueError when there are none.
    """
    if TARGET_GPUS in environ:
        return environ[TARGET_GPUS].split(",")[rank * each : (rank + 1) * each]
    if len(gpus) >= local * (1 + each):
        return list(gpus[local + rank * each : local + (rank + 1) * each])
    if len(gpus) == 1 + each:
        return [gpu for n, gpu in enumerate(gpus) if n != rank % len(gpus)]
    raise ValueError(
        f"launch.target=apart: {local} training processes of this machine and their targets take {local * (1 + each)} "
        f"CUDA devices; this process sees {len(gpus)}"
    )


def from_slurm(environ: Mapping[str, str], port: int) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of a process that `srun` started as one of several.

    Empty elsewhere: where RANK is set already, and in the job's script itself, which has no SLURM_STEP_ID. The master
    is the first machine of the step. port: the master's, where MASTER_PORT does not say it.
    """
    if "RANK" in environ or "SLURM_STEP_ID" not in environ or int(environ.get("SLURM_NTASKS", "1")) == 1:
        return {}
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]  # such as gpu[003-006,9],other
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes}: it names no machine; set MASTER_ADDR and RANK yourself")
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "MASTER_ADDR": environ.get("MASTER_ADDR") or "".join(part or "" for part in found.groups()),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }


def status(run: Path) -> dict[str, Any] | None:
    """The last line of training/log.jsonl (step, share, loss, tau, tokens_per_s, left_s, …), or None before it."""
    path = Path(run) / "training" / "log.jsonl"
    if not path.is_file():
        return None
    with open(path, "rb") as handle:
        handle.seek(max(0, path.stat().st_size - TAIL))
        lines = handle.read().split(b"\n")[:-1]  # what follows the last newline is being written
    return json.loads(lines[-1]) if lines and lines[-1] else None
