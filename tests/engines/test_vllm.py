"""vLLM drafts from our folders what our own decoder drafts, token by token, and its metrics count what ours do.

Greedy, in fp32. A difference is excused only as a near-tie of the head's logits. That equality means something is shown
by faults that are planted on purpose: with each of them drafts differ.
"""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from headtrain.config import HeadSection, RecipeConfig, TargetConfig

pytestmark = pytest.mark.engines

K = 4


@dataclass(frozen=True)
class Case:
    family: str  # of the target
    section: HeadSection
    method: str
    parallel: bool = False
    before_norm: bool = False  # vLLM feeds the module's state back from before its norm
    format: str = "vllm"  # of the export


HEADS = {
    "EAGLE-3": Case("llama", HeadSection("eagle3"), "eagle3"),
    "EAGLE-3, draft vocabulary": Case("llama", HeadSection("eagle3", draft_vocab=100), "eagle3"),
    "EAGLE-3, four taps, norm_output": Case(
        "llama", HeadSection("eagle3", taps=[1, 3, 5, 8], norm_output=True), "eagle3"
    ),
    "EAGLE-3, one tap, norm_before_residual": Case(
        "llama", HeadSection("eagle3", taps=[6], norm_before_residual=True, kv_heads=1), "eagle3"
    ),
    "EAGLE-3 for Qwen3": Case("qwen3", HeadSection("eagle3", draft_vocab=100), "eagle3"),
    "EAGLE-3 for Llama 3's rope": Case("llama3", HeadSection("eagle3"), "eagle3"),
    "EAGLE-3 for Qwen3 with YaRN": Case("qwen3_yarn", HeadSection("eagle3"), "eagle3"),
    "EAGLE-3, speculators layout": Case(
        "llama", HeadSection("eagle3", draft_vocab=100), "eagle3", format="speculators"
    ),
    "P-EAGLE, speculators layout": Case(
        "llama", HeadSection("peagle", layers=2), "eagle3", parallel=True, format="speculators"
    ),
    "EAGLE": Case("llama", HeadSection("eagle"), "eagle"),
    "P-EAGLE, two layers": Case("llama", HeadSection("peagle", layers=2), "eagle3", parallel=True),
    "P-EAGLE, own embedding, draft vocabulary": Case(
        "llama", HeadSection("peagle", layers=1, train_embedding=True, draft_vocab=100), "eagle3", parallel=True
    ),
    "Medusa": Case("llama", HeadSection("medusa"), "medusa"),
    "Medusa, two blocks, one lm_head": Case("llama", HeadSection("medusa", blocks=2, share_lm_head=True), "medusa"),
    "MTP of MiMo": Case("mimo", HeadSection("mtp"), "mtp"),
    "MTP of Qwen3-Next": Case("qwen3_next", HeadSection("mtp"), "mtp"),
    "MTP of GLM-4 MoE": Case("glm4_moe", HeadSection("mtp"), "mtp", before_norm=True),
}
ROPES = {  # targets with another rope, told from the default one at the lengths of these texts
    "llama3": ("llama", {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }),
    "qwen3_yarn": ("qwen3", {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
    }),
}  # fmt: skip
WITH_MODULE = {  # targets whose checkpoint has an MTP module: what their config needs besides tiny.SIZES
    "mimo": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3_next": {
        "layer_types": ["full_attention"] * 3,  # the others' kernels are Triton's
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "glm4_moe": {"moe_intermediate_size": 64},
}  # fmt: skip


@pytest.fixture(scope="session")
def targets(tiny, mtp_targets, tmp_path_factory):
    """targets(family) -> (our target, its folder), made once."""

    @cache
    def get(family):
        folder = tmp_path_factory.mktemp(family)
        if family not in WITH_MODULE:
            kind, rope = ROPES.get(family, (family, None))
            return tiny.make_target(folder, kind, **({"rope_parameters": rope} if rope else {})), folder
        sizes = {k: v for k, v in tiny.SIZES.items() if k not in ("num_hidden_layers", "initializer_range")}
        built = "qwen2" if family == "mimo" else family
        mtp_targets.make(folder, built, width=tiny.SIZES["initializer_range"], **(sizes | WITH_MODULE[family]))
        if family == "mimo":
            edit(folder, config=lambda c: c.update(architectures=["MiMoForCausalLM"]))
        return tiny.load_target(folder), folder

    return get


