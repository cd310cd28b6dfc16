"""Export to TensorRT-LLM (PyTorch backend): the head as it is, and the YAML file that serves it. Which layers the
target hands out stands in that file alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from headtrain.engines import tensorrt_options
from headtrain.export import ExportError
from headtrain.export.build import contract_for
from headtrain.export.folder import HeadFolder, Layout
from headtrain.export.vllm import native

OPTIONS = "speculative.yaml"


def layout(head: HeadFolder, info: dict[str, Any], version: str | None) -> Layout:
    """ExportError for a target that is too shallow for the engine."""
    made, ours = native(head), head.ours
    if ours["target_layers"] < 6:
        raise ExportError(
            f"a target of {ours['target_layers']} blocks: TensorRT-LLM hands out layers of targets with 6 or more; "
            "use format=vllm"
        )
    made.contract, made.version = contract_for("tensorrt_llm", head.kind, version)
    made.command = lambda target, folder, k: f"cd {folder} && trtllm-serve {target} --config {OPTIONS}"
    made.files = {OPTIONS: partial(tensorrt_options, ".", taps=ours["taps"], layers=ours["target_layers"])}
    made.notes = [f"{OPTIONS} names the head by `.`, the folder that the command is run in"]
    return made
