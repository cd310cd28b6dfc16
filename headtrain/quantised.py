"""Targets whose weights are stored quantised: of which kind they are, whether they run here, and as plain numbers the
few tensors that training reads."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALES = ("_scale_inv", "_scale")  # names of a weight's scales, behind its own
PACKAGES = {  # that transformers needs, by quant_method
    "compressed-tensors": "compressed-tensors", "bitsandbytes": "bitsandbytes", "gptq": "optimum gptqmodel",
    "awq": "gptqmodel", "torchao": "torchao", "quanto": "optimum-quanto", "hqq": "hqq",
    "auto-round": "auto-round", "quark": "amd-quark",
}  # fmt: skip


def settings(config: Any) -> dict[str, Any] | None:
    """The `quantization_config` of a model's config as a dict; None where the weights are stored plainly."""
    found = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    return found.to_dict() if hasattr(found, "to_dict") else found


def in_words(config: Any) -> str | None:
    """Such as `fp8`, `gptq 4 bits` or `compressed-tensors int-quantized`; None where nothing is quantised."""
    own = settings(config)
    if own is None:
        return None
    bits = own.get("bits") or next((n for n in (4, 8) if own.get(f"load_in_{n}bit")), None)
    words = [_method(own), own.get("format"), f"{bits} bits" if bits else None]
    return " ".join(str(word) for word in words if word)


def _method(own: dict[str, Any]) -> str:
    method = own.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in own else "unknown")
    return str(getattr(method, "value", method))


def check(config: Any, device: str) -> str | None:
    """What the user should know of a quantised target that is to run on `device` (cpu or cuda); None if nothing.

    ValueError where this machine, or the packages that are installed, cannot run it.
    """
    own = settings(config)
    if own is None:
        return None
    from transformers.quantizers import AutoHfQuantizer

    words = f"its weights are quantised ({in_words(config)})"
    if not AutoHfQuantizer.supports_quant_method(own):
        raise ValueError(f"{words}, which this transformers does not know; use a newer one, or another checkpoint")
    try:
        quantizer = AutoHfQuantizer.from_config(copy.deepcopy(own), pre_quantized=True)
        quantizer.validate_environment(device_map={"": device}, weights_only=True)
    except (ImportError, RuntimeError, ValueError) as error:
        package = PACKAGES.get(_method(own))
        help_ = f"pip install {package}" if package and isinstance(error, ImportError) else str(error).splitlines()[0]
        raise ValueError(f"{words}, which cannot be run here: {help_}") from error
    if getattr(quantizer.quantization_config, "dequantize", False):
        return f"{words}; on this device they are expanded to full width as they are loaded"
    return None


def check_used(model: nn.Module, unexpected: Iterable[str]) -> None:
    """ValueError where a part of the model has stored scales that loading left aside: its numbers would be wrong."""
    parts = dict(model.named_modules())
    for key in sorted(unexpected):
        part, _, tensor = key.rpartition(".")
        if part in parts and re.match(r"(q?weight|q?zeros|g_idx)_?(scale|packed|zero|shape|$)", tensor):
            raise ValueError(f"its files have {key}, which transformers does not use: it takes {part} for plain")


def plain(name: str, names: Collection[str], read: Callable[[str], Tensor], tile: list[int] | None = None) -> Tensor:
    """A stored weight as numbers: itself, or what its scales say where it is of 8 bits; float32 then.

    names: of all stored tensors; read: gives one. The scales are one number, one for each row, or one for each tile of
    `tile` rows and columns. ValueError naming the tensor where it is stored in another way.
    """
    tensor = read(name)
    if tensor.dtype in PLAIN:
        return tensor
    scale = next((name + end for end in SCALES if name + end in names), None)
    if scale is None or tensor.dim() != 2 or tensor.dtype.itemsize != 1 or tensor.dtype == torch.uint8:
        raise ValueError(f"{name} is stored as {_named(tensor)}, which cannot be read as numbers")
    if (shift := f"{name}_zero_point") in names and bool(read(shift).any()):
        raise ValueError(f"{name} is stored as {_named(tensor)} with zero points, which cannot be read as numbers")
    scales = read(scale).float()
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    for axis, (whole, parts) in enumerate(zip(tensor.shape, scales.shape, strict=True)):
        size = tile[axis] if tile and parts == -(-whole // tile[axis]) else whole // parts
        if not size * (parts - 1) < whole <= size * parts:
            raise ValueError(f"{scale} of shape {list(scales.shape)} does not fit {name}, {list(tensor.shape)}")
        scales = scales.repeat_interleave(size, axis).narrow(axis, 0, whole)
    return tensor.float() * scales


def _named(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
