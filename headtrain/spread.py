"""A target that does not fit one device: its blocks over several GPUs, the CPU's memory, and its own files.

Which block lies where is decided here; accelerate's hooks, attached while transformers loads, move what passes from one
device to the next. Everything but the blocks lies on the first device: tokens go in and states come out there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from headtrain.config import TargetConfig
from headtrain.stored import tensor_files

if TYPE_CHECKING:
    from headtrain.target import Target

GB = 1e9
SHARE = 0.9  # of a GPU's free memory that weights may take where target.gpu_memory does not say it
NOT_IN_FILES = (
    "transformers rearranges its weights while it loads them, so none can stay in its files: raise target.cpu_memory, "
    "or leave it out"
)
Map = dict[str, int | str]  # module -> number of a GPU, cpu or disk


def wanted(config: TargetConfig) -> bool:
    """Whether a target is asked to lie on more than one device."""
    return config.gpus > 1 or config.gpu_memory is not None or config.cpu_memory is not None


def device_map(config: TargetConfig, target: Target, path: str) -> Map:
    """Where each module of a target goes, as `from_pretrained` takes it.

    target: built without weights, whose files are at `path`. ValueError when it does not fit, or GPUs are missing.
    """
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    if on_gpu and (found := torch.cuda.device_count()) < config.gpus:
        raise ValueError(f"target.gpus={config.gpus}: this process may use {found} CUDA devices")
    if not on_gpu and (config.gpus > 1 or config.gpu_memory is not None):
        key = "gpus" if config.gpus > 1 else "gpu_memory"
        raise ValueError(f"target.{key}={getattr(config, key)}: no CUDA device is here, or target.device=cpu")
    most, rest = config.gpu_memory, config.cpu_memory
    gpus: Sequence[int] = ()
    if on_gpu:  # a training process may see the others' devices, and has chosen its own
        gpus = range(config.gpus) if config.gpus > 1 else [torch.cuda.current_device()]
    free = {n: SHARE * torch.cuda.mem_get_info(n)[0] if most is None else GB * most for n in gpus}
    room: dict[int | str, float] = dict(free)
    if most is not None or rest is not None:
        room["cpu"] = math.inf if rest is None else GB * rest
    if rest is not None:
        room["disk"] = math.inf
    return lay_out(target, room, *weight_bytes(config, target, path))


def weight_bytes(config: TargetConfig, target: Target, path: str) -> tuple[float, float]:
    """(bytes of everything but the blocks, bytes of a number in a block) once loaded. Of a quantised target by the size
    of its files."""
    width = getattr(torch, config.dtype).itemsize
    inside, all_of_it = (sum(p.numel() for p in module.parameters()) for module in (target.layers, target.model))
    ends = width * (all_of_it - inside)
    if not getattr(target.model.config, "quantization_config", None):
        return ends, width
    from transformers.utils.hub import cached_file

    files = set(tensor_files(path, config.revision).values())
    stored = sum(os.path.getsize(cached_file(path, file, revision=config.revision)) for file in files)
    return ends, max(0, stored - ends) / inside


def lay_out(target: Target, room: dict[int | str, float], ends: float, width: float) -> Map:
    """The blocks in their order over the devices of `room` (device -> bytes of weights), an even share on each GPU.

    ends: bytes of everything but the blocks, which go to the first device; width: bytes of a number in a block.
    """
    names = {module: name for name, module in target.model.named_modules()}
    sizes = {names[block]: width * sum(p.numel() for p in block.parameters()) for block in target.layers}
    devices, total = list(room), ends + sum(sizes.values())
    gpus = [device for device in devices if isinstance(device, int)]
    even = (total / len(gpus) + max(sizes.values()) / 2) if gpus else 0
    level = {device: min(room[device], even) if device in gpus[:-1] else room[device] for device in devices}
    if ends > room[devices[0]]:
        first = "target.gpu_memory" if gpus else "target.cpu_memory"
        raise ValueError(f"{first}={room[devices[0]] / GB:.3g}: all but its blocks takes {ends / GB:.3g} GB")
    found: Map = dict.fromkeys(_others(target, names), devices[0])
    at, used = 0, ends
    for name, size in sizes.items():
        while used + size > level[devices[at]]:
            at, used = at + 1, 0.0
            if at == len(devices):
                raise ValueError(
                    f"its weights take {total / GB:.3g} GB, and there is room for {sum(room.values()) / GB:.3g} GB on "
                    f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: raise target.gpus, or set target.gpu_memory to "
                    "leave the rest in the CPU's memory (slow)"
                )
        found[name], used = devices[at], used + size
    return found


def _others(target: Target, names: dict) -> list[str]:
    """Names of the largest modules (and lone parameters) that hold no block."""
    found, ways = [], [target.model]
    around = {module for module in names if any(child is target.layers for child in module.modules())} - {target.layers}
    while ways:
        module = ways.pop()
        prefix = f"{names[module]}." if names[module] else ""
        found += [prefix + name for name, _ in module.named_parameters(recurse=False)]
        found += [prefix + name for name, _ in module.named_buffers(recurse=False)]
        children = [child for child in module.children() if child is not target.layers]
        found += [names[child] for child in children if child not in around]
        ways += [child for child in children if child in around]
    return found


def by_matrices(config: TargetConfig, target: Target) -> Any:
    """transformers' settings of a target of which each of target.gpus processes holds a part of every matrix.

    ValueError where its family, or the number of its heads, does not allow it.
    """
    from transformers.distributed import DistributedConfig

    own = target.config
    if not target.model.supports_tp_plan:
        raise ValueError(f"transformers cannot split the {own.model_type} family by matrices; set target.split=layers")
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (getattr(own, key, None) or config.gpus) % config.gpus:
            raise ValueError(f"target.gpus={config.gpus} does not divide {key}={getattr(own, key)}; set "
                             "target.split=layers, or another number")  # fmt: skip
    return DistributedConfig(tp_plan="auto", tp_size=config.gpus)


def in_words(found: Map) -> str:
    """Such as `GPU 0 and GPU 1 and disk`."""
    return " and ".join(f"GPU {place}" if isinstance(place, int) else place for place in dict.fromkeys(found.values()))
