"""What a head's matrices were when it was made, as checksums that travel with its weights: a matrix that training never
reached is found before it is served.

Checksums are of the values rounded to bfloat16, in which heads are saved too. Norms and biases have none: a short
training may rightly leave them as they are at that precision.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headtrain.heads.base import Head


def start_marks(head: Head) -> dict[str, str]:
    """Checksums of the matrices that will be trained, under their names on disk."""
    trained = {name for name, p in head.named_parameters() if p.requires_grad and p.dim() > 1}
    return {name: _checksum(tensor) for name, tensor in head.portable_tensors().items() if name in trained}


def unchanged(tensors: dict[str, Tensor], marks: dict[str, str]) -> list[str]:
    """The names of tensors that are what they were."""
    return [name for name, mark in marks.items() if name in tensors and _checksum(tensors[name]) == mark]


def _checksum(tensor: Tensor) -> str:
    words = tensor.detach().to(torch.bfloat16).cpu().contiguous().view(torch.int16)
    return f"{zlib.crc32(words.numpy().tobytes()):08x}"
