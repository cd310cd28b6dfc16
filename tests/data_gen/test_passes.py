import pytest
import torch

from headtrain.data_gen import passes
from headtrain.data_gen.respond import uniforms

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17], [20], [21, 22, 23], [5, 5, 5, 5, 5, 5]]
TAPS = (1, 2, 4)


def answers(target, prompts, budgets, how=None, dtype=torch.float32):
    kept, finish = passes.answer(target, prompts, budgets, TAPS, dtype, how or passes.Sampling())
    return [kept.ids_BS[n, :length].tolist() for n, length in enumerate(kept.lengths_B.tolist())], finish, kept


@pytest.fixture
def stopping_target(tiny_target):
    """The tiny target with the tokens it likes most as end tokens, so that rows of a batch end at different steps."""
    ids, *_ = answers(tiny_target, PROMPTS, [30] * 6)
    settings = tiny_target.model.generation_config
    before, settings.eos_token_id = settings.eos_token_id, [ids[0][7], ids[1][5], ids[4][9]]
    yield tiny_target
    settings.eos_token_id = before


def test_greedy_ids_equal_generate(stopping_target):
    ids, finish, _ = answers(stopping_target, PROMPTS, [30] * 6)
    ends = sorted(stopping_target.eos_ids)
    for prompt, row, end in zip(PROMPTS, ids, finish, strict=True):
        theirs = stopping_target.model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=30, eos_token_id=ends, pad_token_id=0
        )[0].tolist()
        assert row == theirs
        assert end == ("stop" if row[-1] in ends else "length")
    assert len({len(row) - len(prompt) for row, prompt in zip(ids, PROMPTS, strict=True)}) >= 3  # ragged ends


