"""Single tensors of a model folder or Hub model, under the names of the loaded model, without loading the rest."""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from headtrain import quantised
from headtrain.adapter import merge_ends
from headtrain.config import TargetConfig

log = logging.getLogger(__name__)


def tensor_files(path: str, revision: str | None) -> dict[str, str]:
    """Tensor name -> file, of the safetensors files at a folder or Hub id. OSError when there are none."""
    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    options = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    if index := cached_file(path, "model.safetensors.index.json", **options):
        return json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    with safe_open(cached_file(path, "model.safetensors", revision=revision), "pt") as handle:
        return dict.fromkeys(handle.keys(), "model.safetensors")


class Stored:
    """The tensors of the safetensors files at `path`; `model`: the loaded model, or one without weights (meta).

    Raises OSError when there are no such files.
    """

    def __init__(self, path: str, revision: str | None, model: nn.Module):
        self.path, self.revision, self.model = path, revision, model
        files = tensor_files(path, revision)
        self.names = sorted(files)
        self._places = {ours: (files[name], name) for name, ours in _renamed(self.names, model).items()}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read(self, name: str) -> Tensor:
        from safetensors import safe_open
        from transformers.utils.hub import cached_file

        file, stored = self._places[name]
        with safe_open(cached_file(self.path, file, revision=self.revision), "pt") as handle:
            return handle.get_tensor(stored)

    def ends(self, embed: nn.Module, lm_head: nn.Module, config: TargetConfig) -> dict[str, Tensor]:
        """`embedding` and `lm_head` [V, T], as `config.adapter` changes them. ValueError for one that is not there.

        A tied lm_head that is stored all the same counts, since it is what was saved. Of 8 bits they are made float32.
        """
        names = {"embedding": self._name(embed), "lm_head": self._name(lm_head)}
        if getattr(lm_head, "bias", None) is not None:
            raise ValueError("its lm_head has a bias, and heads are taught by the weights of an lm_head alone")
        tile = (quantised.settings(self.model.config) or {}).get("weight_block_size")
        weights = {part: f"{name}.weight" for part, name in names.items() if f"{name}.weight" in self}
        found = {part: quantised.plain(name, self._places, self.read, tile) for part, name in weights.items()}
        tied = embed.weight is lm_head.weight
        for part in names.keys() - found.keys():
            if packed := [name for name in self._places if name.startswith(f"{names[part]}.")]:
                raise ValueError(f"{names[part]} is quantised ({', '.join(packed)}), which training cannot read")
            if not tied or not found:
                seen = ", ".join(name for name in self.names if not re.search(r"\.\d+\.", name))
                why = "" if tied else "tie_word_embeddings is false but "
                raise ValueError(
                    f"{why}no {names[part]}.weight in its safetensors files (keys seen: {seen}); complete the files, "
                    "or set tie_word_embeddings=true in config.json if the model shares its embedding"
                )
        if tied and len(found) == 2 and not torch.equal(found["embedding"], found["lm_head"]):
            log.warning("%s: config.json ties lm_head to the embedding, but stores another one: that counts", self.path)
        weights = {name: found.get(part, next(iter(found.values()))) for part, name in names.items()}
        if config.adapter:
            weights = merge_ends(self.model, weights, config)
        return {part: weights[name] for part, name in names.items()}

    def norm_weight(self, norm: nn.Module) -> Tensor:
        """What a norm multiplies each dimension with, float32 [T]: some families store it less 1, some have none."""
        norm = self.loaded(norm, "cpu", torch.float32)
        width = self.model.get_input_embeddings().weight.shape[1]
        probe = 1024.0 * torch.tensor([1.0, -1.0]).repeat(width)[:width]  # so large that eps does not count
        return ((norm(probe) - norm(-probe)) / 2 * probe.sign()).detach()

    def loaded(self, module: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
        """A copy of a module of the model, with its stored tensors."""
        name, copied = self._name(module), copy.deepcopy(module).to_empty(device=device).to(dtype)
        for key, parameter in copied.named_parameters():
            parameter.data.copy_(self.read(f"{name}.{key}"))
        return copied

    def _name(self, module: nn.Module) -> str:
        return next(name for name, found in self.model.named_modules() if found is module)


def _renamed(names: list[str], model: nn.Module) -> dict[str, str]:
    """stored name -> name in the loaded model: transformers renames the tensors of many families while it loads."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [change for change in get_model_conversion_mapping(model) if isinstance(change, WeightRenaming)]
    tensors = model.state_dict()
    return {name: rename_source_key(name, renamings, [], model.base_model_prefix, tensors)[0] for name in names}
