"""Recipes, bases, overrides in Hydra's grammar, and the checks of every value."""

from __future__ import annotations

import typing

import pytest

from headtrain import config as config_module
from headtrain import configload
from headtrain.config import DRAFTERS, ConfigError, PromptSource, RecipeConfig
from headtrain.configcheck import RULES, validate
from headtrain.plan import CONFIG_NAMES


def load(recipe, *overrides) -> RecipeConfig:
    return configload.load(str(recipe), list(overrides))


@pytest.mark.parametrize("name", configload.recipe_names())
def test_every_shipped_recipe_loads_and_says_what_it_is(name):
    config = load(name)
    assert config.description and config.run_dir == f"runs/{name}"
    shape = vars(config.target.shape)
    assert config.target.family and all(shape[key] for key in CONFIG_NAMES)
    assert load(name, "smoke=true").run_dir == f"runs/{name}-smoke"


def test_merging_goes_from_defaults_over_bases_and_the_recipe_to_the_command_line(tmp_path):
    (tmp_path / "base.yaml").write_text("train: {lr: 0.1, clip: 2.0, steps: 7}\nseed: 3\n")
    (tmp_path / "child.yaml").write_text("bases: [base.yaml]\ntrain: {clip: 3.0}\n")
    config = load(tmp_path / "child.yaml", "train.steps=9")
    assert (config.train.lr, config.train.clip, config.train.steps, config.seed) == (0.1, 3.0, 9, 3)
    assert config.train.decay == RecipeConfig().train.decay


def test_bases_that_form_a_circle_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("bases: [b.yaml]\n")
    (tmp_path / "b.yaml").write_text("bases: a.yaml\n")
    with pytest.raises(ConfigError, match="circle"):
        load(tmp_path / "a.yaml")


