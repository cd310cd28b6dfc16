"""The doctor's checks of a head's folder against its target that need no forward pass: files, numbers, names.

A check looks at one thing and yields findings in plain words: what engines would read, beside what the head was trained
with and what the target has. Shapes: V target vocabulary, R draft vocabulary, T target hidden, S sampled rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from headtrain.config import ConfigError, TargetConfig
from headtrain.engines import (
    NESTED,
    NUMBERINGS,
    SGLANG_FIRST_IS_1,
    SGLANG_FIRST_IS_1_SINCE,
    TESTED_VERSIONS,
    TapsError,
    engine_ids,
    sglang_numbering,
    sglang_rules_agree,
)
from headtrain.facts import head_rope
from headtrain.heads.vocab import mapping_hash
from headtrain.target import TargetParts

OK, WARNING, FAULT = "ok", "warning", "fault"
ENGINES = ("vllm", "sglang", "tensorrt_llm", "llama_cpp")
SAMPLED = 64  # rows of lm_head that are looked for among the target's
MESSAGES = [{"role": "user", "content": "Hello"}]
OTHER_TARGET = "give the target that the head was trained for"
AGAIN = "export the head again from the trained folder (headtrain export)"
ABOUT = {  # check -> what a mismatch costs, how to mend it
    "files": ("engines silently fill what they miss with ones, zeros or random memory: acceptance near 0", AGAIN),
    "taps": ("the head is fed other layers than in training: a tenth to all of the acceptance, silently", AGAIN),
    "norms": ("another hidden state is read or fed back: drafts are noise, from the first or the second on", AGAIN),
    "rope": ("acceptance falls as texts grow longer, and nothing says so", AGAIN),
    "positions": ("no drafts are accepted beyond the smaller number", "write the target's max_position_embeddings"),
    "vocabulary": ("every draft is another token than the head meant: no acceptance",
                   "take d2t, t2d and lm_head from the trained head's folder"),
    "embedding": ("every token is read as another one where the engine keeps it (vLLM, llama.cpp): acceptance near 0",
                  "leave the tensor out: engines lend the target's"),
    "dtypes": ("states differ from those of training: some acceptance", "capture from the target as it is served"),
    "target": ("the target's words and states are not those the head learned: a tenth to most of the acceptance",
               "give that revision (target.revision=…) or adapter, or go on training from this head (head.init_from)"),
    "tokenizer": ("the same text is other tokens: most of the acceptance", OTHER_TARGET),
    "template": ("prompts are rendered in words that the head has not seen: a part of the acceptance",
                 "serve with the template of training, or train again"),
    "drafts": ("what was trained is not what engines run: up to all of the acceptance", AGAIN),
    "acceptance": ("drafting that is not accepted makes serving slower", "mend the faults above; then measure again"),
    "thinking": ("answers come in a mode that the head has not seen: a part of the acceptance",
                 "send the same chat_template_kwargs with every request"),
}  # fmt: skip
_BELONGS = {  # where a fault of an engine's contract belongs, by its words
    "taps": r"layer_ids|num_aux|taps|layers_to_capture", "rope": "rope", "vocabulary": r"\b(d2t|t2d|token_map)\b",
    "positions": "max_position", "norms": "norm_before_residual|norm_output", "embedding": "embed_tokens",
}  # fmt: skip


@dataclass
class Finding:
    """costs: what a mismatch costs; mend: how to put it right. Both are empty where all is well."""

    check: str
    status: str  # ok | warning | fault
    says: str
    costs: str = ""
    mend: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)  # what was measured, for json=true


@dataclass
class Case:
    """A head's folder and the target it is to serve. `faults`: of the engine's contract, by check."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    parts: TargetParts
    target: TargetConfig
    identity: dict[str, Any]  # of the target given
    tokenizer: Any
    quantization: dict[str, Any] | None = None  # of the target's config.json
    faults: dict[str, list[str]] = field(default_factory=dict)
    engine: str = "vllm"

    @property
    def ours(self) -> dict[str, Any]:
        return self.config.get("headtrain") or {}

    @property
    def kind(self) -> str:
        return self.ours.get("type", "eagle3")

    @property
    def sglang(self) -> str:
        """How SGLang's newest known release counts the target's layers, a key of NUMBERINGS."""
        return sglang_numbering(TESTED_VERSIONS["sglang"], self.parts.config.model_type)

    @property
    def made_for(self) -> dict[str, Any]:
        return self.ours.get("made_for") or {}


