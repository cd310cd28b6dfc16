"""On an NVIDIA GPU: the decoder's kernels, its CUDA graphs, its waits, its output and its speed.

The cases of the kernels are those of the tests without a GPU, with bfloat16 added; the tiny targets are theirs as well.
"""

from __future__ import annotations

import importlib.util
import logging
import time
import warnings
from pathlib import Path

import pytest
import torch

from headtrain.cache import KVCache
from headtrain.eval.decoder import decode as decoding
from headtrain.eval.decoder import graphs, kernels
from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters import Drafting, make_drafter
from headtrain.eval.decoder.sampling import Sampling, probabilities
from headtrain.eval.decoder.verify import greedy_tree, sampled_tree
from headtrain.tree import DraftTree

DEVICE, NEW = "cuda", 40
pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
]  # fmt: skip


def load(path: str):
    spec = importlib.util.spec_from_file_location(f"headtrain_{Path(path).stem}", Path(__file__).parent.parent / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


toys, cases = load("eval/conftest.py"), load("eval/decoder/test_kernels.py")


@pytest.fixture(autouse=True)
def exact_float32():
    """No TF32: tokens are compared."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def moved(x):
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


def on_gpu(family: str = "llama", **more):
    """(target, head, the same weights in transformers' own model), all on the GPU."""
    target, theirs = toys.build_target(family, **more)
    head = toys.build_head(target, draft_vocab=40)
    target.model.to(DEVICE)
    head.to(DEVICE).attach(target.embed.weight)
    return target, head, theirs.to(DEVICE)


def generated(model, prompt, new=NEW):
    row = torch.tensor([prompt], device=DEVICE)
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return model.generate(row, attention_mask=torch.ones_like(row), **options)[0, len(prompt) :].tolist()


def some_prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(6, toys.VOCAB, (n,), generator=generator).tolist() for n in (3, 9, 17, 1, 30, 8, 12, 5)]


class Perfect(toys.TreeOracle):
    """A tree that holds the continuation, among wrong siblings."""

    def propose(self, k, uniform_BN=None):
        tree = super().propose(k)
        return DraftTree(*map(moved, (tree.tokens, tree.parents, tree.counts)), chain_shaped=False)


# ------------------------------------------------------------------------------------------------- kernels

@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", cases.ATTENTION)
def test_tree_attention_is_the_softmax_written_out(name, dtype):
    from headtrain.eval.decoder.kernels.triton_attention import tree_attention

    q, k, v, mask, scale, softcap, sinks, splits = cases.attention_case(name)
    q, k, v, sinks = (x if x is None else x.to(dtype) for x in (q, k, v, sinks))
    mask = torch.where(mask < -1e4, torch.finfo(dtype).min, 0).to(dtype)
    expected = cases.dense(q, k, v, mask, scale, softcap, sinks, splits)
    close = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for parts in (splits, None):
        found = tree_attention(*map(moved, (q, k, v, mask, scale, softcap, sinks, parts)))
        torch.testing.assert_close(found.cpu().double(), expected, rtol=close, atol=close)


def test_acceptance_is_that_of_the_plain_rules():
    for seed in range(40):
        logits, tree, q, accept, bonus = cases.accept_case(seed, drawn=seed % 2 == 0)
        tree.q = q
        there = DraftTree(*map(moved, (*cases.nodes(tree), q)))
        for sampling in (Sampling(), Sampling(0.8), Sampling(0.8, top_k=5)):
            if sampling.greedy:
                expected = greedy_tree(logits.argmax(-1), *cases.nodes(tree))
            else:
                expected = sampled_tree(probabilities(logits, sampling), *cases.nodes(tree), q, accept, bonus)
            found = kernels.accept(moved(logits), there, sampling, moved(accept), moved(bonus))
            for name, value in vars(expected).items():
                assert getattr(found, name).tolist() == value.tolist(), (seed, sampling, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary_is_drawn_from_as_the_plain_rule_does(dtype):
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = (4 * torch.randn(64, 1, 128256, device=DEVICE, generator=generator)).to(dtype)
    bonus = torch.rand(64, device=DEVICE, generator=generator, dtype=torch.float64)
    nothing = DraftTree.chain(torch.empty(64, 0, dtype=torch.long, device=DEVICE))
    found = kernels.accept(logits, nothing, Sampling(0.7), bonus[:, None][:, :0], bonus).bonus_B
    cumulated = probabilities(logits[:, 0], Sampling(0.7)).double().cumsum(-1)
    below = cumulated.gather(1, (found - 1).clamp_min(0)[:, None])[:, 0] * (found > 0)
    assert ((below - 1e-5 <= bonus) & (bonus <= cumulated.gather(1, found[:, None])[:, 0] + 1e-5)).all()
    greedy = kernels.accept(logits, nothing, Sampling()).bonus_B
    assert torch.equal(logits[:, 0].gather(1, greedy[:, None])[:, 0], logits[:, 0].amax(1))


def test_compaction_and_the_likeliest_tokens_are_those_of_a_loop():
    cache, (path, first) = KVCache(3, 20), cases.PATHS
    before = [torch.randn(3, 2, 20, 24 - 8 * (i % 2)) for i in range(4)]
    cache.keys, cache.values = ({i: moved(before[2 * i + j].clone()) for i in range(2)} for j in range(2))
    kernels.compact(cache, moved(first), moved(path))
    for i, expected in enumerate(cases.loop(before, first, path)):
        assert torch.equal((cache.keys, cache.values)[i % 2][i // 2].cpu(), expected)
    logits = torch.randn(7, 32000, device=DEVICE, dtype=torch.bfloat16)
    logp, draft, target = kernels.draft_topk(logits, 10, moved(torch.arange(32000) * 2))
    torch.testing.assert_close(logp, logits.float().log_softmax(-1).topk(10).values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits.float().log_softmax(-1).gather(1, draft), logp, rtol=1e-4, atol=1e-4)
    assert torch.equal(target, 3 * draft) and all(len(set(row)) == 10 for row in draft.tolist())


# ------------------------------------------------------------------------------------------------- the whole

@pytest.fixture
def recorded(monkeypatch):
    """How many graphs were recorded, as the length of a list."""
    made, record = [], graphs._record
    monkeypatch.setattr(graphs, "_record", lambda *given: made.append(1) or record(*given))
    return made


def drafters(target, head, prompts, reference):
    yield "plain", make_drafter("none"), 0
    for name, tree in [("ngram", "chain"), ("head", "chain"), ("head", "4x16"), ("head+ngram-tree", "4x16")]:
        yield f"{name} {tree}", make_drafter(name, head, drafting=Drafting(tree=tree)), 4
    yield "layer_skip", make_drafter("layer_skip", drafting=Drafting(skip_from=2), target=target), 4
    yield "perfect tree", Perfect(prompts, reference), 4


WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


@pytest.mark.parametrize("record", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("family, more", [
    ("llama", {}), ("qwen3", {}), ("gemma2", WINDOW | {"attn_logit_softcapping": 5.0}), ("gemma3_text", WINDOW),
    ("gpt_oss", WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
])  # fmt: skip
def test_greedy_output_equals_transformers_generate(family, more, record, recorded, monkeypatch, caplog):
    if not record:
        monkeypatch.setattr(decoding, "Graphs", lambda device, **_: graphs.Graphs(device, record=False))
    target, head, theirs = on_gpu(family, **more)
    prompts = some_prompts()
    reference = [generated(theirs, prompt) for prompt in prompts]
    with caplog.at_level(logging.WARNING):
        for name, drafter, k in drafters(target, head, prompts, reference):
            for batch in (1, 8):
                answers = decode(target, drafter, prompts, k=k, max_new_tokens=NEW, batch=batch)
                assert [a.ids for a in answers] == reference, (name, batch)
    if record and family == "llama":  # a mixture of experts may not be recordable: it says so and runs as it is
        assert recorded and "without a CUDA graph" not in caplog.text
    if not record and family == "llama":
        assert len(recorded) == 0


@pytest.mark.parametrize("tree", ["chain", "4x16", "iid-2x8"])
def test_sampled_output_is_that_of_the_cpu_with_the_same_numbers(tree):
    prompts, answers = some_prompts(), []
    for device in ("cpu", DEVICE):
        target, head, _ = on_gpu()
        target.model.to(device)
        head.to(device).attach(target.embed.weight)
        drafter = make_drafter("head", head, Sampling(0.8), Drafting(tree=tree))
        answers.append(decode(target, drafter, prompts, k=4, max_new_tokens=NEW, temperature=0.8, seed=3))
    same = sum(a.ids == b.ids for a, b in zip(*answers, strict=True))
    assert same >= len(prompts) - 1  # a number may fall within rounding of a threshold


@pytest.mark.parametrize("name, tree", [("none", "chain"), ("head", "chain"), ("head", "4x16")])
def test_a_step_waits_for_the_device_once(name, tree):
    target, head, _ = on_gpu()
    target.model.generation_config.eos_token_id = None  # every answer is of full length
    target.tokenizer.eos_token_id = None
    drafter = make_drafter(name, head, drafting=Drafting(tree=tree))

    def waits(new):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                answer = decode(target, drafter, some_prompts()[:1], k=4, max_new_tokens=new)[0]
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return len(answer.steps), sum("synchroniz" in str(w.message) for w in caught)

    waits(20)  # compiles
    (few, first), (many, second) = waits(20), waits(120)
    assert many > few and second - first <= many - few


# ------------------------------------------------------------------------------------------------- speed

def test_speed_is_printed(capsys, monkeypatch):
    from transformers import AutoConfig, AutoModelForCausalLM

    from headtrain.target import Target, _register_attention

    _register_attention()
    config = AutoConfig.for_model(
        "llama", vocab_size=49152, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=4096, eos_token_id=None,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="headtrain").eval()
    toys.TinyTokenizer.eos_token_id = None
    target, prompt, new = Target(model, toys.TinyTokenizer(), "a billion weights"), list(range(7, 107)), 200

    def timed(run):
        run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        answer = run()
        torch.cuda.synchronize()
        return new / (time.perf_counter() - began), answer

    lines = [f"transformers.generate, bf16, batch 1: {timed(lambda: generated(model, prompt, new))[0]:.0f} tokens/s"]
    plain = None
    for record in (False, True):
        monkeypatch.setattr(decoding, "Graphs", lambda device, record=record, **_: graphs.Graphs(device, record=record))
        speed, answer = timed(lambda: decode(target, make_drafter("none"), [prompt], k=0, max_new_tokens=new))
        plain = plain or answer[0].ids
        perfect = Perfect([prompt], [plain])
        drafted, answer = timed(lambda p=perfect: decode(target, p, [prompt], k=5, max_new_tokens=new))
        tau = sum(s.accepted + 1 for s in answer[0].steps) / len(answer[0].steps)
        lines.append(f"graphs {record}: plain {speed:.0f} tokens/s, a tree with the answer {drafted:.0f} (τ {tau:.2f})")
    with capsys.disabled():
        print("", *lines, sep="\n")