def test_a_base_may_be_a_shipped_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text("bases: [eagle3_llama8b]\ntarget: {model: me/tuned}\n")
    config = load(tmp_path / "mine.yaml")
    assert config.target.model == "me/tuned" and config.target.shape.layers == 32


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("target.model=/a b/c=d(e)~f,g", "target.model", "/a b/c=d(e)~f,g"),
        ("target.revision=12345e10", "target.revision", "12345e10"),
        ("target.revision=null", "target.revision", None),
        ("description='quoted'", "description", "'quoted'"),
        ("eval.k=3", "eval.k", [3]),
        ("eval.k=[3,5]", "eval.k", [3, 5]),
        ("eval.temperature=0.7", "eval.temperature", [0.7]),
        ("eval.suites=a=b.jsonl", "eval.suites", ["a=b.jsonl"]),
        ("eval.suites=[heldout, gsm8k=/data/a b.jsonl ,rag=x,'c=d.jsonl']", "eval.suites",
         ["heldout", "gsm8k=/data/a b.jsonl", "rag=x", "c=d.jsonl"]),
        ("eval.drafters=[head,head+ngram]", "eval.drafters", ["head", "head+ngram"]),
        ("export.formats=vllm", "export.formats", ["vllm"]),
        ("head.taps=[2,4,5]", "head.taps", [2, 4, 5]),
        ("head.draft_vocab=full", "head.draft_vocab", "full"),
        ("train.steps=null", "train.steps", None),
        ("smoke=true", "smoke", True),
        ("+train.lr=1e-3", "train.lr", 1e-3),
        ("target.template_kwargs.enable_thinking=false", "target.template_kwargs", {"enable_thinking": False}),
        ("target.template_kwargs={a:{b:1}}", "target.template_kwargs", {"a": {"b": 1}}),
        ("data.prompts=x.jsonl", "data.prompts", [PromptSource("x.jsonl")]),
        ("data.prompts=[a.jsonl,{source:b.json,limit:7}]", "data.prompts",
         [PromptSource("a.jsonl"), PromptSource("b.json", 7)]),
    ],
)  # fmt: skip
def test_values_are_read_as_they_are_meant(override, key, value, recipe):
    node = load(recipe, override)
    for part in key.split("."):
        node = getattr(node, part)
    assert node == value


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train=3", "train.KEY=VALUE"),
        ("data.prompts=[{sorce:b}]", "did you mean data.prompts.source"),
        ("train.steps=1.5", "a whole number is needed"),
        ("smoke=yess", "true or false is needed"),
        ("head.taps=[1,[2]", "a list of whole numbers is needed"),
        ("head.taps=5", "a list of whole numbers is needed"),
        ("eval.drafters=head,ngram", r"eval.drafters=\[head,ngram\]"),
        ("train.lr=1,2", "one value is needed"),
        ("train.lr=choice(1,2)", "one value is needed"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(override, said, recipe):
    with pytest.raises(ConfigError, match=said):
        load(recipe, override)


def test_a_key_given_twice_is_refused(recipe):
    with pytest.raises(ConfigError, match="given twice"):
        load(recipe, "train.lr=1", "train.lr=2")


def test_unquoted_yaml_numbers_in_text_fields_are_refused(tmp_path):
    (tmp_path / "r.yaml").write_text("target: {revision: 12345e10}\n")
    with pytest.raises(ConfigError, match=r"r.yaml: target.revision: .* put it in quotes"):
        load(tmp_path / "r.yaml")


def test_an_unknown_key_in_a_recipe_names_the_file_and_the_nearest_key(tmp_path):
    (tmp_path / "r.yaml").write_text("train: {batch_token: 5}\n")
    with pytest.raises(ConfigError, match=r"r.yaml: unknown key train.batch_token; did you mean train.batch_tokens"):
        load(tmp_path / "r.yaml")


def test_a_file_that_is_not_yaml_is_named(tmp_path):
    (tmp_path / "r.yaml").write_text("train: {lr: [1\n")
    with pytest.raises(ConfigError, match=r"r.yaml: cannot be read as YAML"):
        load(tmp_path / "r.yaml")


def test_every_number_of_the_schema_has_a_rule_and_every_rule_a_key():
    by_name = configload.keys()
    free = {key.path for key in by_name.values() if key.is_text or key.is_open or key.kind is bool}
    lists_of_text = {key.path for key in by_name.values() if key.is_list and key.item in (str, PromptSource)}
    unruled = set(by_name) - set(RULES) - free - lists_of_text
    assert not unruled
    assert not set(RULES) - set(by_name)


def out_of_range() -> list[tuple[str, object]]:
    """For every numeric rule a value below, above or beside what is allowed, found without reading the rule."""
    found = []
    for path, rule in RULES.items():
        for value in (-1, -0.5, 0, 2, 10**9, float("nan"), float("inf"), "no such choice"):
            kind = configload.keys()[path].kind
            numeric = int in typing.get_args(kind) or float in typing.get_args(kind) or kind in (int, float)
            if isinstance(value, str) == numeric:
                continue
            try:
                refused = not rule.check(value)
            except TypeError:
                continue
            if refused:
                found.append((path, value))
                break
    return found


@pytest.mark.parametrize(("path", "value"), out_of_range(), ids=lambda value: str(value))
def test_a_value_out_of_range_names_the_key_and_what_is_allowed(path, value):
    config = RecipeConfig()
    if path.startswith("data.prompts."):
        config.data.prompts = [PromptSource("x.jsonl")]
        node = config.data.prompts[0]
    else:
        node = config
        for part in path.split(".")[:-1]:
            node = getattr(node, part)
    last = path.rsplit(".", 1)[-1]
    setattr(node, last, [value] if configload.keys()[path].is_list else value)
    with pytest.raises(ConfigError) as error:
        validate(config)
    assert path in str(error.value) and RULES[path].allowed in str(error.value)


def test_at_least_fifty_keys_are_checked_that_way():
    assert len(out_of_range()) >= 50


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["head.taps=[5,2]"], "different and ascending"),
        (["head.taps=[2,2]"], "different and ascending"),
        (["head.taps=[2,9]"], "blocks 1 … 8"),
        (["head.draft_vocab=400"], "exceeds the target's 384"),
        (["target.shape.kv_heads=3"], "not a multiple"),
        (["data.filter.min_chars=9", "data.filter.max_chars=3"], "no prompt can pass"),
        (["train.betas=[0.9]"], "two numbers"),
        (["eval.speed_prompts=[1,2]"], "one per suite"),
        (["train.offload=true"], "offload=true needs train.zero_stage"),
        (["train.offload=true", "train.zero_stage=1", "train.optimizer=muon"], "with train.optimizer=muon: Muon"),
        (["train.patience=3", "data.valid=0"], "train.patience with data.valid=0"),
        (["train.decode_prompts=8", "data.valid=0"], "train.decode_prompts with data.valid=0"),
        (["train.decode_prompts=65"], "exceeds train.eval_rows=64"),
        (["eval.k=[]"], "at least one value"),
        (["eval.k=[2,3,2]"], "eval.k=.*: 2 is given twice"),
        (["eval.batch=[4,4]"], "eval.batch=.*: 4 is given twice"),
        (["eval.temperature=[0,1,0.0]"], "eval.temperature=.*: 0.0 is given twice"),
        (["eval.drafters=[ngram,head,ngram]"], "eval.drafters=.*: ngram is given twice"),
        (["eval.tree=[chain,4x16,4x16]"], "eval.tree=.*: 4x16 is given twice"),
        (["eval.suites=[heldout,heldout]"], "eval.suites=.*: heldout is given twice"),
        (["eval.drafters=draft_model"], "draft_model, which needs eval.draft_model"),
        (["eval.drafters=layer_skip"], "layer_skip, which needs eval.skip_from"),
        (["eval.drafters=[head,layer_skip]", "eval.skip_from=8"], "eval.skip_from=8: fewer than the target's 8 layers"),
        (["eval.draft_model=me/small"], "only for draft_model, which eval.drafters does not have"),
        (["eval.ngram_hits=2"], "only for ngram-map-k, ngram-map-k4v"),
        (["eval.drafters=suffix", "eval.min_confidence=0.3"], "only for head, head.ngram, "),
        (["eval.drafters=ngram", "eval.tree=4x16"], "eval.tree=4x16: only heads draft such trees"),
        (["eval.tree=[chain,iid-2x8]"], "eval.tree=iid-2x8: children are drawn independently"),
        (["eval.rule=block", "eval.tree=[chain,4x16]"], "eval.rule=block takes chains; leave out 4x16"),
        (["eval.rule=block", "eval.drafters=head+ngram-tree"], "leave out drafter head.ngram-tree"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides, said, recipe):
    with pytest.raises(ConfigError, match=said):
        load(recipe, *overrides)


