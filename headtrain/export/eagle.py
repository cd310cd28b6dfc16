"""Export to the layout of the original EAGLE code (SafeAILab): EAGLE-1 and -2 (`eagle`), and EAGLE-3.

It takes the embedding from the target, has no bias in fc where config.json says so, and always reads the default taps.
"""

from __future__ import annotations

from typing import Any

from headtrain.engines import default_taps
from headtrain.export import ExportError
from headtrain.export.build import contract_for
from headtrain.export.folder import HeadFolder, Layout
from headtrain.export.vllm import native

NEAREST = "use an engine's format, such as format=vllm"


def layout(head: HeadFolder, info: dict[str, Any], version: str | None) -> Layout:
    """ExportError for what the original code cannot run: scaled rope, free head sizes, other taps and wirings."""
    ours, kind = head.ours, head.kind
    if ours["rope"].get("rope_type", "default") != "default":
        raise ExportError(f"rope of type {ours['rope']['rope_type']}: the original EAGLE code has none such; {NEAREST}")
    width = ours["num_attention_heads"] * ours["head_dim"]
    if width != ours["hidden_size"]:
        raise ExportError(
            f"the original EAGLE code wants head_dim = hidden_size / heads; {ours['num_attention_heads']} heads of "
            f"{ours['head_dim']} are not {ours['hidden_size']}; {NEAREST}"
        )
    blocks = ours["target_layers"]
    if kind == "eagle3" and (blocks < 7 or ours["taps"] != default_taps(blocks)):
        raise ExportError(f"taps {ours['taps']}: the original EAGLE code knows the default ones alone; {NEAREST}")
    made = native(head)
    made.contract, made.version = contract_for("eagle", kind, version)
    drop = {"fc.bias"} if kind == "eagle" else set()
    made.tensors = {name: tensor for name, tensor in made.tensors.items() if name not in drop}
    made.config["bias"] = False
    made.ours = kind == "eagle3"  # an EAGLE-1 folder lacks the bias that headtrain reads
    use = "use_eagle3=True" if kind == "eagle3" else "use_eagle3=False"
    made.command = lambda target, folder, k: (
        f'python -c "from eagle.model.ea_model import EaModel; EaModel.from_pretrained({use}, '
        f"base_model_path='{target}', ea_model_path='{folder}', depth={k})\""
    )
    made.notes = ["the embedding is the target's: the original code reads it from base_model_path"]
    return made
