"""SGLang's own draft classes draft from our folders what our own decoder drafts, token by token.

Greedy, in fp32, on a CPU (sglang_drafts.py says what of SGLang runs). A difference is excused only as a near-tie of the
head's logits; faults that are planted on purpose show that equality means something.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from headtrain.config import HeadSection

pytestmark = pytest.mark.engines

K = 4
SGLANG = Path(os.environ.get("SGLANG", Path(__file__).parents[2] / ".sglang"))
RUNS = {
    "full vocabulary": HeadSection("eagle3"),
    "draft vocabulary": HeadSection("eagle3", draft_vocab=100),
    "taps [1, 3, 6]": HeadSection("eagle3", taps=[1, 3, 6]),
    "four taps, norm_output, one key head": HeadSection("eagle3", taps=[2, 3, 5, 7], norm_output=True, kv_heads=1),
    "EAGLE": HeadSection("eagle"),
}
REFUSED = {  # heads that are not exported to it, and here is why
    "norm_before_residual": HeadSection("eagle3", norm_before_residual=True),
    "a tap after the last block": HeadSection("eagle3", taps=[2, 4, 8]),
}


def taps_off_by_one(config):
    of_sglang = config["eagle_config"]
    of_sglang["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in of_sglang["eagle_aux_hidden_state_layer_ids"]]


def another_rope(config):
    config["rope_theta"] = 100.0
    if "rope_parameters" in config:
        config["rope_parameters"]["rope_theta"] = 100.0


def absolute(tensors):
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def halves_swapped(tensors):
    tensors["fc.weight"] = tensors["fc.weight"].roll(tensors["fc.weight"].shape[1] // 2, 1)


def without(name):
    return lambda tensors: tensors.pop(name)


FAULTS = {  # what is wrong: the head, and how its folder is spoiled
    "taps off by one": ("full vocabulary", {"config": taps_off_by_one}),
    "rope base": ("full vocabulary", {"config": another_rope}),
    "fed back after the norm": ("full vocabulary", {"config": lambda c: c.update(norm_output=True)}),
    "fed back before the norm": (
        "four taps, norm_output, one key head", {"config": lambda c: c.pop("norm_output")},
    ),
    "norm of the embedding missing": ("full vocabulary", {"tensors": without("midlayer.input_layernorm.weight")}),
    "norm of the features missing": ("full vocabulary", {"tensors": without("midlayer.hidden_norm.weight")}),
    "halves of fc swapped": ("EAGLE", {"tensors": halves_swapped}),
    "d2t as ids": ("draft vocabulary", {"tensors": absolute}),
} | {name: (name, {}) for name in REFUSED}  # fmt: skip


def edit(folder, config=None, tensors=None):
    """Rewrites a folder after config(dict) and tensors(dict) changed its content in place."""
    if config:
        content = json.loads((folder / "config.json").read_text())
        config(content)
        (folder / "config.json").write_text(json.dumps(content))
    if tensors:
        content = load_file(folder / "model.safetensors")
        tensors(content)
        save_file({n: t.contiguous() for n, t in content.items()}, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="session")
def made(tiny, tmp_path_factory):
    """Every head: our steps, and the folder that SGLang is given."""
    from headtrain.export import export

    root = tmp_path_factory.mktemp("sglang")
    target, found = tiny.make_target(root / "target"), {}
    for number, (name, section) in enumerate((RUNS | REFUSED).items()):
        section.unroll, section.draft_vocab = K, section.draft_vocab if section.draft_vocab == 100 else "full"
        run = root / f"run-{number}"
        head = tiny.make_head(target, section, run / "head")
        told = {"format": "sglang", "engine_version": "0.5.23"} if name in RUNS else {"format": "vllm"}
        folder = export(run / "head", out_dir=run / "export", dtype="float32", **told)
        found[name] = SimpleNamespace(head=head, folder=folder, ours=tiny.decoded(target, head, tiny.prompts(), K))
    return SimpleNamespace(target=target, root=root, heads=found)


@pytest.fixture(scope="session")
def sglang_says(tiny, made):
    """By head and by planted fault: SGLang's steps, where ours drafted, or its error. All are of one process."""
    if not (SGLANG / "sglang").is_dir():
        pytest.skip("SGLang is not installed here; `make test-sglang` has it")
    jobs = {name: (name, head.folder) for name, head in made.heads.items()}
    for number, (fault, (name, changes)) in enumerate(FAULTS.items()):
        folder = made.root / f"fault-{number}"
        shutil.copytree(made.heads[name].folder, folder)
        edit(folder, **changes)
        jobs[fault] = name, folder
    heads = {
        job: {"folder": str(folder), "texts": texts(tiny, made.heads[name].ours)}
        for job, (name, folder) in jobs.items()
    }
    out, task = made.root / "drafts.json", made.root / "job.json"
    task.write_text(json.dumps({"target": str(made.root / "target"), "heads": heads, "k": K, "out": str(out)}))
    environment = os.environ | {"PYTHONPATH": str(SGLANG), "HF_HUB_OFFLINE": "1"}
    script = Path(__file__).with_name("sglang_drafts.py")
    done = subprocess.run([sys.executable, script, task], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(out.read_text())
    return {
        job: said[job] if isinstance(said[job], str) else decoding(tiny, made.heads[name].ours, said[job])
        for job, (name, _) in jobs.items()
    }


def texts(tiny, ours):
    rows = zip(tiny.prompts(), ours.answers, ours.steps, strict=True)
    return [{"ids": p + answer, "lengths": [step.length for step in steps]} for p, answer, steps in rows]


def decoding(tiny, ours, drafts):
    steps = [
        [tiny.Step(step.length, k_drafts, 0) for step, k_drafts in zip(own, theirs, strict=True)]
        for own, theirs in zip(ours.steps, drafts, strict=True)
    ]
    return tiny.Decoding(ours.answers, steps)


@pytest.mark.parametrize("name", RUNS)
def test_sglangs_classes_draft_what_our_decoder_does(name, tiny, made, sglang_says, ledger):
    head = made.heads[name]
    assert not isinstance(sglang_says[name], str), sglang_says[name]
    found = tiny.compare(made.target, head.head, tiny.prompts(), head.ours, sglang_says[name])
    ledger.append(
        f"SGLang 0.5.23 (its classes), {name}: {found.equal} of {found.drafts} drafts equal in {found.steps} steps, "
        f"{found.ties} near-ties"
    )
    assert not found.unlike, found.unlike
    assert found.steps >= 200
    assert found.ties <= max(1, found.steps // 1000)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_folder_makes_sglang_draft_otherwise_or_fail(fault, tiny, made, sglang_says, ledger):
    head = made.heads[FAULTS[fault][0]]
    if isinstance(sglang_says[fault], str):
        ledger.append(f"planted fault, {fault} (SGLang): {sglang_says[fault]}")
        return
    found = tiny.compare(made.target, head.head, tiny.prompts(), head.ours, sglang_says[fault])
    ledger.append(f"planted fault, {fault} (SGLang): {found.equal} of {found.drafts} drafts equal")
    assert found.unlike, f"{fault}: every draft is the same, so the comparison cannot see it"


