"""A head that starts from another one: its mapping, its drafts, its training, and a mapping that is rebuilt."""

import logging
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from headtrain.config import ConfigError
from headtrain.configcheck import validate
from headtrain.data_gen.store import CaptureStore
from headtrain.export import export
from headtrain.heads.base import load_head, new_head
from headtrain.heads.simulate import accepted_chain, summarize
from headtrain.training.batches import collate
from headtrain.training.optim import lr_at

OLD, NEW = [0, 3, 5, 7, 11, 19], [0, 3, 7, 8, 12, 19]
COUNTS = {3: 4, 7: 2, 8: 3, 12: 1}
TRAIN = [([1, 2], [3, 7, 3, 8, 12]), ([4, 6], [3, 8, 3, 7, 8])]  # whose answers have these counts
VALID = [([1, 9], [3, 3, 7, 0, 5, 19, 3, 11, 7, 5, 3, 7]), ([2], [5, 5, 0, 11, 3, 7, 7, 3, 19, 5, 0, 3])]
D2T = [0, 2, 3, 4, 7, 14]


@pytest.fixture
def data(make_run, tmp_path):
    return make_run(tmp_path / "run", TRAIN, VALID)


@pytest.fixture
def warm(recipe, parts, counts, data, save, make_head):
    """warm(**keys of head): a head for the new data that starts from the parent (`head.init_from` may be given)."""
    recipe.head.init_from = save(make_head(OLD))

    def make(**keys):
        for key, value in keys.items():
            setattr(recipe.head, key, value)
        return new_head(recipe, parts, counts(COUNTS), counts(COUNTS), rows(data, "train"))

    return make


def rows(data, split):
    store = CaptureStore(data / "captures")
    return collate([store.read(row) for row in store.rows if row.split == split], [split])


# ------------------------------------------------------------------------------------------------- the default

def test_the_parents_mapping_is_kept_and_its_coverage_of_the_new_data_is_said(warm, make_head, caplog):
    caplog.set_level(logging.INFO)
    head, parent = warm(), make_head(OLD)
    assert torch.equal(head.d2t, parent.d2t) and torch.equal(head.t2d, parent.t2d) and head.d2t.tolist() == D2T
    assert torch.equal(head.lm_head.weight, parent.lm_head.weight)
    assert "mapping taken from parent; covers 60.0 % of the new supervised tokens" in caplog.messages


def test_before_the_first_step_it_drafts_what_the_parent_drafts_to_the_bit(warm, recipe, parts, data):
    head, parent = warm(), load_head(recipe.head.init_from, parts.embedding)
    assert not torch.equal(head.feature_scale, parent.feature_scale)  # it sees its features at unit size
    for split in ("train", "valid"):
        batch = rows(data, split)
        assert torch.equal(head.draft_all(batch, 3), parent.draft_all(batch, 3))
        assert torch.equal(head._features(batch.taps_NAT), parent._features(batch.taps_NAT))


def test_training_starts_at_the_parents_acceptance_and_ends_with_its_mapping_everywhere(
    warm, recipe, parts, data, train, tmp_path
):
    recipe.train.steps, recipe.train.warmup, recipe.train.log_every, recipe.train.save_every = 4, 0.5, 1, 2
    log = train(recipe, data)
    parent, batch = load_head(recipe.head.init_from, parts.embedding), rows(data, "valid")
    accepted = accepted_chain(parent.draft_all(batch, 3), batch.argmax_N, batch.supervised_N, batch.cu_R1, 3)
    assert log[0]["step"] == 0 and log[0]["tau"] == summarize(accepted, 3).tau > 1
    lrs = [line["lr"] for line in log if "lr" in line]
    assert lrs == pytest.approx([recipe.train.lr * lr_at(step, 4, 2, "cosine") for step in (1, 2, 3, 4)])

    exported = export(data / "head", "vllm", tmp_path / "exported")
    written = [data / "head" / "model.safetensors", exported / "model.safetensors"]
    in_checkpoints = [path for path in (data / "training" / "checkpoints").rglob("*.safetensors") if has_mapping(path)]
    assert len(in_checkpoints) >= 2  # of steps 2 and 4
    for path in [*written, *in_checkpoints]:
        assert load_file(path)["d2t"].tolist() == D2T, path
        assert load_file(path)["t2d"].nonzero()[:, 0].tolist() == OLD, path


def has_mapping(path) -> bool:
    with safe_open(path, "pt") as handle:
        return {"d2t", "t2d"} <= set(handle.keys())


