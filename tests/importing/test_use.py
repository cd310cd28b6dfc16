"""What an imported head is good for: it drafts for its target, and training goes on from it."""

from __future__ import annotations

import json

import importing_checkpoints as made
import pytest
import torch

from headtrain.cli import main
from headtrain.config import RecipeConfig, TargetConfig
from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters.head import HeadDrafter
from headtrain.eval.decoder.drafters.none import NoDrafter
from headtrain.eval.decoder.sampling import Sampling
from headtrain.heads.base import load_head, new_head
from headtrain.importing import import_head
from headtrain.target import Target, load_parts

CHECKPOINTS = {
    "eagle3": made.sglang, "peagle": made.peagle, "eagle": lambda: made.eagle(bias=True), "medusa": made.medusa,
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded(target):
    return Target.load(TargetConfig(model=str(target), device="cpu"), "float32")


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_decoding_with_an_imported_head_gives_the_targets_own_text(kind, tmp_path, target, loaded):
    place = made.write(tmp_path / "theirs", *CHECKPOINTS[kind]())
    folder = import_head(str(place), tmp_path / "ours", target=str(target)).folder
    head = load_head(folder, loaded.embed.weight, loaded.dtype, loaded.lm_head.weight)
    prompts = [[5, 9, 2], [7, 7, 41, 3, 12]]
    plain, drafted = (
        [row.ids for row in decode(loaded, drafter, prompts, k=3, max_new_tokens=12)]
        for drafter in (NoDrafter(), HeadDrafter(head, Sampling()))
    )
    assert drafted == plain and all(map(len, plain))


def test_training_starts_from_an_imported_head_and_keeps_its_draft_vocabulary(tmp_path, target):
    place = made.write(tmp_path / "theirs", *made.trtllm())
    folder = import_head(str(place), tmp_path / "ours", target=str(target)).folder
    recipe, parts = RecipeConfig(), load_parts(TargetConfig(model=str(target)))
    recipe.head.draft_vocab, recipe.head.unroll, recipe.head.init_from = made.DRAFT, 2, str(folder)
    counts = torch.arange(made.VOCAB)  # would choose the last 20 tokens
    head, parent = new_head(recipe, parts, counts, counts, made.batch()), load_head(folder)
    assert torch.equal(head.d2t, parent.d2t) and head.t2d.nonzero()[:, 0].tolist() == made.IDS
    assert head.config.unroll == 2 and head.config.taps == [3, 6, 11]
    parent.attach(parts.embedding.float(), parts.lm_head.float())
    head.attach(parts.embedding.float(), parts.lm_head.float())
    assert torch.equal(head.eval().draft_all(made.batch(), 3), parent.draft_all(made.batch(), 3))
    out = head(made.batch())
    out.loss.backward()
    assert torch.isfinite(out.loss) and head.fc.weight.grad.abs().sum() > 0


def test_the_command_imports_and_prints_what_was_assumed(tmp_path, target, capsys):
    place = made.write(tmp_path / "theirs", *made.sglang())
    assert main(["import", f"head={place}", f"out={tmp_path / 'ours'}", f"target={target}", "taps=[2,6,9]"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{tmp_path / 'ours'}: eagle3 head, from the format sglang"
    assert said[1:] == [f"- {line}" for line in json.loads((tmp_path / "ours" / "import.json").read_text())["said"]]
    assert "- taps [2, 6, 9] of 12 layers, as given" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["head=x"], "out=… is missing: new folder to write"),
        (["out=x"], "head=… is missing"),
        (["head=x", "out=y", "taps=[a,2]"], r"taps=[a,2]: numbers of layers are needed"),
        (["head=x", "out=y", "tapps=[1]"], "unknown key tapps, did you mean taps?"),
        (["head=/nowhere/x", "out=y"], "/nowhere/x: config.json is missing; give the folder of a head"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, words, capsys):
    assert main(["import", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
