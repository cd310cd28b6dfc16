"""A process beside a training process that holds the target on devices of its own (launch.target=apart).

It is asked for the states over rows of token ids, by a socket that both hold an end of: an end that closes is how each
learns that the other is gone. A message is a JSON header (facts, and the tensors' names, dtypes and shapes), then the
tensors' bytes; neither shared memory nor files are used.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtrain.config import RecipeConfig
from headtrain.hardware import gpu_ids
from headtrain.training.launch import target_devices
from headtrain.training.online import Here, States
from headtrain.training.parent import PARENT, end_with_parent, start_time
from headtrain.training.ranks import Ranks

OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PYTHON = (sys.executable, "-u", "-m", "headtrain")


class TargetGone(ValueError):
    """The target's process has failed or ended; the message says how."""


# ------------------------------------------------------------------------------------------------- messages

def send(end: socket.socket, tensors: dict[str, Tensor], **facts: Any) -> None:
    shapes = {name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape] for name, tensor in tensors.items()}
    head = json.dumps({"facts": facts, "tensors": shapes}).encode()
    end.sendall(struct.pack("<Q", len(head)) + head)
    for tensor in tensors.values():
        if tensor.numel():
            end.sendall(tensor.contiguous().flatten().view(torch.uint8).numpy())


def receive(end: socket.socket) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, facts); EOFError when the other end is closed."""
    (length,) = struct.unpack("<Q", _filled(end, bytearray(8)))
    head = json.loads(_filled(end, bytearray(length)))
    tensors = {}
    for name, (dtype, *shape) in head["tensors"].items():
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensors[name].numel():
            _filled(end, tensors[name].flatten().view(torch.uint8).numpy())
    return tensors, head["facts"]


def _filled(end: socket.socket, buffer: Any) -> Any:
    rest = memoryview(buffer)
    while rest:
        got = end.recv_into(rest)
        if not got:
            raise EOFError
        rest = rest[got:]
    return buffer


# ------------------------------------------------------------------------------------------------- the training side

class Apart:
    """Starts the process; asked and answered as training.online.Here, one question ahead."""

    ahead, inside = 1, False

    def __init__(self, run: Path, devices: list[str]):
        """devices: the CUDA devices that it sees; none on a CPU."""
        self._end, other = socket.socketpair()
        env = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
        env[PARENT] = f"{os.getpid()}:{start_time(os.getpid())}"
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        stage = ["stage", "states", f"run_dir={run}", f"socket={other.fileno()}"]
        with other:
            options = {"pass_fds": [other.fileno()], "stdin": subprocess.DEVNULL}
            self.process = subprocess.Popen([*PYTHON, *stage], env=env, **options)

    def ask(self, rows: list[Tensor]) -> None:
        self._told(send, {"ids": torch.cat(rows)}, lengths=[len(row) for row in rows])

    def answer(self) -> tuple[list[dict[str, Tensor]], float]:
        tensors, facts = self._told(receive)
        if "error" in facts:
            raise TargetGone(f"the target's process: {facts['error']}")
        parts = zip(*(tensor.split(facts["lengths"]) for tensor in tensors.values()), strict=True)
        return [dict(zip(tensors, part, strict=True)) for part in parts], facts["seconds"]

    def _told(self, act: Any, *what: Any, **facts: Any) -> Any:
        try:
            return act(self._end, *what, **facts)
        except (EOFError, OSError) as error:
            self.check(wait=5.0)
            raise TargetGone(f"the target's process (pid {self.process.pid}) does not answer: {error}") from error

    def working(self) -> Any:
        return nullcontext()

    def check(self, wait: float = 0.0) -> None:
        """TargetGone when the process has ended, within `wait` seconds from now."""
        try:
            status = self.process.wait(wait) if wait else self.process.poll()
        except subprocess.TimeoutExpired:
            return
        if status is not None:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise TargetGone(
                f"the target's process (pid {self.process.pid}) {how}; what it said is in this log, and the same "
                "command goes on from the last checkpoint"
            )

    def close(self) -> None:
        """Ends the process; a wait for its answer ends too."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._end.close()


# ------------------------------------------------------------------------------------------------- the target's side

def serve(descriptor: int, load: Callable[[], States]) -> None:
    """Answers until the other end is closed. load(): the target's States; its errors are told there too."""
    end_with_parent()
    end = socket.socket(fileno=descriptor)
    try:
        states: States = load()
        while True:
            asked, facts = receive(end)
            began = time.perf_counter()
            rows = states(list(asked["ids"].split(facts["lengths"])))
            tensors = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
            send(end, tensors, lengths=facts["lengths"], seconds=time.perf_counter() - began)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        if not isinstance(error, ValueError):  # those say all there is to say
            logging.getLogger(__name__).exception("the target's process failed")
        send(end, {}, error=str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
        while end.recv(1 << 16):  # until the training process has read it and closes its end
            pass


# ------------------------------------------------------------------------------------------------- which

def target_source(
    config: RecipeConfig, run: Path, ranks: Ranks, load_states: Callable[[], States] | None
) -> Here | Apart:
    """The target of online training, in this process or in one beside it."""
    if config.launch.target == "same":
        if load_states is None:
            raise ValueError("data.captures.mode=online: no target was handed to the trainer")
        return Here(load_states(), ranks.device)
    devices: list[str] = []
    if ranks.device.type == "cuda":
        devices = target_devices(os.environ, gpu_ids(), int(os.environ["LOCAL_RANK"]), len(ranks.peers) + 1,
                                 config.target.gpus)  # fmt: skip
    return Apart(run, devices)