def test_the_optimizer_begins_anew_so_the_first_update_of_a_weight_is_the_learning_rate(
    warm, recipe, make_run, train, tmp_path
):
    """AdamW's first update with fresh moments has the size of lr; with the parent's moments it has not."""
    recipe.train.schedule, recipe.train.warmup, recipe.train.lr, recipe.train.steps = "constant", 0.0, 1e-3, 3
    recipe.head.init_from = str(tmp_path / "parent")
    first = make_run(tmp_path / "first", TRAIN)
    train(recipe, first)
    shutil.copytree(first / "head", tmp_path / "trained")
    recipe.head.init_from, recipe.train.steps = str(tmp_path / "trained"), 1
    log = train(recipe, make_run(tmp_path / "second", TRAIN))
    assert [line["step"] for line in log if "lr" in line] == [1]
    before, after = (load_file(p / "model.safetensors")["lm_head.weight"] for p in
                     (tmp_path / "trained", tmp_path / "second" / "head"))  # fmt: skip
    change = (after - before).abs()
    assert float(change.max()) == pytest.approx(1e-3, rel=1e-3)
    assert float(change.median()) == pytest.approx(1e-3, rel=0.05)


def test_an_exported_head_can_be_the_parent(warm, recipe, parts, data, make_head, save, tmp_path):
    out = export(save(make_head(OLD), "other"), "vllm", tmp_path / "exported")
    head, exported = warm(init_from=str(out)), load_head(out, parts.embedding)
    batch = rows(data, "valid")
    assert torch.equal(head.draft_all(batch, 3), exported.draft_all(batch, 3))
    assert head.d2t.tolist() == D2T and head.lm_head.weight.dtype == torch.float32


def test_how_a_head_is_trained_is_the_recipes_to_say(warm):
    head = warm(unroll=5, freeze_lm_head=True)
    assert head.config.unroll == 5 and not head.lm_head.weight.requires_grad and head.training
    assert head.portable_config(torch.float32)["headtrain"]["unroll"] == 5


# ------------------------------------------------------------------------------------------------- a new mapping

def test_a_rebuilt_mapping_moves_the_rows_that_stay_and_takes_the_others_from_the_target(
    warm, make_head, parts, caplog
):
    caplog.set_level(logging.INFO)
    head, old = warm(rebuild_vocab=True), make_head(OLD).lm_head.weight
    assert head.t2d.nonzero()[:, 0].tolist() == NEW
    assert head.to_target_ids(torch.arange(6)).tolist() == NEW
    expected = torch.stack([old[0], old[1], old[3], parts.lm_head[8], parts.lm_head[12], old[5]])
    assert torch.equal(head.lm_head.weight, expected) and head.lm_head.weight.requires_grad
    said = (
        "mapping rebuilt: 4 of 6 lm_head rows are the parent's, moved to their new index, 2 start from the target's; "
        "covers 100.0 % of the new supervised tokens"
    )
    assert said in caplog.messages
    assert "2 of 6 entries of the draft vocabulary never occur in the responses" in caplog.messages  # 0 and 19


@pytest.mark.parametrize("size", [8, 20, "full", 3])
def test_a_rebuilt_mapping_may_have_another_size(warm, data, size, save, parts):
    head = warm(rebuild_vocab=True, draft_vocab=size)
    number = 20 if size == "full" else size
    assert head.config.draft_vocab_size == len(head.d2t) == len(head.lm_head.weight) == int(head.t2d.sum()) == number
    batch = rows(data, "valid")
    head(batch).loss.backward()
    assert bool(head.lm_head.weight.grad.isfinite().all())
    again = load_head(save(head, "again"), parts.embedding)
    assert torch.equal(again.draft_all(batch, 3), head.draft_all(batch, 3))


# ------------------------------------------------------------------------------------------------- what does not fit

@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"draft_vocab": 8}, r"head.draft_vocab=8: .* has 6 entries; set head.draft_vocab=6 .*rebuild_vocab=true"),
        ({"draft_vocab": "full"}, r"head.draft_vocab=full: .* has 6 entries"),
        ({"taps": [2, 4, 6]}, r"head.taps=\[2, 4, 6\]: the parent .* has \[1, 2, 3\]"),
        ({"intermediate": 48}, r"head.intermediate=48: the parent .* has 32; set head.intermediate=32"),
        ({"norm_output": True}, r"head.norm_output=True: the parent .* has False"),
        ({"draft_vocab": 21, "rebuild_vocab": True}, r"draft_vocab_size=21: .*1\.\.20"),
    ],
)
def test_a_recipe_that_does_not_fit_the_parent_is_refused_with_both_values(warm, keys, said):
    with pytest.raises(ValueError, match=said):
        warm(**keys)


def test_a_parent_of_another_target_is_refused(warm, make_head, save):
    with pytest.raises(ValueError, match=r"hidden size 24; this one has 20 and 16"):
        warm(init_from=save(make_head(OLD, hidden_size=24, target_hidden_size=24), "wide"))


def test_rows_of_another_width_than_the_targets_cannot_be_rebuilt(warm, make_head, save):
    with pytest.raises(ValueError, match=r"head.rebuild_vocab=true: .* 16 wide, .* are 24 wide"):
        warm(init_from=save(make_head(OLD, hidden_size=24), "narrow"), rebuild_vocab=True)


def test_rebuilding_without_a_parent_is_refused(recipe):
    recipe.head.rebuild_vocab = True
    with pytest.raises(ConfigError, match=r"head.rebuild_vocab=true without head.init_from"):
        validate(recipe)
    recipe.head.init_from = "some/head"
    validate(recipe)
