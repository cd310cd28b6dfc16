"""Processes that run one target together, each with a part of every matrix (target.split=tensor).

All of them make the same forwards in step. The first one decides what is done next and writes what comes of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headtrain.config import TargetConfig

END = -1  # the batch after the last


@dataclass
class Team:
    """This process among those of its team: `rank` of `size`."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agree(self, value: Any) -> Any:
        """The first one's value, on every process."""
        holder = [value]
        dist.broadcast_object_list(holder, src=0, device=self.device)
        return holder[0]

    def agreed(self, tokens_B: Tensor) -> Tensor:
        """The first one's tokens, in place: rounding may not lead two processes to different ones."""
        dist.broadcast(tokens_B, src=0)
        return tokens_B


def team_of(config: TargetConfig) -> Team | None:
    """Joins the team that RANK, WORLD_SIZE and MASTER_* describe; None where the target is one process's own.

    ValueError for a process that was not started as one of target.gpus.
    """
    if config.split != "tensor" or config.gpus == 1:
        return None
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != config.gpus:
        raise ValueError(
            f"target.split=tensor: {config.gpus} processes are needed for one target, this is one of {size}; "
            "`headtrain generate` starts them, other commands take target.split=layers"
        )
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return Team(dist.get_rank(), size, device)


def shared(team: Team | None, batches: Iterable[int]) -> Iterator[int]:
    """The batches that the first process of the team draws, on every one of them; without a team, all of them."""
    if team is None:
        yield from batches
    elif team.first:
        for batch in batches:
            yield team.agree(batch)
        team.agree(END)
    else:
        while (batch := team.agree(None)) != END:
            yield batch