def test_states_of_the_decode_pass_equal_a_forward_over_the_whole_row(stopping_target):
    ids, _, kept = answers(stopping_target, PROMPTS, [30, 3, 12, 30, 1, 30])
    flat, start = kept.flat(), 0
    for row in ids:
        part = {name: tensor[start : start + len(row)] for name, tensor in flat.items()}
        start += len(row)
        tokens = torch.tensor([row])
        with torch.inference_mode():
            out = stopping_target.model(tokens, output_hidden_states=True)
        logits = out.logits[0].float()
        states = torch.stack([stopping_target.forward(tokens, taps=(k,)).taps_BLAH[0, :, 0] for k in TAPS], 1)
        torch.testing.assert_close(states[:, 0], out.hidden_states[1][0], atol=1e-4, rtol=1e-4)  # after one block
        assert part["ids"].tolist() == row
        torch.testing.assert_close(part["taps"][:-1], states[:-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(part["last"][:-1], out.hidden_states[-1][0, :-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(part["logsumexp"][:-1], logits.logsumexp(-1)[:-1], atol=1e-4, rtol=1e-4)
        assert part["argmax"][:-1].tolist() == logits.argmax(-1)[:-1].tolist()
        assert not any(part[name][-1].any() for name in ("taps", "last", "argmax", "logsumexp"))
    assert start == len(flat["ids"])


@pytest.mark.parametrize(
    ("prompts", "size"),
    [([[1, 2, 3], [1, 2, 4, 5]], 2), ([[1, 2], [1, 2, 3]], 1), ([[1, 2]], 0), ([[1], [2]], 0), ([[3, 1], [3, 1]], 1)],
)
def test_the_shared_prefix_leaves_every_prompt_a_token_of_its_own(prompts, size):
    assert passes.shared_prefix(prompts) == size


def test_a_shared_prefix_is_run_once_and_changes_nothing(tiny_target, monkeypatch):
    prefix, runs, forward = list(range(30, 50)), [], tiny_target.forward
    prompts = [prefix + prompt for prompt in PROMPTS]
    monkeypatch.setattr(tiny_target, "forward", lambda t, *a, **k: runs.append(tuple(t.shape)) or forward(t, *a, **k))
    ids, _, kept = answers(tiny_target, prompts, [5] * 6)
    assert runs[:3] == [(1, 20), (6, 7), (6, 1)]
    runs.clear()
    monkeypatch.setattr(passes, "PREFILL_TOKENS", 10)
    assert answers(tiny_target, prompts, [5] * 6)[0] == ids
    assert runs[:6] == [(1, 20), (2, 4), (1, 7), (2, 3), (1, 6), (6, 1)]  # 4 + 2 of 10, 7, 1 + 3, 6 tokens of their own
    monkeypatch.setattr(passes, "shared_prefix", lambda prompts: 0)
    plain, _, other = answers(tiny_target, prompts, [5] * 6)
    assert ids == plain
    shared, whole = kept.flat(), other.flat()
    assert torch.equal(shared["argmax"], whole["argmax"])
    for name in ("taps", "last", "logsumexp"):
        torch.testing.assert_close(shared[name], whole[name], atol=1e-4, rtol=1e-4)


def test_a_budget_is_never_exceeded_and_the_end_token_is_kept(stopping_target):
    budgets = [1, 2, 30, 4, 30, 7]
    ids, finish, _ = answers(stopping_target, PROMPTS, budgets)
    for prompt, row, budget, end in zip(PROMPTS, ids, budgets, finish, strict=True):
        new = row[len(prompt) :]
        assert 1 <= len(new) <= budget and row[: len(prompt)] == prompt
        assert (end == "stop") == (new[-1] in stopping_target.eos_ids)
        assert not set(new[:-1]) & stopping_target.eos_ids


def test_reading_rows_gives_the_states_of_answering(tiny_target):
    ids, _, kept = answers(tiny_target, PROMPTS, [12] * 6)
    decoded = kept.flat()
    read = passes.read_rows(tiny_target, [torch.tensor(row) for row in ids], TAPS, torch.float32).flat()
    assert torch.equal(read["ids"], decoded["ids"]) and torch.equal(read["argmax"], decoded["argmax"])
    for name in ("taps", "last", "logsumexp"):
        torch.testing.assert_close(read[name], decoded[name], atol=1e-4, rtol=1e-4)


def test_logits_in_small_chunks_give_the_same_choices(tiny_target, monkeypatch):
    states = torch.randn(37, tiny_target.hidden_size)
    whole = passes.choices(tiny_target, states)
    monkeypatch.setattr(passes, "LOGITS_BYTES", 4 * tiny_target.vocab_size * 5)
    for one, other in zip(whole, passes.choices(tiny_target, states), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.7), (2.0, 0.9), (1.0, 0.05)])
def test_samples_follow_the_tempered_and_cut_distribution(temperature, top_p):
    logits = torch.tensor([2.0, 1.0, -1.0, 0.5, 2.0, -30.0])
    probs = torch.softmax(logits.double() / temperature, 0)
    kept, mass = torch.zeros(6, dtype=torch.double), 0.0
    for token in sorted(range(6), key=lambda t: -probs[t]):  # the smallest set of mass >= top_p, by hand
        if mass < top_p:
            kept[token] = probs[token]
            mass += float(probs[token])
    grid = (torch.arange(20000) + 0.5) / 20000  # an even grid in place of random numbers: no noise
    tokens = passes.sample(logits.expand(20000, 6), temperature, top_p, grid)
    found = torch.bincount(tokens, minlength=6).double() / 20000
    if top_p == 0.05:
        assert found.max() == 1.0 and int(found.argmax()) in (0, 4)  # a tie: either one, but always the same
    else:
        torch.testing.assert_close(found, kept / kept.sum(), atol=2e-4, rtol=0)


def test_the_largest_random_number_never_picks_a_token_without_mass():
    logits = torch.tensor([[0.0, 0.0, -200.0, -float("inf")]]).expand(2, 4)
    uniform = torch.tensor([0.0, 1.0 - 2**-24])
    assert passes.sample(logits, 0.2, 1.0, uniform).tolist() == [0, 1]


def test_random_numbers_belong_to_the_prompt_not_to_the_batch():
    both = uniforms(3, ["aa", "bb"], 8)
    assert torch.equal(uniforms(3, ["bb", "cc"], 8)[0], both[1])
    assert not torch.equal(both[0], both[1]) and not torch.equal(uniforms(4, ["aa"], 8)[0], both[0])


def test_sampled_ids_are_the_same_alone_and_in_a_batch(tiny_target):
    def sampled(prompts, names):
        how = passes.Sampling(0.8, 0.9, uniforms(0, names, 12))
        return answers(tiny_target, prompts, [12] * len(prompts), how)[0]

    together = sampled(PROMPTS, list("abcdef"))
    alone = [sampled([prompt], [name])[0] for prompt, name in zip(PROMPTS, "abcdef", strict=True)]
    assert together == alone
    assert together != answers(tiny_target, PROMPTS, [12] * 6)[0]
