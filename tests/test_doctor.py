"""The doctor: a head that is in order passes every check; each mistake that people make is found and named.

The target's next token is a fixed permutation of the present one, through blocks that change the hidden state much, so
that a head learns it within seconds and drafts with an acceptance near 1, but only from the layers, norms and tokens
that it was trained on.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from headtrain import cli
from headtrain.config import RecipeConfig, ShapeConfig, TargetConfig
from headtrain.facts import made_for
from headtrain.files import write_json

TAPS, LETTERS = [2, 4, 5], 256
WORDS = ("alpha", "bravo", "carol", "delta", "eagle", "frost", "globe")
CHATS = [{"messages": [{"role": "user", "content": word}]} for word in WORDS]


def build_target(folder) -> TargetConfig:
    from transformers import AutoModelForCausalLM

    from headtrain.smoke import build_target as random_target

    shape = ShapeConfig(layers=8, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=384)
    target = TargetConfig(model=str(folder), family="llama", shape=shape, device="cpu", dtype="float32")
    random_target(RecipeConfig(target=target), folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(12.0 if "down_proj" in name else 0.3 if "o_proj" in name else 1.0)
        model.get_input_embeddings().weight.normal_(std=0.3)
        circle = torch.randperm(LETTERS)
        following = torch.arange(LETTERS)
        following[circle] = circle.roll(-1)
        last_VT = model.model(torch.arange(LETTERS)[:, None]).last_hidden_state[:, 0]
        model.lm_head.weight.zero_()
        model.lm_head.weight[following] = 3 * normalize(last_VT - last_VT.mean(0), dim=1)
    model.save_pretrained(folder)
    return target


def captured(target, texts, late: int):
    """A packed batch of (prompt, answer) with the target's states; late=1: every slot reads a token too early."""
    from headtrain.heads.base import Batch

    rows = [torch.tensor(prompt + answer) for prompt, answer in texts]
    states = [target.forward(row[None], taps=tuple(TAPS)) for row in rows]
    taps, last = [s.taps_BLAH[0].clone() for s in states], [s.last_BLH[0].clone() for s in states]
    logits = torch.cat([target.logits(x) for x in last])
    for tensor in (*taps, *last):
        tensor[-1] = 0
    ends = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).int()
    supervised = torch.cat([torch.arange(len(p) + len(a)) >= len(p) for p, a in texts])
    return Batch(
        torch.cat([row.roll(late) for row in rows]), torch.cat([torch.arange(len(row)) for row in rows]), ends,
        supervised, torch.cat(taps), torch.cat(last), logits.argmax(-1), logits.logsumexp(-1),
    )  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> TargetConfig:
    return build_target(tmp_path_factory.mktemp("doctor") / "model")