@pytest.fixture(scope="session")
def made(tiny, targets, tmp_path_factory):
    """made(name) -> a trained head of HEADS, the folder that vLLM is given, and our decoder's steps; made once."""
    from headtrain.configload import to_yaml
    from headtrain.export import export

    @cache
    def get(name):
        case = HEADS[name]
        target, source = targets(case.family)
        run = tmp_path_factory.mktemp("run")
        words = 100 if case.section.draft_vocab == 100 else "full"
        section = replace(case.section, draft_vocab=words, unroll=K)
        head = tiny.make_head(target, section, run / "head", str(source))
        settings = TargetConfig(model=str(source), family=target.config.model_type, dtype="float32")
        (run / "config.yaml").write_text(to_yaml(RecipeConfig(target=settings, head=section)))
        options = {} if section.type == "mtp" else {"dtype": "float32"}
        if section.type == "medusa":
            options["engine_version"] = "0.32.0"  # the last that has it
        folder = export(run / "head", case.format, run / "export", **options)
        with tiny.fed_back_before_norm(head) if case.before_norm else nullcontext():
            found = tiny.decoded(target, head, tiny.prompts(), K)
        return SimpleNamespace(target=target, source=source, head=head, folder=folder, ours=found)

    return get


@pytest.fixture(scope="session")
def vllm_says(tiny, vllm_engine, made):
    """vllm_says(name, folder) -> vLLM's steps and its own counts of accepted drafts; the head's own folder once."""

    def run(name, folder):
        case, told = HEADS[name], {"model": str(folder)}
        target = made(name).source
        if case.method == "mtp":  # the module stands in the target's checkpoint
            target, told = folder, {}
        if case.parallel:
            told["parallel_drafting"] = True
        answers, drafted, metrics = vllm_engine.decode(target, tiny.prompts(), K, tiny.NEW, method=case.method, **told)
        steps = [[tiny.Step(n, drafts, 0) for n, drafts in sorted(row.items())] for row in drafted]
        counts = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
        return SimpleNamespace(decoding=tiny.Decoding(answers, steps, counts), metrics=metrics)

    once = cache(run)
    return lambda name, folder=None: run(name, folder) if folder else once(name, made(name).folder)