def checks(case: Case) -> Iterator[Finding]:
    """All findings, in the order in which they are best read."""
    for check in CHECKS:
        name, found = check.__name__, list(check(case))
        if (named := case.faults.get(name)) and not any(one.status == FAULT for one in found):
            yield fault(name, "; ".join(named))
        yield from found


def fault(check: str, says: str, costs: str = "", mend: str = "") -> Finding:
    return Finding(check, FAULT, says, costs or ABOUT[check][0], mend or ABOUT[check][1])


def warning(check: str, says: str, costs: str = "", mend: str = "") -> Finding:
    return Finding(check, WARNING, says, costs or ABOUT[check][0], mend or ABOUT[check][1])


def contract_faults(folder: Path, case: Case) -> dict[str, list[str]]:
    """Every way in which the engine's loader would misread the folder as it lies, by the check it belongs to, and what
    was never trained. ConfigError for an engine that takes no such heads.

    An MTP module is no folder of an engine's: it is checked when it is put back into its checkpoint.
    """
    from headtrain.export import ExportError
    from headtrain.export.build import head_faults
    from headtrain.export.contracts import faults, load_contract
    from headtrain.export.folder import read_head

    if case.kind == "mtp":
        return {}
    try:
        contract = load_contract(case.engine, case.kind)
    except FileNotFoundError as error:
        raise ConfigError(f"engine={case.engine}: {error.args[0]}") from error
    if case.engine == "sglang" and contract.get("taps"):
        contract["taps"] = contract["taps"] | {NESTED: case.sglang}
    found = faults(contract, case.config, case.tensors)
    try:
        found += head_faults(read_head(folder), {}) if case.ours else []
    except ExportError as error:
        found.append(str(error))
    sorted_out: dict[str, list[str]] = {}
    for text in dict.fromkeys(found):
        check = next((name for name, words in _BELONGS.items() if re.search(words, text)), "files")
        sorted_out.setdefault(check, []).append(text)
    return sorted_out


# ----------------------------------------------------------------------------------------------------- the folder

def files(case: Case) -> Iterator[Finding]:
    if case.kind == "mtp":
        yield Finding("files", OK, "an MTP module is checked when it is put into its checkpoint (export format=mtp)")
    elif not case.faults.get("files"):
        says = f"{len(case.tensors)} tensors and {len(case.config)} keys, as {case.engine} reads them"
        yield Finding("files", OK, says)


def taps(case: Case) -> Iterator[Finding]:
    """Which layers each engine captures for this folder, against those that the head was trained on."""
    trained, blocks = case.ours.get("taps"), case.parts.config.num_hidden_layers
    if (made := case.ours.get("target_layers")) not in (None, blocks):
        yield fault("taps", f"the head was made for {made} blocks, the target has {blocks}", mend=OTHER_TARGET)
    elif (held := (case.made_for.get("captures") or {}).get("taps")) and held != trained:
        yield fault("taps", f"the head is said to read taps {trained}, but its captures held {held}")
    elif trained and "taps" not in case.faults:
        yield Finding("taps", OK, f"blocks {trained} of {blocks}; {_numberings(case, trained, blocks)}")
        if case.parts.config.model_type in SGLANG_FIRST_IS_1 and not sglang_rules_agree(trained, blocks):
            says = f"SGLang counts this target's layer ids in another way from {SGLANG_FIRST_IS_1_SINCE} on than before"
            yield warning("taps", says, mend="export with format=sglang and the engine_version that serves it")


