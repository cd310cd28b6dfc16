"""`target.adapter`: a peft adapter whose weights are merged into the target's when it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headtrain.config import TargetConfig
from headtrain.files import locate

log = logging.getLogger(__name__)
PREFIX = "base_model.model."  # of the names in an adapter's file


def adapter_folder(config: TargetConfig) -> Path:
    """The folder of `target.adapter`, fetched when it is a Hub id. ValueError when there is no adapter."""
    folder = Path(locate(config.adapter or "")).expanduser()
    if not folder.is_dir() and config.adapter.count("/") == 1:
        from huggingface_hub import snapshot_download

        files = ["adapter_config.json", "adapter_model.*"]
        folder = Path(snapshot_download(config.adapter, revision=config.adapter_revision, allow_patterns=files))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"target.adapter={config.adapter}: no {name} in {folder}; give a peft adapter's folder")
    return folder


def read_adapter(config: TargetConfig) -> Any:
    """The adapter's own config. ValueError when it is not one of weights; warns when made for another model by name."""
    from peft import PeftConfig

    own = PeftConfig.from_pretrained(str(adapter_folder(config)))
    if own.is_prompt_learning:
        kind = own.peft_type.value
        raise ValueError(f"target.adapter={config.adapter}: {kind} adds tokens to prompts; only weights can be merged")
    made_for = Path(own.base_model_name_or_path or "").name
    if made_for and made_for != Path(config.model or "").name:
        log.warning("target.adapter=%s was made for %s; the target is %s", config.adapter, made_for, config.model)
    return own


def merge_adapter(model: nn.Module, config: TargetConfig) -> nn.Module:
    """The model with the adapter's changes in its weights. ValueError when not all of the adapter fits."""
    where = f"target.adapter={config.adapter}"
    if getattr(model.config, "quantization_config", None):
        raise ValueError(f"{where}: cannot be merged into the quantised weights of {config.model}; merge first")
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    tied = ends[0].weight is ends[1].weight
    if tied and _touched([name for name, module in model.named_modules() if module in ends], config):
        raise ValueError(
            f"{where}: it changes the embedding or lm_head, which are one tensor in {config.model}; merge it yourself "
            "into a model with an lm_head of its own, and give that as target.model"
        )
    return _merged(model, config)


def merge_ends(model: nn.Module, weights: dict[str, Tensor], config: TargetConfig) -> dict[str, Tensor]:
    """The embedding and lm_head (by their modules' names) as they are with the adapter; nothing else is loaded."""
    touched = _touched(weights, config)
    if not touched:
        return weights
    bones = nn.Module()
    for name in touched:
        *way, last = name.split(".")
        at = bones
        for part in way:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        rows, width = weights[name].shape
        is_linear = isinstance(model.get_submodule(name), nn.Linear)
        leaf = nn.Linear(width, rows, bias=False) if is_linear else nn.Embedding(rows, width)
        leaf.weight = nn.Parameter(weights[name])
        at.add_module(last, leaf)
    merged = _merged(bones, config, part=True)
    return weights | {name: merged.get_submodule(name).weight.detach() for name in touched}


def _touched(modules: Iterable[str], config: TargetConfig) -> list[str]:
    """Those of the modules that the adapter has tensors for."""
    from safetensors import safe_open

    with safe_open(adapter_folder(config) / "adapter_model.safetensors", "pt") as handle:
        names = list(handle.keys())
    return [module for module in modules if any(name.startswith(f"{PREFIX}{module}.") for name in names)]


def _merged(model: nn.Module, config: TargetConfig, part: bool = False) -> nn.Module:
    """part: the model is a part of the adapter's, which has more than fits."""
    from peft import PeftModel

    own = read_adapter(config)
    misfit = f"target.adapter={config.adapter}: made for {own.base_model_name_or_path}, does not fit {config.model}"
    try:
        wrapped = PeftModel(model, own)
        found = wrapped.load_adapter(str(adapter_folder(config)), "default")
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{misfit} ({str(error).strip().splitlines()[-1].strip()})") from error
    if strange := [*found.missing_keys, *([] if part else found.unexpected_keys)]:
        raise ValueError(f"{misfit} ({len(strange)} tensors have no counterpart, such as {strange[0]})")
    return wrapped.merge_and_unload()
