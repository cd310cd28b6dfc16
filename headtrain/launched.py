"""The data stages started by the user's own launcher: torchrun, DeepSpeed's, or srun, on one machine or several.

Each process is one worker. Rank 0 holds the run folder, reads the prompts and opens the stages; then all of them share
the batches by their claims (data_gen/claims.py), which need a folder whose locks hold between the machines. Whoever
ends last completes a stage, and the batch of a process that died is taken over by another one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from headtrain import children
from headtrain.config import ConfigError, RecipeConfig
from headtrain.files import Manifest, claimed, read_json
from headtrain.hardware import gpu_ids

DATA = ("prompts", "responses", "captures")
WAIT = 300.0  # seconds that other processes may start later than the first one
POLL = 1.0  # seconds between looks at what the others do


def own_device(config: RecipeConfig) -> dict[str, str]:
    """The environment of this process among those of its machine: which share of the devices is its own.

    A launcher that shows each process its own devices alone, as srun can, has chosen already.
    """
    target, local = config.target, int(os.environ.get("LOCAL_RANK", "0"))
    if target.split == "tensor":
        raise ConfigError("target.split=tensor: headtrain starts a team's processes itself, on one machine; use layers")
    if config.data.captures.backend == "vllm":
        raise ConfigError("data.captures.backend=vllm: headtrain starts its engines itself; use no launcher")
    if gpus := [] if target.device == "cpu" else gpu_ids():
        shares = children.shares(gpus, target.gpus)
        if local >= len(shares) > 1:
            raise ConfigError(
                f"LOCAL_RANK={local}: {len(gpus)} GPUs are enough for {len(shares)} processes of target.gpus="
                f"{target.gpus}; start no more on a machine"
            )
        return {"CUDA_VISIBLE_DEVICES": shares[local % len(shares)]}
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // here))
    return {"OMP_NUM_THREADS": threads, "DS_ACCELERATOR": "cpu"}


def generate(config: RecipeConfig) -> Path | None:
    """Prompts, responses and captures in this process and its fellows; the run folder on rank 0, None on the others."""
    from headtrain import pipeline  # which calls this

    os.environ |= own_device(config)
    if int(os.environ["RANK"]):
        job = pipeline.Job(pipeline.prepared(config))
        _wait_for_the_first(job)
        _share(job)
        return None
    with pipeline.opened(config, patience=10) as job:  # the others look at its lock, each for a moment
        job.mend()
        missing = [stage for stage in DATA if not job.complete(stage)]
        if missing:
            job.begin(missing)
            first = [stage for stage in job.groups(missing)[0][0] if stage not in ("responses", "captures")]
            _run(job, [stage for stage in first if stage != "prompts" or not job.open(stage)], missing)
            for stage in ("responses", "captures"):
                job.open(stage)
            _share(job)
        return job.run


def _run(job, stages: list[str], missing: list[str] = DATA) -> None:
    from headtrain.stages import run_stages

    if stages:
        options = [f"run_dir={job.run}", f"workers={os.environ.get('WORLD_SIZE', '1')}", f"coming={','.join(missing)}"]
        run_stages([",".join(stages), *options], job.config)


def _wait_for_the_first(job) -> None:
    """Until rank 0 has read the prompts and opened the stages. ConfigError when it does not begin, or has gone."""
    deadline = time.monotonic() + WAIT
    while not all(map(job.complete, DATA)):
        held = _is_held(job.run)
        deadline = time.monotonic() + WAIT / 10 if held else deadline
        opened = [Manifest(job.run / stage).data.get("fingerprint") == job.marks[stage][0] for stage in DATA]
        if held and all(opened) and job.complete("prompts"):
            return
        if time.monotonic() > deadline:
            raise ConfigError(
                f"run_dir={job.run}: rank 0 does not work in it; is it on a file system that all machines share, and "
                "on which locks (flock) hold between them?"
            )
        time.sleep(POLL)


def _is_held(run: Path) -> bool:
    with claimed(run / ".lock") as free:
        return not free


def _share(job) -> None:
    """Responses and captures, with the others, until they are complete."""
    rank, local = int(os.environ["RANK"]), job.config.data.responses.backend == "local"
    for stage in ("responses", "captures"):
        alone = stage == "responses" and not local  # given answers and servers are one process's work
        gone = 0
        while not job.complete(stage):
            if (rank == 0 or not alone) and _something_to_do(job.run, stage):
                _run(job, [stage])
                continue
            gone = 0 if rank == 0 or _is_held(job.run) else gone + 1
            if alone and gone > 5:
                raise ConfigError(f"{job.run / stage}: rank 0 has ended before it was complete")
            time.sleep(POLL)


def _something_to_do(run: Path, stage: str) -> bool:
    """Whether a batch is neither done nor in work, or all are done and nobody completes the stage."""
    folder = run / stage
    with claimed(folder / ".lock") as free:
        if not free:
            return False
    plan = run / "responses" / ("plan.json" if stage == "responses" else "index.json")
    if not plan.is_file():
        return stage == "responses"
    from headtrain.data_gen import capture, claims

    batches = range(len(read_json(plan)["batches"])) if stage == "responses" else capture.files_of(plan.parent, folder)
    left = [n for n in batches if not (folder / claims.file_name(stage, n)).is_file()]
    return not left or any(map(_is_free, (folder / "claims" / f"{n}.lock" for n in left)))


def _is_free(path: Path) -> bool:
    with claimed(path) as free:
        return free
