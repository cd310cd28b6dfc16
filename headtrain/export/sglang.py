"""Export to SGLang: the head as it is, with class names that SGLang knows, and layer ids as its release counts them."""

from __future__ import annotations

from typing import Any

from headtrain.engines import TESTED_VERSIONS, engine_ids, sglang_numbering, sglang_rules_agree
from headtrain.export import ExportError
from headtrain.export.build import contract_for
from headtrain.export.folder import HeadFolder, Layout
from headtrain.export.vllm import command, native

ARCHITECTURES = {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}


def layout(head: HeadFolder, info: dict[str, Any], version: str | None) -> Layout:
    """ExportError for taps that releases read differently, unless the release is said."""
    made, kind = native(head), head.kind
    made.contract, made.version = contract_for("sglang", kind, version)
    made.config["architectures"] = [ARCHITECTURES[kind]]
    made.command, made.notes = command("sglang", kind), []
    if head.ours["draft_vocab_size"] < head.ours["vocab_size"]:
        made.notes.append("--speculative-use-rejection-sampling wants a draft vocabulary as large as the target's")
    if kind == "eagle3":
        _count_layers(made, info.get("family"), version)
        _check_last_tap(made, info.get("family"))
    return made


def _check_last_tap(made: Layout, family: str | None) -> None:
    """Most targets hand out what enters their blocks, so never the stream after the last one."""
    taps, able = made.config["headtrain"].get("taps"), made.contract["after_the_last_block"]
    if taps and taps[-1] == made.config["headtrain"].get("target_layers") and family not in able:
        made.faults.append(
            f"taps {taps}: SGLang hands a head the stream after the last block ({taps[-1]}) only from targets of "
            f"{', '.join(able)}, not of {family}; train with other taps (head.taps), or serve with vLLM (format=vllm)"
        )


def _count_layers(made: Layout, family: str | None, version: str | None) -> None:
    """Writes the layer ids by the rule of the release for targets of a family."""
    taps, blocks = made.config["headtrain"]["taps"], made.config["headtrain"]["target_layers"]
    if sglang_rules_agree(taps, blocks):
        return
    if version is None:
        raise ExportError(
            f"taps {taps}: SGLang's releases count layer ids in two ways, which agree only where the first tap is 2; "
            f"say which release serves the head (engine_version={TESTED_VERSIONS['sglang']})"
        )
    numbering = sglang_numbering(version, family)
    key = "eagle_aux_hidden_state_layer_ids"
    made.contract = made.contract | {"taps": made.contract["taps"] | {f"eagle_config.{key}": numbering}}
    if numbering != "sglang":  # else they are there already, and checked
        made.config["eagle_config"] = made.config.get("eagle_config", {}) | {key: engine_ids(numbering, taps, blocks)}
    whose = f"targets of family {family}" if family else "targets other than DeepSeek, Kimi and GLM-Lite ones"
    made.notes.append(f"its layer ids are counted for SGLang {version} and {whose}; export again for another release")
