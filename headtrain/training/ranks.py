"""The processes of a training run: joining them, adding up over them, keeping DeepSpeed quiet."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headtrain.training.parent import end_with_parent, start_time

LAST_WORDS = 5.0  # seconds that a process has for its own error after another one has ended
PATIENCE = timedelta(minutes=30)  # a collective that waits longer means that another process is gone or stuck


@dataclass
class Ranks:
    """This process among the others of the run."""

    rank: int
    world: int
    device: torch.device
    peers: dict[int, tuple[int, str | None]] = field(default_factory=dict)  # of this machine: rank -> pid, start time

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place. Every process must call it."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on every process."""
        if self.world == 1:
            return value
        holder = [value]
        dist.broadcast_object_list(holder, src=0, device=self.device)
        return holder[0]

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in rank order, on every process."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def ended(self, wait: float = 0.0) -> str | None:
        """Says which other processes of this machine have ended, when some have within `wait` seconds from now."""
        deadline = time.monotonic() + wait
        while True:
            gone = [f"{rank} (pid {pid})" for rank, (pid, began) in self.peers.items() if start_time(pid) != began]
            if gone or time.monotonic() >= deadline:
                break
            time.sleep(0.1)
        if not gone:
            return None
        return (
            f"training process {', '.join(gone)} of {self.world} has ended before the others: killed, out of memory, "
            "or failed (its own message says so); the same command goes on from the last checkpoint"
        )

    def watch(self) -> threading.Event:
        """Ends this process when another of this machine has ended, until the event is set."""
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(0.5):
                if self.ended() and not stop.wait(LAST_WORDS):  # the main thread may have more to say
                    self._say_ended()
                    os._exit(1)

        if self.peers:
            threading.Thread(target=look, daemon=True, name="peers").start()
        return stop

    def _say_ended(self) -> None:
        if text := self.ended():
            print(f"error: {text}", file=sys.stderr, flush=True)

    def say_when_terminated(self) -> None:
        """A launcher that sees a process end terminates the others: these say which one it was, and go."""

        def terminated(number: int, _frame: Any) -> None:
            self._say_ended()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        if self.peers and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminated)


def join(device: str = "auto", threads: int | None = None) -> Ranks:
    """Joins the run that RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* describe; without them a run of one process."""
    end_with_parent()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ and os.environ["WORLD_SIZE"] == "1":
        os.environ["MASTER_PORT"] = free_port()
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if threads:
        torch.set_num_threads(threads)
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported
    with quiet():
        import deepspeed

        if not on_gpu:  # its CPU collectives would be compiled for a minute at the first start; gloo has them
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        local = torch.device("cpu")
        if on_gpu:  # a launcher may show each process its own device only
            local = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        if on_gpu:
            torch.cuda.set_device(local)
        deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", timeout=PATIENCE, verbose=False)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), local)
    here = (socket.gethostname(), os.getpid(), start_time(os.getpid()))
    for rank, (host, pid, began) in enumerate(ranks.gather(here)):
        if host == here[0] and rank != ranks.rank:
            ranks.peers[rank] = (pid, began)
    return ranks


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallows DeepSpeed's chatter. What was printed is shown when the block fails; warnings of errors still log."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    heard = io.StringIO()
    try:
        with contextlib.redirect_stdout(heard):
            yield
    except BaseException:
        print(heard.getvalue(), end="")
        raise
    finally:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # skipped steps are reported by the trainer