@pytest.fixture(scope="module")
def train(target, tmp_path_factory):
    """train(name, late=0, **head settings) -> the folder of a head, trained once for all tests."""
    from headtrain.data_gen.chat import prompt_ids
    from headtrain.eval.decoder.decode import decode
    from headtrain.eval.decoder.drafters.none import NoDrafter
    from headtrain.heads.base import new_head, save_head
    from headtrain.heads.vocab import mapping_hash
    from headtrain.identity import target_identity
    from headtrain.target import Target, load_parts

    loaded, parts, root = Target.load(target), load_parts(target), tmp_path_factory.mktemp("heads")
    prompts = [prompt_ids(loaded.tokenizer, chat["messages"]) for chat in CHATS[:6]]
    answers = decode(loaded, NoDrafter(), prompts, k=0, max_new_tokens=40)
    texts = [(prompt, answer.ids) for prompt, answer in zip(prompts, answers, strict=True)]
    counts = torch.arange(len(parts.lm_head)).lt(LETTERS).long()
    run = root / "run"
    identity = {"target": {"identity": target_identity(target, root)}}
    write_json((run / "captures").mkdir(parents=True) or run / "captures" / "manifest.json", {"made_from": identity})
    write_json(run / "captures" / "index.json", {"dtype": "float32", "norm": "post_norm", "taps": TAPS})

    def make(name: str, late: int = 0, **settings):
        place = root / name / "head"
        if place.is_dir():
            return place
        recipe = RecipeConfig(target=target)
        recipe.head.taps, recipe.head.unroll, recipe.head.draft_vocab = TAPS, 3, 250
        for key, value in settings.items():
            setattr(recipe.head, key, value)
        batch = captured(loaded, texts, late)
        head = new_head(recipe, parts, counts, counts, batch).train()
        optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=3e-3)
        for _ in range(60):
            loss = head(batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        head.config.made_for = made_for(target, run, parts.texts) | {"draft_vocab": mapping_hash(head.t2d)}
        save_head(head.eval(), place)
        return place

    return make


@pytest.fixture
def spoiled(train, tmp_path):
    """spoiled(config=…, tensors=…, of="sound", **settings): a copy of a trained head's folder after the changes."""

    def copy(config=None, tensors=None, of="sound", **settings):
        place = tmp_path / "spoiled"
        shutil.copytree(train(of, **settings), place)
        content, weights = json.loads((place / "config.json").read_text()), load_file(place / "model.safetensors")
        for change, what in ((config, content), (tensors, weights)):
            if change:
                change(what)
        (place / "config.json").write_text(json.dumps(content))
        save_file({name: t.contiguous() for name, t in weights.items()}, place / "model.safetensors")
        return place

    return copy


@pytest.fixture
def examine(target, tmp_path, capsys):
    """examine(head folder, *arguments) -> (exit status, check -> its findings): the command itself, as JSON."""
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS[4:]))

    def run(head, *arguments, place=target.model):
        given = [f"head={head}", f"target={place}", "target.device=cpu", f"prompts={tmp_path / 'chats.jsonl'}"]
        given += ["k=3"] * ("k=2" not in arguments)
        status = cli.main(["doctor", *given, "json=true", *arguments])
        said = capsys.readouterr()
        assert status in (0, 1), said.err
        found = {}
        for one in json.loads(said.out)["checks"]:
            found.setdefault(one["check"], []).append(one)
        return status, found

    return run


def faulty(found) -> set[str]:
    return {check for check, ones in found.items() if any(one["status"] == "fault" for one in ones)}


# ------------------------------------------------------------------------------------------------- a sound head

def test_a_sound_head_passes_every_check(train, examine):
    status, found = examine(train("sound"))
    assert {one["status"] for ones in found.values() for one in ones} == {"ok"}, found
    assert status == 0
    assert set(found) == {
        "files", "taps", "norms", "rope", "positions", "vocabulary", "dtypes", "target", "tokenizer", "template",
        "thinking", "states", "drafts", "reading", "acceptance",
    }  # fmt: skip
    assert found["acceptance"][0]["numbers"]["tau"] > 2.5, "the toy must be learnt, else these tests prove little"


@pytest.mark.parametrize("settings", [{"norm_output": True}, {"norm_before_residual": True}], ids=str)
def test_heads_with_other_norms_pass_too(train, examine, settings):
    status, found = examine(train(str(settings), **settings))
    assert status == 0 and found["drafts"][0]["numbers"]["largest_gap"] < 1e-4
    assert "=true" in found["norms"][0]["says"]


def test_an_eagle_head_is_computed_in_a_second_way_as_well(train, examine):
    _, found = examine(train("eagle", type="eagle", taps=None, draft_vocab="full"))
    assert found["drafts"][0]["status"] == "ok" and found["drafts"][0]["numbers"]["equal_drafts"] == 9
    assert "drafts" not in faulty(found) and "reading" not in faulty(found)


# ------------------------------------------------------------------------------------------------- wrong exports

def layers(step: int, ours: bool = False):
    def change(config):
        taps = [tap + step for tap in TAPS]
        config["eagle_aux_hidden_state_layer_ids"] = taps
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [tap - 1 for tap in taps]
        if ours:
            config["headtrain"]["taps"] = taps

    return change


