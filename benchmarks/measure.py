"""One measurement in one fresh process: a training step, decoding, generation, or the machine's matmul speed.

`python -m benchmarks.measure '{"case": …, "repeats": 1, "seed": 0}'` prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
QUIET = 0.1  # cores that anything else may keep busy before a measurement counts as disturbed


def run(request: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
    """Runs one request in a process of its own with one thread; RuntimeError with its last words if it fails.

    The answer also says how many cores anything else kept busy meanwhile (`others`), stolen time included.
    """
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    command = [sys.executable, "-m", "benchmarks.measure", json.dumps(request)]
    machine, ours, wall = _machine_busy(), _children_busy(), time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | threads | {"TORCHDYNAMO_DISABLE": "1"}, capture_output=True, text=True,
        check=False, timeout=timeout,
    )  # fmt: skip
    machine, ours, wall = _machine_busy() - machine, _children_busy() - ours, time.perf_counter() - wall
    if done.returncode:
        raise RuntimeError(f"{request}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"others": max(0.0, (machine - ours) / wall)}


def _machine_busy() -> float:
    """CPU seconds that the whole machine was busy since boot, time stolen by a hypervisor included."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _children_busy() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def status(field: str) -> int:
    """A field of /proc/self/status in bytes, such as VmRSS."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only")


def memory_above(work: Callable[[], Any]) -> tuple[Any, int]:
    """(result, bytes): how far the process's resident memory rises above where it was while `work` runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from the present size
    before = status("VmRSS")
    result = work()
    return result, max(0, status("VmHWM") - before)


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """(result, {core_s: CPU time of this process, wall_s})."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    return result, {"core_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


def matmul_speed(dtype: str, size: int = 2048, repeats: int = 5) -> dict[str, float]:
    """FLOP/s of the best of some square matrix products on one thread."""
    import torch

    from benchmarks.steps import DTYPES

    a, b = (torch.randn(size, size).to(DTYPES[dtype]) for _ in range(2))
    times = [timed(lambda: a @ b)[1]["core_s"] for _ in range(repeats)]
    return {"flops_per_s": 2 * size**3 / min(times)}


def measure_step(values: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Memory of a first step, then the times of `repeats` more."""
    from benchmarks.peers import specforge_step, speculators_step
    from benchmarks.steps import Case, entropy_sums, headtrain_step, make_inputs, step_flops

    case = Case.from_dict(values)
    build = {"headtrain": headtrain_step, "specforge": specforge_step, "speculators": speculators_step}[case.contender]
    inputs = make_inputs(case)
    model, step = build(case, inputs)
    del inputs
    (result, first), memory = memory_above(lambda: timed(step))
    times = []
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        answer, spent = timed(step)
        times.append(spent | {"pairs": sum(answer.get("pairs_D", []))})
    out = result | {"memory": memory, "first": first, "times": times}
    if case.contender == "headtrain":
        inputs = make_inputs(case)
        out["flops"] = step_flops(case, inputs.batch)
        if case.dtype == "fp32":
            out["entropy_D"] = entropy_sums(case, inputs)
    return out


def main() -> None:
    import torch

    torch.set_num_threads(1)
    request = json.loads(sys.argv[1])
    if "matmul" in request:
        print(json.dumps(matmul_speed(request["matmul"])))
    elif "decode" in request:
        from benchmarks.decode import measure

        print(json.dumps(measure(request["decode"])))
    elif "generate" in request:
        from benchmarks.generate import measure

        print(json.dumps(measure(request["generate"])))
    elif "loading" in request:
        from benchmarks.loading import measure

        print(json.dumps(measure(request["loading"])))
    else:
        torch.manual_seed(request["seed"])  # of the positions that are dropped
        print(json.dumps(measure_step(request["case"], request["repeats"])))


if __name__ == "__main__":
    main()