def _numberings(case: Case, trained: list[int], blocks: int) -> str:
    words = []
    for engine, way in {"vllm": "vllm", "sglang": case.sglang, "tensorrt_llm": "tensorrt_llm"}.items():
        try:
            words.append(f"{engine} {NUMBERINGS[way].key.split('.')[-1]}={engine_ids(way, trained, blocks)}")
        except TapsError as error:
            words.append(f"{engine}: {error}")
    return ", ".join(words)


NORM_KEYS = {"norm_before_residual": ("eagle3", "peagle"), "norm_output": ("eagle3",)}


def norms(case: Case) -> Iterator[Finding]:
    """The flags that say where norms stand, as engines read them and as trained; an absent one is false."""
    keys = [key for key, kinds in NORM_KEYS.items() if case.kind in kinds]
    lost = [key for key in keys if key not in case.config and case.ours.get(key)]
    for key in lost:
        yield fault("norms", f"config.json: {key} is missing, and engines take false; trained with true")
    ones = sorted(n for n, t in case.tensors.items() if n.endswith("norm.weight") and bool((t.float() == 1).all()))
    if ones and case.kind == "eagle3":
        says = f"all ones, which is what engines put where a norm is missing: {', '.join(ones)}"
        yield warning("norms", says, "if training left other values, most of the acceptance")
    if not lost and "norms" not in case.faults:
        stored = (case.made_for.get("captures") or {}).get("norm")
        states = {"post_norm": "after", "pre_norm": "before"}.get(stored, "it is not known whether before or after")
        flags = ", ".join(f"{key}={str(bool(case.ours.get(key))).lower()}" for key in keys) or "no flags"
        yield Finding("norms", OK, f"{flags}; last states were captured {states} the final norm")


# ----------------------------------------------------------------------------------------------------- positions

def rope(case: Case) -> Iterator[Finding]:
    """inv_freq in numbers: as trained, as engines compute it from each spelling, and as the target's."""
    trained, size = case.ours.get("rope"), case.config.get("head_dim") or case.ours.get("head_dim")
    if not trained or not size:
        return
    readings = {"the target has": head_rope(case.parts.config)}
    if case.config.get("rope_theta"):
        readings["rope_theta and rope_scaling say"] = _old_rope(case.config)
    if case.config.get("rope_parameters"):
        readings["rope_parameters say"] = case.config["rope_parameters"]
    most, wrong = case.config.get("max_position_embeddings") or 2048, False
    for name, described in readings.items():
        if gap := _rope_gap(trained, described, size, most):
            wrong = True
            mend = OTHER_TARGET if name == "the target has" else ""
            says = f"trained with {_rope_words(trained)}, but {name} {_rope_words(described)}: {gap}"
            yield fault("rope", says, mend=mend)
    if not wrong and "rope" not in case.faults:
        yield Finding("rope", OK, f"{_rope_words(trained)}: the same inv_freq in every spelling and in the target")


def _old_rope(config: dict[str, Any]) -> dict[str, Any]:
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    return {"rope_theta": config.get("rope_theta") or 10000.0, "rope_type": kind, **scaling}


def _rope_words(rope: dict[str, Any]) -> str:
    scaled = "" if rope.get("rope_type", "default") == "default" else f" with {rope['rope_type']} scaling"
    return f"theta {rope.get('rope_theta', 10000.0):g}{scaled}"


def _rope_gap(one: dict[str, Any], other: dict[str, Any], size: int, most: int) -> str | None:
    """How two descriptions differ in numbers; None when they do not (relative error below 1e-5)."""
    from headtrain.heads.layers import rope_inverse_frequencies

    try:
        (a, scale_a), (b, scale_b) = (rope_inverse_frequencies(dict(rope), size, most) for rope in (one, other))
    except (KeyError, TypeError, ValueError) as error:
        return f"it cannot be computed ({error!r})"
    gap = (a - b).abs()
    if bool((gap > 1e-5 * a).any()):
        return f"angles are off by a radian from position {max(1, int(1 / float(gap.max()))):,} on"
    return f"attention is scaled by {scale_b:g} instead of {scale_a:g}" if abs(scale_a - scale_b) > 1e-5 else None


