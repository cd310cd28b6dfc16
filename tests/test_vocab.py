"""`headtrain vocab`: what it counts, that training chooses the same, and draft vocabularies in files."""

from __future__ import annotations

import json

import pytest
import torch

from headtrain import cli, configload, identity, vocab, vocabfile
from headtrain.config import ConfigError
from headtrain.data_gen import store
from headtrain.files import Manifest

ROWS = {  # source -> (split, answer)
    "chat.jsonl": [("train", "The weather is nice today, and the children are playing outside in the garden."),
                   ("train", "I would like to go to the market and buy some bread and cheese for dinner."),
                   ("valid", "Zebras and quokkas would like to live in the garden too, she said yesterday.")],
    "dir/code.jsonl": [("train", "x[0] = {1: 2}; y = [3, 4]; z = x + y; print(z)"), ("valid", "q = {7: 8}")],
}  # fmt: skip
PROMPT = "Say something: @"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny random llama and its byte tokenizer."""
    from headtrain.smoke import build_target, shrink

    place = tmp_path_factory.mktemp("target")
    (place / "r.yaml").write_text("target: {family: llama}\n")
    build_target(shrink(configload.load(str(place / "r.yaml"), ["smoke=true", f"run_dir={place}"])), place / "model")
    return place / "model"


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture
def make_run(tmp_path, tiny, tokenizer):
    """make_run(name, rows): a run folder with finished responses and captures of ROWS (source -> [(split, answer)])."""
    shape = "{layers: 8, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, intermediate: 128, vocab: 384}"

    def make(name="run", rows=ROWS, target="one"):
        run = tmp_path / name
        for source, texts in rows.items():
            infos, ids = [], []
            for n, (split, answer) in enumerate(texts):
                prompt, told = (tokenizer.encode(text, add_special_tokens=False) for text in (PROMPT, answer))
                told = [*told, tokenizer.eos_token_id]
                ids.append((prompt, told))
                infos.append(store.RowInfo(f"{source}-{n}", split, source, len(prompt) + len(told), "stop",
                                           len(prompt), len(told)))  # fmt: skip
            flat = {
                "ids": torch.tensor([i for row in ids for part in row for i in part], dtype=torch.int32),
                "supervised": torch.tensor([mark for prompt, told in ids
                                            for mark in [False] * len(prompt) + [True] * len(told)]),
            }  # fmt: skip
            batch = list(rows).index(source)
            store.write_unit(run / "responses", "responses", batch, infos, flat, on_policy=True)
            made = torch.Generator().manual_seed(batch)
            N = len(flat["ids"])
            states = {"taps": torch.randn(N, 2, 64, generator=made), "last": torch.randn(N, 64, generator=made),
                      "argmax": flat["ids"].roll(-1), "logsumexp": torch.zeros(N)}  # fmt: skip
            facts = {"norm": "post_norm", "taps": [2, 4], "hidden": 64, "dtype": "float32"}
            store.write_unit(run / "captures", "captures", batch, infos, flat | states, **facts)
        for kind in ("responses", "captures"):
            store.write_index(run / kind, kind, len(rows))
            manifest = Manifest(run / kind)
            manifest.data = {"fingerprint": f"{name}-{kind}", "made_from": {"target": {"identity": target}}}
            manifest.finish({})
        (run / "config.yaml").write_text(
            f"target: {{model: {tiny}, family: llama, dtype: float32, device: cpu, shape: {shape}}}\n"
            f"head: {{taps: [2, 4], draft_vocab: 40, unroll: 2}}\nrun_dir: {run}\n"
        )
        return run

    return make


def told(capsys, *arguments):
    status = cli.main(["vocab", *arguments])
    said = capsys.readouterr()
    assert status == 0, said.err
    return said.out


def training_choice(run, *overrides):
    """The draft vocabulary of the head that training builds from this run."""
    from headtrain.training.trainer import build_head

    config = configload.load(str(run / "config.yaml"), list(overrides))
    return build_head(config, run, torch.device("cpu")).t2d.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("size", [1, 40, "full"])
def test_the_file_holds_exactly_what_training_chooses_and_training_takes_it(size, make_run, tmp_path, capsys):
    run, out = make_run(), tmp_path / "vocab.json"
    told(capsys, f"run_dir={run}", f"head.draft_vocab={size}", f"out={out}", "sizes=[full]")
    file = vocabfile.read(str(out))
    assert file.ids == training_choice(run, f"head.draft_vocab={size}")
    assert file.ids == training_choice(run, f"head.draft_vocab={out}")
    from headtrain.heads.vocab import mapping, mapping_hash

    assert file.mapping == mapping_hash(mapping(torch.tensor(file.ids), 384)[1])


def test_a_file_of_another_choice_is_what_the_head_gets(make_run, tokenizer, tmp_path, capsys):
    run, out = make_run(), tmp_path / "code.json"
    told(capsys, f"run_dir={run}", "domains=[code.jsonl]", f"out={out}")
    chosen = vocabfile.read(str(out)).ids
    assert chosen == training_choice(run, f"head.draft_vocab={out}") != training_choice(run)
    brace, letter = tokenizer.encode("{", add_special_tokens=False) + tokenizer.encode("W", add_special_tokens=False)
    assert brace in chosen and letter not in chosen


def test_coverage_is_counted_by_split_and_domain(make_run, tokenizer, capsys):
    def supervised(answer):
        return [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]

    run = make_run()
    text = told(capsys, f"run_dir={run}", "sizes=[20,40]")
    ids = {size: set(training_choice(run, f"head.draft_vocab={size}")) for size in (20, 40)}
    for size in (20, 40):
        for split in ("train", "valid"):
            tokens = [i for rows in ROWS.values() for s, answer in rows if s == split for i in supervised(answer)]
            inside = sum(token in ids[size] for token in tokens)
            assert f"{100 * inside / len(tokens):.2f} %" in next(
                line for line in text.split("\n") if line.startswith(str(size))
            )
    code = [i for _, answer in ROWS["dir/code.jsonl"] for i in supervised(answer)]
    line = next(line for line in text.split("\n") if line.startswith("dir/code.jsonl"))
    assert line.split()[1] == str(len(code)) and line.count("/") == 1 + 2
    assert "\nby language" in text and "\nen " in text and "<- head.draft_vocab" in text


def test_several_runs_are_counted_together(make_run, tmp_path, capsys):
    """As one run that has the rows of both."""
    first, second = (make_run(name, {source: ROWS[source]}) for name, source in zip("ab", ROWS, strict=True))
    both, out = make_run("both"), [tmp_path / "two.json", tmp_path / "one.json"]
    text = told(capsys, f"run_dir=[{first},{second}]", f"out={out[0]}")
    told(capsys, f"run_dir={both}", f"out={out[1]}")
    assert vocabfile.read(str(out[0])).ids == vocabfile.read(str(out[1])).ids
    assert "by run" in text and vocabfile.read(str(out[0])).counts == vocabfile.read(str(out[1])).counts


def test_the_targets_choice_counts_where_there_are_captures(make_run, tokenizer, capsys):
    """Here the target would always have chosen a token that no answer has."""
    run = make_run()
    before = told(capsys, f"run_dir={run}", "sizes=[40]")
    (run / "captures" / "captures-00001.safetensors").unlink()  # online training captures some rows only
    for path in sorted((run / "captures").glob("*.safetensors")):
        rows, facts = store.read_header(path)
        from safetensors.torch import load_file

        tensors = {k: v.clone() for k, v in load_file(path).items() if k != "offsets"}
        tensors["argmax"][:] = 383
        store.write_unit(path.parent, "captures", int(path.stem[-5:]), rows, tensors, **facts)
    after = told(capsys, f"run_dir={run}", "sizes=[40]")
    cells, old = (next(line for line in text.split("\n") if line.startswith("40")).split() for text in (after, before))
    code = len(tokenizer.encode(ROWS["dir/code.jsonl"][1][1], add_special_tokens=False)) + 1
    all_ = code + len(tokenizer.encode(ROWS["chat.jsonl"][2][1], add_special_tokens=False)) + 1
    assert cells[:5] == old[:5] and float(cells[5]) >= 100 * (1 - code / all_) - 0.01 > float(old[5])
    assert float(old[5]) == pytest.approx(100 - float(old[3]), abs=0.011)  # greedy: the choice is the token


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_fewest_steps_are_those_of_a_drafter_that_knows_the_answer(k):
    g = torch.Generator().manual_seed(k)
    for _ in range(200):
        rows = torch.randint(1, 12, (3,), generator=g).tolist()
        n = sum(rows)
        begins = torch.zeros(n, dtype=torch.bool)
        begins[torch.tensor([0, *rows[:-1]]).cumsum(0)] = True
        supervised, known = torch.rand(n, generator=g) < 0.8, torch.rand(n, generator=g) < 0.7
        drafted, ends = vocab.behind_the_first(supervised, begins)
        steps, at, tokens = 0, 0, 0
        while at < n:  # span by span: the first token is given, then steps of up to k known drafts and a bonus
            end = at
            while end < n and supervised[end] and (end == at or not begins[end]):
                end += 1
            place = at + 1
            tokens += max(end - place, 0)
            while place < end:
                accepted = 0
                while accepted < k and place + accepted < end and known[place + accepted]:
                    accepted += 1
                place, steps = min(place + accepted + 1, end), steps + 1
            at = max(end, at + 1)
        assert int(drafted.sum()) == tokens
        assert vocab.fewest_steps(known[drafted], ends[drafted], k) == steps


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "recipe=… or run_dir=… is missing"),
        (["run_dir=nowhere"], "run_dir=nowhere: no run folder"),
        (["run_dir={run}", "train.lr=1"], "train.lr=1: not used with run_dir=…"),
        (["run_dir={run}", "domains=[chat.jsonl,poems]"], "domains: no row is from poems; there are: chat.jsonl, dir/"),
        (["run_dir={run}", "sizes=[0]"], "draft_vocab_size=0: give a whole number in 1..384"),
        (["run_dir={run}", "sizes=[385]"], "draft_vocab_size=385: give a whole number in 1..384"),
        (["run_dir={run}", "sizes=[lots]"], "head.draft_vocab=lots: no such file"),
        (["run_dir={run}", "out=vocab.txt"], "out=vocab.txt: the file is JSON"),
        (["run_dir={run}", "out={tmp}/none/vocab.json"], "none/vocab.json: there is no folder"),
        (["run_dir={run}", "out=vocab.json", "head.draft_vocab={tmp}/v.json"], "v.json is a file already"),
        (["run_dir=[{run},{tmp}/other/../run]"], "is given twice and would be counted twice"),
        (["run_dir=[{run},{other}]"], "has the responses of another target"),
        (["run_dir={open}"], "responses is missing or unfinished"),
        (["recipe=eagle3_llama8b", "run_dir={tmp}/none", "smoke=true"], "prompts is missing, unfinished"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_fit_is_one_line(arguments, said, make_run, tmp_path, capsys):
    run, other = make_run(), make_run("other", target="two")
    unfinished = make_run("unfinished")
    Manifest(unfinished / "responses").reopen()
    places = {"run": run, "other": other, "open": unfinished, "tmp": tmp_path}
    assert cli.main(["vocab", *(word.format(**places) for word in arguments)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and said in err and err.count("\n") == 1


# ------------------------------------------------------------------------------------------------- the file

GOOD = vocabfile.VocabFile([1, 5, 9], 20, "mark", [3, 2, 1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ids": [1, 9, 5]}, "ids must be ascending"),
        ({"ids": [1, 5, 20]}, "ids must be ascending whole numbers of 0 … vocab_size - 1"),
        ({"ids": [-1, 5, 9]}, "ids must be ascending"),
        ({"ids": [1, 5.0, 9]}, "ids must be ascending"),
        ({"ids": []}, "one at least"),
        ({"ids": "159"}, "ids must be ascending"),
        ({"ids": [1, 5, 8]}, "ids and mapping do not belong together"),
        ({"vocab_size": "20"}, "ids must be ascending"),
        ({"vocab_size": 21}, "do not belong together"),
        ({"mapping": None}, "do not belong together"),
        ({"tokenizer": ...}, "it has no ids, vocab_size, tokenizer and mapping"),
    ],
)
def test_a_damaged_file_is_refused_by_name(change, said, tmp_path):
    path = tmp_path / "v.json"
    GOOD.write(path)
    assert vocabfile.read(str(path), 20, "mark") == GOOD
    written = {k: v for k, v in (json.loads(path.read_text()) | change).items() if v is not ...}
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=r"v\.json: ") as error:
        vocabfile.read(str(path))
    assert said in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1,2]", b"\xff\xfe\x00", b"3"])
def test_a_file_of_something_else_is_refused_by_name(content, tmp_path):
    (tmp_path / "v.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"v\.json"):
        vocabfile.read(str(tmp_path / "v.json"))


def test_a_file_for_another_target_is_refused_before_and_when_it_is_used(tmp_path, make_run, tiny):
    from headtrain import checks

    run, path = make_run(), tmp_path / "v.json"
    for file, said in ((vocabfile.VocabFile([1, 5], 20, "mark"), "target with 20 tokens; this one has 384"),
                       (vocabfile.VocabFile([1, 5], 384, "mark"), "made with another tokenizer")):  # fmt: skip
        file.write(path)
        config = configload.load(str(run / "config.yaml"), [f"head.draft_vocab={path}", "data.max_length=64"])
        with pytest.raises(ConfigError, match=said):
            checks.check(config, run, {"coming": "training"})
        with pytest.raises(ConfigError, match=said):
            training_choice(run, f"head.draft_vocab={path}")


def test_the_content_of_the_file_is_part_of_the_training_fingerprint(tmp_path):
    def mark(asked):
        config = configload.load("eagle3_llama8b", [f"head.draft_vocab={asked}"])
        return identity.stage_marks(config, "target", [])["training"][0]

    first, copy = tmp_path / "a.json", tmp_path / "b.json"
    GOOD.write(first)
    GOOD.write(copy)
    before = mark(first)
    assert before == mark(copy) != mark(4)  # what is in it counts, not its name
    vocabfile.VocabFile([1, 5, 10], 20, "mark").write(first)
    assert mark(first) != before


def test_a_plan_knows_the_size_of_a_vocabulary_in_a_file(tmp_path):
    from headtrain import plan

    GOOD.write(tmp_path / "v.json")
    config = configload.load("eagle3_llama8b", [f"head.draft_vocab={tmp_path / 'v.json'}"])
    assert plan.model_of(config).draft_vocab == 3


def test_a_parents_vocabulary_is_not_changed_by_a_file_unasked(tmp_path):
    file = f"head.draft_vocab={tmp_path}/v.json"
    with pytest.raises(ConfigError, match=r"set head\.rebuild_vocab=true to change it"):
        configload.load("eagle3_llama8b", [file, "head.init_from=some/head"])
    configload.load("eagle3_llama8b", [file, "head.init_from=some/head", "head.rebuild_vocab=true"])
