"""`target.adapter`: a peft adapter whose weights are merged into the target's when it is loaded."""

from __future__ import annotations

import logging
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
    made_for = own.base_model_name_or_path
    if made_for and Path(made_for).name != Path(config.model or "").name:
        log.warning("target.adapter=%s was made for %s; the target is %s", config.adapter, made_for, config.model)
    return own


def merge_adapter(model: nn.Module, config: TargetConfig) -> nn.Module:
    """The model with the adapter's changes in its weights. ValueError when not all of the adapter fits."""
    if getattr(model.config, "quantization_config", None):
        where = f"target.adapter={config.adapter}"
        raise ValueError(f"{where}: cannot be merged into the quantised weights of {config.model}; merge first")
    _changed_ends(model, config)
    return _merged(model, config)


def merge_ends(model: nn.Module, weights: dict[str, Tensor], config: TargetConfig) -> dict[str, Tensor]:
    """The embedding and lm_head (by their modules' names) as they are with the adapter; nothing else is loaded."""
    changed = _changed_ends(model, config)
    whole = {name: tensors[f"{name}.weight"] for name, tensors in changed.items() if f"{name}.weight" in tensors}
    if bits := changed.keys() - whole.keys():
        bones = nn.Module()
        for name in bits:
            _put(bones, name, model.get_submodule(name), weights[name])
        merged = _merged(bones, config, part=True)
        whole |= {name: merged.get_submodule(name).weight.detach() for name in bits}
    return weights | {name: weight.to(weights[name]) for name, weight in whole.items()}


def _changed_ends(model: nn.Module, config: TargetConfig) -> dict[str, dict[str, Tensor]]:
    """By module name, what the adapter has for the embedding and for lm_head. ValueError where these are one tensor."""
    from safetensors import safe_open

    ends = model.get_input_embeddings(), model.get_output_embeddings()
    changed: dict[str, dict[str, Tensor]] = {}
    with safe_open(adapter_folder(config) / "adapter_model.safetensors", "pt") as handle:
        for name in (name for name, module in model.named_modules() if module in ends):
            if own := [key for key in handle.keys() if key.startswith(f"{PREFIX}{name}.")]:  # noqa: SIM118 (no dict)
                changed[name] = {key.removeprefix(PREFIX): handle.get_tensor(key) for key in own}
    if changed and ends[0].weight is ends[1].weight:
        raise ValueError(
            f"target.adapter={config.adapter}: it changes the embedding or lm_head, which are one tensor in "
            f"{config.model}; merge it into a model with an lm_head of its own, and give that as target.model"
        )
    return changed


def _put(root: nn.Module, name: str, like: nn.Module, weight: Tensor) -> None:
    """Adds a layer with this weight to `root` under a dotted name."""
    *way, last = name.split(".")
    for part in way:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    rows, width = weight.shape
    leaf = nn.Linear(width, rows, bias=False) if isinstance(like, nn.Linear) else nn.Embedding(rows, width)
    leaf.weight = nn.Parameter(weight)
    root.add_module(last, leaf)


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