def positions(case: Case) -> Iterator[Finding]:
    served = getattr(case.parts.config, "max_position_embeddings", None)
    own = case.config.get("max_position_embeddings") or case.ours.get("max_position_embeddings")
    if served is None or own is None:
        return
    if own == served:
        yield Finding("positions", OK, f"{own:,}, the target's")
    else:
        found = fault if own < served else warning
        yield found("positions", f"max_position_embeddings is {own:,}, the target has {served:,}")


# ----------------------------------------------------------------------------------------------------- vocabulary

def vocabulary(case: Case) -> Iterator[Finding]:
    """The map from draft to target ids: offsets, its hash, and whether lm_head's rows are those of its tokens."""
    vocab, own = len(case.parts.lm_head), case.config.get("vocab_size")
    if own != vocab:
        yield fault("vocabulary", f"made for {own} tokens, the target has {vocab}", mend=OTHER_TARGET)
        return
    if "vocabulary" in case.faults:
        return
    t2d, known = case.tensors.get("t2d"), case.made_for.get("draft_vocab")
    if t2d is not None and known and mapping_hash(t2d) != known:
        yield fault("vocabulary", f"the map ({mapping_hash(t2d)[:12]}) is not the trained one ({known[:12]})")
    elif says := _strayed_rows(case):
        yield fault("vocabulary", says)
    elif "d2t" in case.tensors:
        says = f"{len(case.tensors['d2t']):,} of {own:,} tokens; d2t, t2d and lm_head agree"
        yield Finding("vocabulary", OK, says + ("" if t2d is None else f" (map {mapping_hash(t2d)[:12]})"))
    else:
        yield Finding("vocabulary", OK, f"all {own:,} tokens, no map")


def _strayed_rows(case: Case) -> str | None:
    """What is wrong with rows of lm_head, each of which should still resemble the target's row that it started from."""
    weight, theirs_VT = case.tensors.get("lm_head.weight"), case.parts.lm_head.float()
    if weight is None or weight.shape[1] != theirs_VT.shape[1]:
        return None
    ids_R = torch.arange(len(weight)) + case.tensors.get("d2t", torch.zeros(len(weight), dtype=torch.long))
    if case.ours.get("freeze_lm_head") and not torch.allclose(weight.float(), theirs_VT[ids_R], rtol=1e-2, atol=1e-5):
        return "lm_head was frozen in training, but its rows are not the target's"
    chosen_S = torch.linspace(0, len(weight) - 1, min(SAMPLED, len(weight))).long()
    cosine_SV = normalize(weight[chosen_S].float(), dim=1) @ normalize(theirs_VT, dim=1).T
    best_S, nearest_S = cosine_SV.max(1)
    strayed_S = (best_S > 0.5) & (cosine_SV.gather(1, ids_R[chosen_S, None])[:, 0] < best_S - 1e-3)
    if int(strayed_S.sum()) * 2 <= len(chosen_S):
        return None
    i = int(strayed_S.nonzero()[0, 0])
    return (
        f"{int(strayed_S.sum())} of {len(chosen_S)} rows of lm_head resemble another token's than d2t says: row "
        f"{int(chosen_S[i])} stands for token {int(ids_R[chosen_S[i]])} and is like the target's {int(nearest_S[i])}"
    )


def embedding(case: Case) -> Iterator[Finding]:
    """A shipped embedding against the target's; without one, engines lend the target's."""
    own, theirs = case.tensors.get("embed_tokens.weight"), case.parts.embedding
    if own is None:
        return
    if own.shape != theirs.shape:
        yield fault("embedding", f"embed_tokens.weight is {list(own.shape)}, the target's {list(theirs.shape)}")
        return

    def same(other: Tensor) -> bool:
        return torch.allclose(own.float(), other.float(), rtol=1e-2, atol=1e-6)

    shift = next((n for n in (1, -1) if same(theirs.roll(n, 0))), None)
    if same(theirs):
        yield Finding("embedding", OK, "embed_tokens.weight is the target's")
    elif shift:
        yield fault("embedding", f"embed_tokens.weight is the target's, shifted by {shift:+d} row")
    elif case.ours.get("train_embedding"):
        says, costs = "embed_tokens.weight was trained", "SGLang puts the target's in its place: most of the acceptance"
        yield warning("embedding", says, costs, "serve with vLLM")
    else:
        yield fault("embedding", "embed_tokens.weight is not the target's")


