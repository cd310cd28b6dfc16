"""Offline acceptance: the decoder's own counts where it claims to be τ, another name elsewhere."""

from __future__ import annotations

import time

import pytest
import torch

from headtrain.config import RecipeConfig
from headtrain.data_gen import passes, store
from headtrain.eval import offline
from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters import HeadDrafter
from headtrain.eval.decoder.sampling import Sampling
from headtrain.files import Manifest
from headtrain.heads.base import new_head
from headtrain.target import TargetParts
from headtrain.training.batches import collate

KS = [1, 3, 6]
BUDGET, LONGEST = 24, 45  # of tokens; the longest prompts meet the second first


@pytest.fixture(scope="module")
def captured(target, prompts, tmp_path_factory):
    """(run folder with captures of greedy fp32 answers, their prompts by id)."""
    return captured_by(target, prompts, tmp_path_factory.mktemp("run"))


def captured_by(target, prompts, run, temperature=0.0):
    budgets = [min(BUDGET, LONGEST - len(prompt)) for prompt in prompts]
    how = passes.Sampling(temperature, uniform_BS=torch.rand(len(prompts), BUDGET) if temperature else None)
    kept, finish = passes.answer(target, prompts, budgets, (1, 2, 3), torch.float32, how)
    rows = [
        store.RowInfo(f"p{i}", ("train", "valid")[i % 2], f"source {i % 4}", length, end, len(prompts[i]),
                      length - len(prompts[i]))
        for i, (length, end) in enumerate(zip(kept.lengths_B.tolist(), finish, strict=True))
    ]  # fmt: skip
    tensors = kept.flat()
    tensors["supervised"] = torch.cat([torch.arange(row.tokens) >= row.first for row in rows])
    store.write_unit(run / "captures", "captures", 0, rows, tensors, norm="post_norm", taps=[1, 2, 3], dtype="float32",
                     hidden=target.hidden_size, vocab=target.vocab_size)  # fmt: skip
    store.write_index(run / "captures", "captures", 1)
    rule = {"backend": "local", "temperature": temperature, "max_new_tokens": BUDGET}
    tell(run, "responses", {"target": {"dtype": "float32"}, "max_length": LONGEST, "responses": rule})
    tell(run, "captures", {"target": {"dtype": "float32"}, "dtype": "float32"})
    return run, {row.id: prompts[i] for i, row in enumerate(rows)}


def tell(run, stage, made_from):
    """A manifest of that stage."""
    (run / stage).mkdir(exist_ok=True)
    manifest = Manifest(run / stage)
    manifest.data = {"made_from": made_from}
    manifest.finish({})


def made_from(run, stage):
    return Manifest(run / stage).data["made_from"]