@pytest.mark.parametrize("tree", ["chain", "4x16", "iid-2x8", "1x4", "x4", "4x", "iid-1x2", "2-4", "0x3"])
def test_tree_shapes_are_checked_before_torch_is_there_as_the_drafter_reads_them(tree):
    from headtrain.eval.decoder.drafters.shape import TreeShape

    if RULES["eval.tree"].check(tree):
        TreeShape.parse(tree)
    else:
        with pytest.raises(ValueError, match="needs the form"):
            TreeShape.parse(tree)


def test_the_drafters_that_a_config_may_name_are_those_there_are():
    from headtrain.eval.decoder.drafters import NAMES

    assert set(NAMES) == {"none", *DRAFTERS}


def test_the_resolved_config_comes_back_from_its_yaml(recipe, tmp_path):
    config = load(recipe, "eval.k=[2,3]", "target.template_kwargs={a:1}", "head.taps=[1,2]")
    path = tmp_path / "config.yaml"
    path.write_text(configload.to_yaml(config))
    assert configload.load_resolved(path) == config


def test_a_head_key_that_the_type_does_not_read_is_refused(monkeypatch):
    monkeypatch.setitem(config_module.HEAD_KEYS, "norm_output", ("another",))
    with pytest.raises(ConfigError, match=r"head\.norm_output=True: heads of type eagle3 have no such.*another"):
        load("eagle3_smollm2")