# ----------------------------------------------------------------------------------------------------- the target

def dtypes(case: Case) -> Iterator[Finding]:
    own, theirs = case.config.get("torch_dtype"), str(case.parts.embedding.dtype).removeprefix("torch.")
    trained = case.made_for.get("dtype")
    says = f"head {own}, target stored in {theirs}" + (f", captured in {trained}" if trained else "")
    if case.quantization:
        yield warning("dtypes", f"{says}; the target is quantised ({case.quantization.get('quant_method', 'unnamed')})")
    elif own == "float16" and theirs != "float16":
        costs = "float16 overflows where bfloat16 does not: drafts become NaN"
        yield warning("dtypes", says, costs, "export with the target's dtype")
    else:
        yield Finding("dtypes", OK, says)


def target(case: Case) -> Iterator[Finding]:
    """Whether the target given is the one the head was trained for: model, commit or content, adapter."""
    trained, given = case.made_for.get("target"), case.identity
    if not trained:
        says = "the head's folder does not say which target, tokenizer and chat template it was trained with"
        yield warning("target", says, mend="train with this version, which records it")
        return
    marks = (trained.keys() & given.keys()) - {"model", "adapter"}  # commit, content or sha256
    wrong = [
        f"{key} {_short(given[key])}, trained for {_short(trained[key])}"
        for key in sorted(marks)
        if trained[key] != given[key]
    ]
    if trained.get("adapter") != given.get("adapter"):
        served, then = ((found.get("adapter") or {}).get("model", "none") for found in (given, trained))
        wrong.append(f"adapter {served}, trained with {then}")
    if wrong:
        yield fault("target", f"{given.get('model')}: {'; '.join(wrong)}")
    elif not marks:
        says = f"trained for {trained.get('model')}, which was given in another way than {given.get('model')}"
        yield warning("target", f"{says}: they cannot be compared", mend="give the target as in training")
    else:
        yield Finding("target", OK, f"{trained.get('model')}, the same content as in training")


def tokenizer(case: Case) -> Iterator[Finding]:
    yield from _by_hash(case, "tokenizer", "tokenizer")


def template(case: Case) -> Iterator[Finding]:
    yield from _by_hash(case, "template", "chat_template")


def _by_hash(case: Case, check: str, key: str) -> Iterator[Finding]:
    trained, served = case.made_for.get(key), case.parts.texts.get(key)
    if trained is None:
        return
    if trained != served:
        yield fault(check, f"{_short(served)}, but the head was trained with {_short(trained)}")
    else:
        yield Finding(check, OK, f"the one of training ({_short(served)})")


def _short(value: Any) -> str:
    return str(value)[:12] if value else "none"


def thinking(case: Case) -> Iterator[Finding]:
    """template_kwargs in training against what serving renders: the template's defaults, or those given."""
    trained, served = case.made_for.get("template_kwargs"), case.target.template_kwargs
    if trained is None or "chat_template" not in case.parts.texts:
        return
    from headtrain.data_gen.chat import render

    then, now = (render(case.tokenizer, MESSAGES, True, kwargs) for kwargs in (trained, served))
    if then == now:
        yield Finding("thinking", OK, f"prompts render as in training (template_kwargs {trained or 'none'})")
    else:
        yield warning("thinking", f"trained with template_kwargs {trained or 'none'}; with {served or 'none'} prompts "
                      "render in another way")  # fmt: skip


CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    files, taps, norms, rope, positions, vocabulary, embedding, dtypes, target, tokenizer, template, thinking,
)  # fmt: skip