@pytest.fixture(scope="module")
def trained(target, make, captured):
    """A head that has seen the captured answers, so that chains of several tokens are accepted."""
    head = make[1](target).train().requires_grad_(True)
    head.attach(target.embed.weight, target.lm_head.weight)
    read = store.CaptureStore(captured[0] / "captures")
    batch = collate([read.read(row) for row in read.rows], [row.id for row in read.rows])
    head.config.unroll = 4
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(50):
        head(batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head.eval().requires_grad_(False)


OTHERS = {
    "eagle": {"unroll": 1}, "medusa": {"unroll": 6, "freeze_lm_head": True}, "peagle": {"unroll": 6, "layers": 2},
    "mtp": {"unroll": 4, "init_from": "scratch"},
}  # fmt: skip


def head_of(kind, target, captured, trained):
    """A head of that type that the captured answers have been shown to."""
    if kind == "eagle3":
        return trained
    recipe, read = RecipeConfig(), store.CaptureStore(captured[0] / "captures")
    vars(recipe.head).update(OTHERS[kind] | {"type": kind, "draft_vocab": "full", "taps": [1, 2, 3]})
    parts = TargetParts(
        target.embed.weight, target.lm_head.weight, target.norm.weight, target.config, target.rope(), target.eos_ids
    )
    batch = collate([read.read(row) for row in read.rows], [row.id for row in read.rows])
    counts = torch.bincount(batch.ids_N.long(), minlength=target.vocab_size)
    head = new_head(recipe, parts, counts, counts, batch).train()
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(40):
        head(batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head.eval().requires_grad_(False)


def measured(head, run, ks, dtype="float32", limit=None):
    return offline.measure("head", head, store.CaptureStore(run / "captures"), run, ks, dtype, limit)


@pytest.mark.parametrize("kind", ["eagle3", *OTHERS])
def test_offline_counts_are_those_of_the_live_decoder_step_by_step(kind, captured, trained, target):
    run, prompts = captured
    head = head_of(kind, target, captured, trained)
    results = measured(head, run, KS)
    finishes, budgets = set(), {}
    for name, prompt in prompts.items():
        budgets.setdefault(min(BUDGET, LONGEST - len(prompt)), []).append(name)
    assert len(budgets) > 1
    for k in KS:
        counted = {row["id"]: row for r in results if r["k"] == k and r["source"] is None for row in r["per_prompt"]}
        assert counted.keys() == prompts.keys()
        for budget, names in budgets.items():
            asked = [prompts[name] for name in names]
            answers = decode(target, HeadDrafter(head, Sampling()), asked, k=k, max_new_tokens=budget)
            for name, answer in zip(names, answers, strict=True):
                live = [(step.drafted, step.accepted) for step in answer.steps]
                assert list(zip(counted[name]["drafted"], counted[name]["accepted"], strict=True)) == live, (name, k)
                finishes.add(answer.finish)
    deep = [a for r in results if r["k"] == 6 for row in r["per_prompt"] for a in row["accepted"]]
    assert finishes == {"stop", "length"} and max(deep) >= 3, "the test must see end tokens, budgets and long chains"
    assert all(r["exact"] and r["tau"] == pytest.approx(1 + r["accepted"] / r["steps"]) for r in results)


def test_a_store_whose_choices_are_off_by_one_does_not_give_the_live_counts(captured, trained):
    run, _ = captured
    read = store.CaptureStore(run / "captures")
    row = max(read.rows, key=lambda row: row.supervised)
    whole = read.read(row)
    drafts, _ = offline._drafts(trained, whole, 4)
    right = offline.steps_of(row, whole, drafts, 4, (BUDGET, LONGEST))
    assert offline.steps_of(row, whole, drafts.roll(1, 0), 4, (BUDGET, LONGEST)) != right


def test_results_are_per_split_and_source_and_a_limit_is_per_split(captured, trained):
    results = measured(trained, captured[0], [3])
    found = {(r["split"], r["source"]): r for r in results}
    assert set(found) == {(split, source) for split, own in (("train", (0, 2)), ("valid", (1, 3)))
                          for source in (None, *(f"source {i}" for i in own))}  # fmt: skip
    for split in ("train", "valid"):
        parts = [r for r in results if r["split"] == split and r["source"]]
        assert found[split, None]["accepted"] == sum(r["accepted"] for r in parts)
    assert [r["prompts"] for r in measured(trained, captured[0], [3], limit=2) if r["source"] is None] == [2, 2]


@pytest.mark.parametrize("stage, key, value, said", [
    ("responses", "target", {"dtype": "bfloat16"}, "the answers were made in bfloat16, the decoder runs in float32"),
    ("captures", "target", {"dtype": "bfloat16"}, "the states were computed in bfloat16"),
    ("captures", "dtype", "bfloat16", "the states are stored in bfloat16"),
    ("responses", "responses", {"backend": "given", "temperature": 0}, "not known to be the target's own"),
    ("responses", "responses", {"backend": "local", "temperature": 0.7, "max_new_tokens": 9}, "temperature 0.7"),
])  # fmt: skip
def test_what_is_not_exact_is_never_called_tau(stage, key, value, said, captured, trained, tmp_path):
    for name in ("responses", "captures"):
        tell(tmp_path, name, made_from(captured[0], name) | ({key: value} if name == stage else {}))
    results = offline.measure("head", trained, store.CaptureStore(captured[0] / "captures"), tmp_path, [3], "float32")
    for result in results:
        assert not result["exact"] and result["tau"] is None and "alpha" not in result
        assert said in result["why_not_exact"][0]
        assert result["agreement_with_stored_text"]["tokens_per_step"] >= 1
    text = offline.table({"results": results})
    assert "agreement" in text and "τ  " not in text and said in text


def test_sampled_answers_are_found_out_by_their_tokens_too(target, prompts, captured, trained, tmp_path):
    run, _ = captured_by(target, prompts, tmp_path, temperature=1.5)
    tell(run, "responses", made_from(captured[0], "responses"))  # says greedy
    (why,) = measured(trained, run, [2])[0]["why_not_exact"]
    assert "not the target's first choice" in why


def test_a_head_of_another_target_or_with_other_taps_is_refused(captured, target, make):
    with pytest.raises(offline.OfflineError, match=r"reads taps \[1, 2\]; the captures in .* have \[1, 2, 3\]"):
        measured(make[1](target, taps=(1, 2)), captured[0], [2])
    other, _ = make[0](vocab=90)
    with pytest.raises(offline.OfflineError, match="90 tokens"):
        measured(make[1](other), captured[0], [2])


def test_it_is_much_faster_than_decoding(captured, trained, target):
    run, prompts = captured
    began = time.perf_counter()
    for prompt in prompts.values():
        decode(target, HeadDrafter(trained, Sampling()), [prompt], k=4, max_new_tokens=15)
    live = time.perf_counter() - began
    began = time.perf_counter()
    measured(trained, run, [4])
    assert time.perf_counter() - began < live / 2