def theta(ours: bool = False):
    def change(config):
        config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 1e6
        if ours:
            config["headtrain"]["rope"]["rope_theta"] = 1e6

    return change


def flag(name: str, value: bool, ours: bool = False):
    def change(config):
        config[name] = value
        if ours:
            config["headtrain"][name] = value

    return change


def absolute(tensors):
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def without(name: str):
    return lambda tensors: tensors.pop(name)


def shifted_rows(tensors):
    """The mapping of newer data over the rows of the old head."""
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"] + 3
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill(0, ids, True)


def made(**change):
    return lambda config: config["headtrain"]["made_for"].update(change)


FED_BACK = {"of": "{'norm_output': True}", "norm_output": True}
WRONG = {  # what is wrong with the folder: (changes, check that finds it, words)
    "taps off by one for engines": ({"config": layers(1)}, "taps", "must be [2, 4, 5]"),
    "taps off by one everywhere": ({"config": layers(-1, ours=True)}, "reading", "with taps [2, 4, 5]"),
    "taps that were not captured": ({"config": layers(1, ours=True)}, "taps", "its captures held [2, 4, 5]"),
    "the final norm is missing": ({"tensors": without("norm.weight")}, "files", "norm.weight is missing"),
    "a norm before attention is missing": (
        {"tensors": without("midlayer.hidden_norm.weight")}, "files", "hidden_norm.weight is missing"),
    "lm_head is missing": ({"tensors": without("lm_head.weight")}, "files", "lm_head.weight is missing"),
    "d2t holds target ids": ({"tensors": absolute}, "vocabulary", "absolute target ids"),
    "d2t of other data": ({"tensors": shifted_rows}, "vocabulary", "is not the trained one"),
    "rope theta for engines": ({"config": theta()}, "rope", "off by a radian from position 7 on"),
    "rope theta everywhere": ({"config": theta(ours=True)}, "rope", "the target has theta 10000"),
    "tokens not shifted": ({"of": "late", "late": 1}, "reading", "not shifted"),
    "fed back before the norm instead of after": (
        {"config": flag("norm_output", False), **FED_BACK}, "norms",
        "norm_output=False, but the head was trained with True"),
    "the flag of the feedback is lost": (
        {"config": lambda c: c.pop("norm_output"), **FED_BACK}, "norms",
        "norm_output is missing"),
    "fed back before the norm, everywhere": (
        {"config": flag("norm_output", False, ours=True), **FED_BACK}, "reading",
        "norm_output=true"),
    "the residual before the norm": (
        {"config": flag("norm_before_residual", True)}, "norms", "norm_before_residual=True, but"),
    "positions of the training length": (
        {"config": lambda c: c.update(max_position_embeddings=128)}, "positions", "128"),
    "another target": (
        {"config": made(target={"model": "model", "content": "00000000"})}, "target", "trained for 00000000"),
    "an adapter in training": (
        {"config": made(target={"adapter": {"model": "my-lora"}})}, "target", "adapter none, trained with my-lora"),
    "another chat template": ({"config": made(chat_template="00000000")}, "template", "trained with 00000000"),
    "another tokenizer": ({"config": made(tokenizer="00000000")}, "tokenizer", "trained with 00000000"),
    "a target of other depth": (
        {"config": lambda c: c["headtrain"].update(target_layers=9)}, "taps", "made for 9 blocks, the target has 8"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_export_is_found_and_named(name, spoiled, examine):
    changes, check, words = WRONG[name]
    status, found = examine(spoiled(**changes))
    assert status == 1
    assert check in faulty(found), found
    says = " ".join(one["says"] for one in found[check] if one["status"] == "fault")
    assert words in says
    assert all(one["costs"] and one["mend"] for ones in found.values() for one in ones if one["status"] == "fault")


@pytest.mark.parametrize(
    ("step", "says"), [(0, "is the target's"), (1, "shifted by +1 row"), (7, "is not the target's")]
)
def test_a_shipped_embedding_is_compared_with_the_targets_row_by_row(step, says, target, spoiled, examine):
    rows = load_file(f"{target.model}/model.safetensors")["model.embed_tokens.weight"]
    _, found = examine(spoiled(tensors=lambda tensors: tensors.update({"embed_tokens.weight": rows.roll(step, 0)})))
    assert ("reading" in faulty(found)) == bool(step)
    assert says in " ".join(one["says"] for one in found["embedding"])
    assert not step or "with the target's embedding" in found["reading"][0]["says"]


def test_drafts_of_a_sound_folder_that_is_served_wrongly_are_told_from_those_of_the_trained_head(spoiled, examine):
    _, found = examine(spoiled(layers(1)))
    assert "is another head" in found["drafts"][0]["says"] and found["reading"][0]["status"] != "ok"
    assert "taps [2, 4, 5]" in found["reading"][0]["says"]


@pytest.mark.parametrize(("engine", "wrong"), [("vllm", False), ("sglang", True), ("tensorrt_llm", False)])
def test_each_engine_reads_the_layers_where_it_looks_for_them(engine, wrong, spoiled, examine):
    """Ids copied unchanged into SGLang's key are a fault whoever serves, but change SGLang's drafts alone."""
    place = spoiled(lambda config: config["eagle_config"].update(eagle_aux_hidden_state_layer_ids=TAPS))
    _, found = examine(place, f"engine={engine}")
    assert (found["drafts"][0]["status"] == "fault") == wrong
    assert "taps" in faulty(found)


# ------------------------------------------------------------------------------------------------- what is not known

def test_a_head_of_an_earlier_version_passes_with_one_warning(spoiled, examine):
    status, found = examine(spoiled(lambda config: config["headtrain"].pop("made_for")))
    assert status == 0
    assert [one["check"] for ones in found.values() for one in ones if one["status"] != "ok"] == ["target"]


def test_a_target_that_was_given_in_another_way_in_training_is_a_warning(spoiled, examine):
    place = spoiled(made(target={"model": "me/my-model", "commit": "0" * 40}))
    _, found = examine(place, "probe=false")
    assert found["target"][0]["status"] == "warning" and "cannot be compared" in found["target"][0]["says"]


def test_answers_too_short_to_draft_along_are_a_warning(train, examine):
    _, found = examine(train("sound"), "max_new_tokens=3")
    assert found["acceptance"][0]["status"] == "warning" and "too short" in found["acceptance"][0]["says"]


def test_medusa_heads_are_measured_with_the_decoder(train, examine):
    _, found = examine(train("medusa", type="medusa", taps=None, draft_vocab="full", blocks=1), "k=2")
    assert found["acceptance"][0]["numbers"]["steps"] > 20 and "reading" not in found


def test_a_head_for_another_size_of_target_is_not_run(spoiled, examine):
    _, found = examine(spoiled(lambda config: config.update(vocab_size=500)))
    assert {"vocabulary", "drafts"} <= faulty(found) and "not run" in found["drafts"][0]["says"]


def test_a_mode_of_thinking_that_serving_would_not_send_is_a_warning(target, train, examine, tmp_path):
    switch = "{% if enable_thinking is defined and not enable_thinking %}<|turn|>quick\n{% endif %}"
    place = tmp_path / "thinker"
    shutil.copytree(target.model, place)
    template = place / "chat_template.jinja"
    template.write_text(template.read_text() + switch)
    head = tmp_path / "head"
    shutil.copytree(train("sound"), head)
    config = json.loads((head / "config.json").read_text())
    config["headtrain"]["made_for"] |= {"template_kwargs": {"enable_thinking": False}}
    (head / "config.json").write_text(json.dumps(config))
    _, found = examine(head, "probe=false", place=place)
    assert found["thinking"][0]["status"] == "warning" and "enable_thinking" in found["thinking"][0]["says"]
    assert "states" not in found and "template" in faulty(found)
    _, found = examine(head, "probe=false", "target.template_kwargs={enable_thinking: false}", place=place)
    assert found["thinking"][0]["status"] == "ok"


def test_a_quantised_target_is_a_warning(target, train, examine, tmp_path):
    place = tmp_path / "quantised"
    shutil.copytree(target.model, place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    _, found = examine(train("sound"), "probe=false", place=place)
    assert found["dtypes"][0]["status"] == "warning" and "fp8" in found["dtypes"][0]["says"]


# ------------------------------------------------------------------------------------------------- other targets

@pytest.fixture
def untrained(tmp_path):
    """The folder of a head of taps 3, 4, 5 that knows that it has never been trained."""
    from headtrain.heads.base import HeadConfig, save_head
    from headtrain.heads.eagle3 import Eagle3Head
    from headtrain.heads.start import start_marks

    head = Eagle3Head(HeadConfig(
        hidden_size=64, target_hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=384, draft_vocab_size=384, taps=[3, 4, 5], target_layers=8,
    ))  # fmt: skip
    head.marks = start_marks(head)
    save_head(head, tmp_path / "untrained")
    return tmp_path / "untrained"


def case_of(folder, family, engine):
    from types import SimpleNamespace

    from headtrain.doctor_checks import Case

    config = json.loads((folder / "config.json").read_text())
    parts = SimpleNamespace(config=SimpleNamespace(model_type=family, num_hidden_layers=8))
    return Case(config, load_file(folder / "model.safetensors"), parts, None, {}, None, engine=engine)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt_llm", "llama_cpp"])
def test_a_head_that_was_never_trained_is_a_fault_whatever_engine_is_asked_about(engine, untrained):
    from headtrain.doctor_checks import contract_faults

    found = contract_faults(untrained, case_of(untrained, "llama", engine))
    assert [text for text in found["files"] if "it was never trained" in text] and set(found) == {"files"}


@pytest.mark.parametrize(("family", "ids"), [("llama", [2, 3, 4]), ("deepseek_v3", [3, 4, 5])])
def test_layer_ids_are_judged_as_sglang_counts_those_of_the_targets_family(family, ids, untrained, tmp_path):
    from headtrain.doctor_checks import contract_faults, taps
    from headtrain.doctor_plain import as_served
    from headtrain.export import export

    weights = load_file(untrained / "model.safetensors")
    save_file({name: t * 2 if t.dim() > 1 else t for name, t in weights.items()}, untrained / "model.safetensors")
    out = export(untrained, "sglang", tmp_path / "out", {"family": family}, engine_version="0.5.23")
    case, other = (case_of(out, name, "sglang") for name in (family, {"llama": "deepseek_v3"}.get(family, "llama")))
    assert contract_faults(out, case) == {} and set(contract_faults(out, other)) == {"taps"}
    assert as_served("sglang", "eagle3", case.config, 8, case.sglang).taps == (3, 4, 5)
    assert as_served("sglang", "eagle3", case.config, 8, other.sglang).taps != (3, 4, 5)
    found = list(taps(case))
    assert f"sglang eagle_aux_hidden_state_layer_ids={ids}," in found[0].says
    assert [one.status for one in found] == ["ok"] + ["warning"] * (family == "deepseek_v3")


# ------------------------------------------------------------------------------------------------- report and engine

@pytest.mark.parametrize(("times", "status"), [(1.0, "ok"), (1.2, "ok"), (1.6, "warning"), (2.5, "fault")])
def test_acceptance_is_compared_with_the_report_that_came_with_the_head(times, status, train, examine, tmp_path):
    _, found = examine(train("sound"))
    alpha = [share * times for share in found["acceptance"][0]["numbers"]["alpha"]]
    path = tmp_path / "report.json"
    row = {"suite": "heldout", "drafter": "head", "temperature": 0.0, "k": 3, "tree": "chain", "steps": 9, "tau": 3.9}
    path.write_text(json.dumps({"heads": [{"id": "head"}], "results": [row | {"alpha": alpha}]}))
    _, found = examine(train("sound"), f"report={path}")
    assert found["acceptance"][0]["status"] == status
    assert found["acceptance"][0]["numbers"]["expected_tau"] == pytest.approx(1 + sum(alpha))


def test_a_runs_report_counts_for_the_head_that_it_measured_and_for_its_exports_alone(train, examine, tmp_path):
    from headtrain.export import export
    from headtrain.files import sha256_file

    run = tmp_path / "run"
    shutil.copytree(train("sound"), run / "head")
    row = {"suite": "heldout", "drafter": "head", "temperature": 0.0, "k": 3, "tree": "chain", "steps": 9, "tau": 3.1,
           "dtype": "float32"}
    heads = [{"id": "head", "sha256": sha256_file(run / "head" / "model.safetensors")}]
    report = {"heads": heads, "results": [row | {"alpha": [0.9, 0.7, 0.5]}]}
    write_json((run / "report").mkdir() or run / "report" / "report.json", report)
    export(run / "head", "sglang", run / "export" / "sglang")
    export(run / "export" / "sglang", "vllm", run / "export" / "vllm", dtype="float32")
    shutil.copytree(run / "head", run / "theirs")
    weights = load_file(run / "theirs" / "model.safetensors")
    save_file(weights | {"norm.weight": weights["norm.weight"] * 1.5}, run / "theirs" / "model.safetensors")
    for name, known in {"head": True, "export/sglang": True, "export/vllm": True, "theirs": False}.items():
        _, found = examine(run / name, "limit=1")
        assert found["acceptance"][0]["numbers"]["expected_tau"] == (pytest.approx(3.1) if known else None), name
        assert ("report" in found) is not known
    assert "measured other weights" in found["report"][0]["says"] and found["report"][0]["status"] == "warning"
    write_json(run / "report" / "report.json", report | {"results": [row | {"alpha": [0.9], "tree": "4x16"}]})
    status, found = examine(run / "head", "probe=false")
    assert status == 0 and "it has no greedy chain of the head alone" in found["report"][0]["says"]


def test_the_words_say_ok_warning_or_fault_what_it_costs_and_how_to_mend_it(spoiled, target, capsys):
    arguments = [f"target={target.model}", "target.device=cpu", "probe=false"]
    assert cli.main(["doctor", f"head={spoiled(theta())}", *arguments]) == 1
    said = capsys.readouterr().out
    assert "\nfault    rope        trained with theta 10000, but rope_theta and rope_scaling say theta 1e+06" in said
    assert "costs: acceptance falls as texts grow longer" in said and "mend: export the head again" in said
    assert said.rstrip().endswith("ok") and "faults, 0 warnings," in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "head=… is missing"),
        (["head=x"], "target=… is missing"),
        (["head=nowhere", "target=x"], "head=nowhere: "),
        (["head=HEAD", "target=./nowhere"], "target.model=./nowhere: no such file or folder"),
        (["head=HEAD", "target=TARGET", "k=0"], "k=0: a whole number of 1 or more"),
        (["head=HEAD", "target=TARGET", "engine=vlm"], "engine=vlm: unknown; known: vllm, sglang"),
        (["head=HEAD", "target=TARGET", "probe=no"], "probe=no: true or false"),
        (["head=HEAD", "target=TARGET", "targt.device=cpu"], "unknown key targt.device"),
        (["head=HEAD", "target=TARGET", "target.devise=cpu"], "did you mean target.device or"),
        (["head=HEAD", "target=TARGET", "report=nowhere"], "report=nowhere: no such file"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(arguments, said, train, target, capsys):
    filled = [text.replace("HEAD", str(train("sound"))).replace("TARGET", target.model) for text in arguments]
    assert cli.main(["doctor", *filled]) == 2
    assert said in capsys.readouterr().err