@pytest.mark.parametrize("name", HEADS)
def test_vllm_drafts_and_accepts_what_our_decoder_does(name, tiny, made, vllm_says, vllm_engine, ledger):
    head, says = made(name), vllm_says(name)
    found = tiny.compare(head.target, head.head, tiny.prompts(), head.ours, says.decoding)
    ours, theirs = head.ours.accepted, says.decoding.accepted
    ledger.append(
        f"vLLM {vllm_engine.VERSION}, {name}: {found.equal} of {found.drafts} drafts equal in {found.steps} steps, "
        f"{found.ties} near-ties; accepted by position {theirs} (vLLM), {ours} (ours)"
    )
    assert not found.unlike, found.unlike
    assert found.steps >= 200
    assert found.ties <= max(1, found.steps // 1000)
    assert sum(ours) >= 40 and ours[1] > 0, "the test would say little if nothing were accepted"
    if not found.ties:
        assert theirs == ours
        assert says.metrics["vllm:spec_decode_num_drafts"] == head.ours.count


# ------------------------------------------------------------------------------------------------- planted faults


def edit(folder, config=None, tensors=None):
    """Rewrites a folder after config(dict) and tensors(dict) changed its content in place."""
    if config:
        content = json.loads((folder / "config.json").read_text())
        config(content)
        (folder / "config.json").write_text(json.dumps(content))
    if tensors:
        for file in folder.glob("*.safetensors"):
            content = load_file(file)
            tensors(content)
            file.unlink()  # it may be a link to the target's
            save_file({name: t.contiguous() for name, t in content.items()}, file, metadata={"format": "pt"})


def taps_off_by_one(config):
    config["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in config["eagle_aux_hidden_state_layer_ids"]]


def another_rope(config):
    config["rope_theta"] = 100.0
    if "rope_parameters" in config:
        config["rope_parameters"]["rope_theta"] = 100.0


def absolute(tensors):
    """Target ids instead of offsets, as far as they stay in the vocabulary."""
    ids = torch.arange(len(tensors["d2t"]))
    tensors["d2t"] = torch.minimum(tensors["d2t"] + ids, len(tensors["t2d"]) - 1 - ids)


def reversed_halves(name):
    def change(tensors):
        if name in tensors:
            tensors[name] = tensors[name].roll(tensors[name].shape[1] // 2, 1)

    return change


def without(name):
    return lambda tensors: tensors.pop(name)


IN_THE_FOLDER = {  # what is wrong: the head, and how its folder is spoiled
    "taps off by one": ("EAGLE-3", {"config": taps_off_by_one}),
    "norm of the embedding missing": ("EAGLE-3", {"tensors": without("midlayer.input_layernorm.weight")}),
    "norm of the features missing": ("EAGLE-3", {"tensors": without("midlayer.hidden_norm.weight")}),
    "norm before lm_head missing": ("EAGLE-3", {"tensors": without("norm.weight")}),
    "rope base": ("EAGLE-3", {"config": another_rope}),
    "fed back after the norm": ("EAGLE-3", {"config": lambda c: c.update(norm_output=True)}),
    "fed back before the norm": ("EAGLE-3, four taps, norm_output", {"config": lambda c: c.pop("norm_output")}),
    "d2t absolute": ("EAGLE-3, draft vocabulary", {"tensors": absolute}),
    "another mask token": (
        "P-EAGLE, two layers", {"config": lambda c: c.update(ptd_token_id=(c["ptd_token_id"] + 1) % c["vocab_size"])},
    ),
    "features of mask rows zero": ("P-EAGLE, two layers", {"tensors": lambda t: t["mask_hidden"].zero_()}),
    "halves of fc swapped": ("MTP of MiMo", {"tensors": reversed_halves("model.mtp_layers.0.input_proj.weight")}),
}  # fmt: skip


def differs(tiny, head, decoding, fault, ledger, ours=None):
    found = tiny.compare(head.target, head.head, tiny.prompts(), ours or head.ours, decoding)
    ledger.append(f"planted fault, {fault}: {found.equal} of {found.drafts} drafts equal")
    assert found.unlike, f"{fault}: every draft is the same, so the comparison cannot see it"
    assert decoding.answers == head.ours.answers, "a wrong draft may cost time, never change an answer"


@pytest.mark.parametrize("fault", IN_THE_FOLDER)
def test_a_fault_in_the_folder_makes_vllm_draft_otherwise(fault, tiny, made, vllm_says, tmp_path, ledger):
    name, changes = IN_THE_FOLDER[fault]
    folder = tmp_path / "head"
    shutil.copytree(made(name).folder, folder)
    edit(folder, **changes)
    differs(tiny, made(name), vllm_says(name, folder).decoding, fault, ledger)


@pytest.mark.parametrize("name", ["EAGLE-3", "EAGLE", "P-EAGLE, two layers", "MTP of MiMo"])
def test_an_embedding_that_is_not_shifted_drafts_otherwise_than_vllm(name, tiny, made, vllm_says, ledger, monkeypatch):
    """The token *after* a slot is what it reads; here it is given its own."""
    head = made(name)
    extend = head.head.extend

    def unshifted(state, tokens_BL, *rest):
        first = getattr(state, "before", tokens_BL[:, :1])
        state.before = tokens_BL[:, -1:]
        return extend(state, torch.cat([first, tokens_BL[:, :-1]], 1), *rest)

    with monkeypatch.context() as patch:
        patch.setattr(head.head, "extend", unshifted)
        wrong = tiny.decoded(head.target, head.head, tiny.prompts(), K)
    differs(tiny, head, vllm_says(name).decoding, f"embedding not shifted ({name})", ledger, wrong)


def test_vllm_feeds_glm_modules_back_before_their_norm_and_we_after(tiny, made, vllm_says, ledger):
    """So the first draft of a step is the same, as everything with K = 1 is."""
    name = "MTP of GLM-4 MoE"
    head, says = made(name), vllm_says(name).decoding
    ours = tiny.decoded(head.target, head.head, tiny.prompts(), K)
    differs(tiny, head, says, f"fed back after the norm ({name})", ledger, ours)
    theirs = [{step.length: step.drafts[0] for step in row} for row in says.steps]
    same = [row.get(step.length, step.drafts[0]) == step.drafts[0]
            for row, steps in zip(theirs, ours.steps, strict=True) for step in steps]  # fmt: skip
    assert all(same)
