"""LoRA on a head (head.lora): peft's low-rank factors beside the frozen weights of its linear layers.

Source: Hu et al., LoRA (arXiv 2106.09685). A head computes with the weights of its layers, several of them joined, and
not by calling each layer; so the weights with the factors in them are put in the layers' place before every forward.
What is measured and saved is the head with the factors merged, which needs nothing of this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headtrain.config import LoraSection

if TYPE_CHECKING:
    from headtrain.heads.base import Head

ADAPTER = "default"  # peft's name of the only adapter


class Factors(nn.Module):
    """peft's layers around linear layers of a head, by the names these have there. Freezes the head."""

    def __init__(self, head: Head, section: LoraSection, seed: int):
        """seed: of the random factors A; the factors B are zero, so that nothing is changed yet.

        ValueError where a target of the section is no linear layer of the head.
        """
        from peft import LoraConfig, inject_adapter_in_model

        super().__init__()
        chosen = _layers(head, section.targets)
        head.requires_grad_(False)
        bones = nn.Module()
        for name, layer in chosen.items():
            *way, last = name.split(".")
            place = bones
            for part in way:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            place.add_module(last, layer)
        torch.manual_seed(seed)
        rank = section.rank or 0
        settings = LoraConfig(r=rank, lora_alpha=section.alpha or 2 * rank, target_modules=list(chosen))
        self.layers = inject_adapter_in_model(settings, bones, ADAPTER)
        self.names = list(chosen)

    def merged(self) -> dict[str, Tensor]:
        """W + (alpha / rank) B A of every layer, by the names of the head's weights."""
        found = {}
        for name in self.names:
            layer = self.layers.get_submodule(name)
            weight = layer.base_layer._parameters["weight"]  # the attribute may be what `lend` has put there
            found[f"{name}.weight"] = weight + layer.get_delta_weight(ADAPTER).to(weight.dtype)
        return found

    def lend(self) -> None:
        """Has the head compute with the merged weights, in its backward pass too, until the next call."""
        for name, weight in self.merged().items():
            layer = self.layers.get_submodule(name.removesuffix(".weight")).base_layer
            vars(layer)["weight"] = weight  # found before the parameter of that name, which stays what it is


def _layers(head: Head, targets: list[str] | None) -> dict[str, nn.Linear]:
    """The layers that the targets mean (whole names, or their ends); by default all linear ones but lm_head."""
    linear = {name: module for name, module in head.named_modules() if isinstance(module, nn.Linear)}
    if targets is None:
        ends = head.outputs()
        return {name: layer for name, layer in linear.items() if all(layer is not end for end in ends)}
    chosen = {}
    for target in targets:
        found = {name: layer for name, layer in linear.items() if name == target or name.endswith(f".{target}")}
        if not found:
            raise ValueError(f"head.lora.targets: {target} is none of this head's linear layers: {', '.join(linear)}")
        chosen |= found
    return {name: layer for name, layer in linear.items() if name in chosen}
