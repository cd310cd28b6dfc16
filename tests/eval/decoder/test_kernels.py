"""The decoder's Triton kernels without a GPU: interpreted against torch and formulas, and compiled for several GPUs.
Both in children, so that no other test sees an interpreting Triton. Then the recording of CUDA graphs, without CUDA."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys

import pytest
import torch

from headtrain import attention
from headtrain.cache import KVCache
from headtrain.eval.decoder import graphs, kernels
from headtrain.eval.decoder.sampling import Sampling, adjust, probabilities
from headtrain.eval.decoder.verify import greedy_tree, sampled_tree
from headtrain.tree import DraftTree

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

INTERPRETED = """
import sys, torch
from headtrain.eval.decoder.kernels import triton_accept as accept, triton_attention as attention
from headtrain.eval.decoder.kernels import triton_compact as compact, triton_topk as topk

def moved(tensors, first, path):
    compact.compact(tensors, first, path)
    return tensors

accept.BLOCK = topk.BLOCK = 32  # several blocks for a small vocabulary
kinds = {"attention": attention.tree_attention, "greedy": accept.greedy, "sampled": accept.sampled,
         "compact": moved, "topk": topk.draft_topk}
cases = torch.load(sys.argv[1])
torch.save({name: kinds[kind](*arguments) for name, (kind, arguments) in cases.items()}, sys.argv[2])
"""

# Triton believes in a GPU that it need not have: kernels are compiled and checked for size, then not run.
COMPILED = """
import json, sys, torch, triton
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from headtrain.eval.decoder.kernels import triton_accept as accept, triton_attention as attention
from headtrain.eval.decoder.kernels import triton_compact as compact, triton_topk as topk

launched = []
gpu = SimpleNamespace(number=-1)
triton.runtime.driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", gpu.capability, 32),
    get_current_device=lambda: gpu.number,
    get_current_stream=lambda device: 0,
    utils=SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": gpu.shared * 1024},
        load_binary=lambda name, kernel, shared, device: (1, 1, 0, 0, 1024),
    ),
    launcher_cls=lambda source, metadata: lambda *grid: launched.append(
        [metadata.name, metadata.target.arch, metadata.shared]),
))
tokens, parents, counts = torch.zeros(2, 16, dtype=torch.long), torch.arange(-1, 15), torch.tensor([16, 3])
logits, uniform = torch.zeros(2, 17, 50257, dtype=torch.bfloat16), torch.zeros(2, 16, dtype=torch.float64)
for gpu.capability, gpu.shared, shapes in json.loads(sys.argv[1]):
    gpu.number += 1
    for dtype, d in shapes:
        new = lambda *shape: torch.zeros(*shape, dtype=getattr(torch, dtype))
        k = new(2, 2, 300, d)
        attention.tree_attention(new(2, 8, 17, d), k, k, new(2, 1, 17, 300), 0.1, 30.0, new(8), 4)
    accept.greedy(logits, tokens, parents, counts)
    accept.sampled(logits, tokens, parents, counts, torch.zeros(2, 16, 50257), uniform, uniform[:, 0], 0.7)
    accept.sampled(logits.float(), tokens, parents, counts, None, uniform, uniform[:, 0], None)
    compact.compact([k, k], counts, tokens)
    topk.draft_topk(logits[0], 10, torch.zeros(50257, dtype=torch.long))
print(json.dumps(launched))
"""


def child(code: str, *arguments, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# ------------------------------------------------------------------------------------------------- inputs

# B, L, S, G, J, D, window, softcap, sinks, splits, dtype
ATTENTION = {
    "one token, no group": (1, 1, 37, 1, 1, 16, None, None, False, 1, torch.float32),
    "a tree, groups, splits": (2, 7, 130, 3, 2, 24, None, None, False, 4, torch.float32),
    "window": (2, 5, 140, 2, 2, 16, 9, None, False, 2, torch.float32),
    "softcap and sinks": (2, 6, 70, 4, 1, 32, None, 2.0, True, 2, torch.float32),
    "everything, float16, two tiles": (1, 20, 100, 4, 2, 16, 20, 5.0, True, 2, torch.float16),
    # The interpreter has no bfloat16.
    "wide head": (1, 4, 40, 2, 1, 256, None, None, True, 1, torch.float32),
}  # fmt: skip


def some_tree(batch, nodes, vocab, seed=0):
    """Random trees with few different tokens, so that siblings and matches are many; rows of different sizes."""
    g = torch.Generator().manual_seed(seed)
    parents = torch.stack([torch.cat([torch.randint(-1, i, (1,), generator=g) for i in range(nodes)])] * batch)
    for b in range(1, batch):
        parents[b] = torch.tensor([int(torch.randint(-1, i, (), generator=g)) for i in range(nodes)])
    tokens = torch.randint(vocab, (batch, nodes), generator=g)
    return DraftTree(tokens, parents, torch.randint(1, nodes + 1, (batch, 2), generator=g)[:, 0])


def attention_case(name):
    b, n, s, groups, j, d, window, softcap, sinks, splits, dtype = ATTENTION[name]
    g = torch.Generator().manual_seed(len(name))
    new = lambda *shape: torch.randn(*shape, generator=g).to(dtype)  # noqa: E731
    q = new(b, n, groups * j, d).transpose(1, 2)  # the layout of a projection
    store = new(2, b, j, s + 5, d)[:, :, :, :s]  # a window into a longer cache
    length = torch.randint(0, s - n + 1, (b,), generator=g)  # true tokens; the new ones lie behind them
    tree, position, seen = some_tree(b, n, 2), torch.arange(s).repeat(b, 1), torch.zeros(b, n, s, dtype=torch.bool)
    for row, first in enumerate(length.tolist()):
        seen[row, :, :first] = True
        seen[row, :, first : first + n] = tree.ancestors()[row]
        position[row, first : first + n] = first + tree.depths()[row]
    if window:  # counted in positions: nodes of one depth stand at the same one
        seen &= position[:, None] > (length[:, None] + tree.depths())[..., None] - window
    mask = torch.zeros(b, 1, n, s, dtype=dtype).masked_fill(~seen[:, None], torch.finfo(dtype).min)
    return q, store[0], store[1], mask, d**-0.5, softcap, new(groups * j) if sinks else None, splits


def dense(q, k, v, mask, scale, softcap, sinks, _):
    """softmax over all keys and the sink, written out in float64; [B, L, H, D]."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    scores = torch.einsum("bhld,bhsd->bhls", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.where(mask < -1e4, 0, scores.exp())
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[None, :, None, None]
    return torch.einsum("bhls,bhsd->blhd", weights / total, v)


def accept_case(seed, drawn):
    """(logits, tree, q, accept numbers, bonus numbers): 4 requests of up to 9 nodes, 77 tokens."""
    g = torch.Generator().manual_seed(seed)
    b, n, v = 4, 9, 77
    tree = some_tree(b, n, 3, seed)
    logits = torch.randn(b, n + 1, v, generator=g)
    logits[..., :3] += 3  # the drafts are likely
    logits[..., 60] = logits[..., :60].amax(-1)  # in a later block: of equals the first is the argmax
    q = (torch.randn(b, n, v, generator=g) + 2 * logits[:, :1]).softmax(-1) if drawn else None
    uniform = torch.rand(b, n + 1, generator=g, dtype=torch.float64)
    return logits, tree, q, uniform[:, :n], uniform[:, n]


def nodes(tree):
    return tree.tokens, tree.parents, tree.counts


SEEDS = range(6)
# as the decoder has them: slices of wider tensors
PATHS = (
    torch.tensor([[0, 3, 4, 9, 9], [2, 5, -1, -1, 9], [-1] * 5])[:, :4],
    torch.tensor([[3, 1], [0, 1], [7, 1]])[:, 0],
)


def cases() -> dict[str, tuple]:
    out = {f"attention {name}": ("attention", attention_case(name)) for name in ATTENTION}
    for seed in SEEDS:
        logits, tree, q, accept, bonus = accept_case(seed, drawn=seed % 2 == 0)
        out[f"greedy {seed}"] = "greedy", (logits, *nodes(tree))
        out[f"sampled {seed}"] = "sampled", (logits, *nodes(tree), q, accept, bonus, 0.8)
        p = probabilities(logits, Sampling(0.8, top_k=5))
        out[f"cut {seed}"] = "sampled", (p, *nodes(tree), q, accept, bonus, None)
    logits, _, _, _, bonus = accept_case(0, drawn=False)
    none = torch.empty(4, 0, dtype=torch.long)
    nothing = logits[:, :1].half(), none, none[0], torch.zeros(4, dtype=torch.long)
    out["greedy nothing"] = "greedy", nothing
    out["sampled nothing"] = "sampled", (*nothing, None, none.double(), bonus, 1.0)
    path, first = PATHS
    out["compact"] = "compact", ([torch.randn(3, 2, 20, 24) for _ in range(3)], first, path)
    rows = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).half()
    rows[1, ::7] = rows[1].max()  # equal logits: the lower id first
    rows[2, 5:] = -float("inf")
    out["topk"] = "topk", (rows, 9, torch.arange(100) * 2)
    out["argmax"] = "topk", (rows[:, ::2], 1, None)
    return out


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("triton")
    torch.manual_seed(0)
    given = cases()
    torch.save(given, folder / "in.pt")
    child(INTERPRETED, folder / "in.pt", folder / "out.pt", TRITON_INTERPRET="1")
    return given, torch.load(folder / "out.pt")


# ------------------------------------------------------------------------------------------------- interpreted

@triton
@pytest.mark.parametrize("name", ATTENTION)
def test_tree_attention_is_the_softmax_written_out(interpreted, name):
    case, found = attention_case(name), interpreted[1][f"attention {name}"]
    close = 1e-5 if found.dtype == torch.float32 else 4e-3
    assert found.dtype == case[0].dtype
    torch.testing.assert_close(found.double(), dense(*case), rtol=close, atol=close)
    plain, _ = attention.attention(None, *case[:4], scaling=case[4], softcap=case[5], s_aux=case[6])
    torch.testing.assert_close(found, plain, rtol=close, atol=close)


@triton
def test_accepted_paths_and_bonus_tokens_are_those_of_the_plain_rules(interpreted):
    lengths = set()
    for seed in SEEDS:
        logits, tree, q, accept, bonus = accept_case(seed, drawn=seed % 2 == 0)
        rules = {
            "greedy": greedy_tree(logits.argmax(-1), *nodes(tree)),
            "sampled": sampled_tree(probabilities(logits, Sampling(0.8)), *nodes(tree), q, accept, bonus),
            "cut": sampled_tree(probabilities(logits, Sampling(0.8, top_k=5)), *nodes(tree), q, accept, bonus),
        }
        for rule, verdict in rules.items():
            found = interpreted[1][f"{rule} {seed}"]
            expected = verdict.accepted_B, verdict.bonus_B, verdict.path_BD
            assert [x.tolist() for x in found] == [x.tolist() for x in expected], (rule, seed)
            lengths |= {(rule, n) for n in verdict.accepted_B.tolist()}
    assert lengths >= {(rule, n) for rule in ("greedy", "sampled", "cut") for n in range(3)}


@triton
def test_without_drafts_there_is_a_bonus_token_and_no_path(interpreted):
    given, found = interpreted
    logits, *_, bonus, _ = given["sampled nothing"][1]
    assert [x.tolist() for x in found["greedy nothing"]] == [[0] * 4, logits[:, 0].argmax(-1).tolist(), [[]] * 4]
    cumulated = logits[:, 0].double().softmax(-1).cumsum(-1)
    assert found["sampled nothing"][1].tolist() == (cumulated <= bonus[:, None]).sum(-1).tolist()


def loop(tensors, first, path):
    out = [x.clone() for x in tensors]
    for x, new in zip(tensors, out, strict=True):
        for b, row in enumerate(path.tolist()):
            for depth, node in enumerate(n for n in row if n >= 0):
                new[b, :, first[b] + depth] = x[b, :, first[b] + node]
    return out


@triton
def test_compaction_moves_every_accepted_slot_and_no_other(interpreted):
    arguments = interpreted[0]["compact"][1]
    for found, expected in zip(interpreted[1]["compact"], loop(*arguments), strict=True):
        assert torch.equal(found, expected)


@triton
def test_the_likeliest_draft_tokens_come_in_order_with_their_log_softmax(interpreted):
    for name in ("topk", "argmax"):
        logits, k, d2t = interpreted[0][name][1]
        logp, draft, target = interpreted[1][name]
        ranked = [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:k] for row in logits.tolist()]
        assert draft.tolist() == ranked
        assert target.tolist() == [[i if d2t is None else i + int(d2t[i]) for i in row] for row in ranked]
        torch.testing.assert_close(logp, logits.float().log_softmax(-1).gather(1, draft), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------- compiled

# compute capability, KiB of shared memory that a program may use, dtypes and head sizes of attention
GPUS = [(80, 163, [("float16", 64)]), (90, 227, [("bfloat16", 128)]), (100, 227, [("bfloat16", 128)])]
MORE = [
    (86, 99, [("float32", 64), ("float32", 128), ("float32", 256), ("bfloat16", 80), ("bfloat16", 256)]),
    (90, 227, [("float16", 64), ("float32", 128)]), (100, 227, [("float16", 64), ("float32", 128)]),
    (120, 99, [("bfloat16", 64), ("bfloat16", 128)]),
]  # fmt: skip


@triton
@pytest.mark.parametrize("gpus", [GPUS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["usual", "more"])
def test_the_kernels_compile_and_fit_a_gpu(tmp_path, gpus):
    launched = json.loads(child(COMPILED, json.dumps(gpus), TRITON_CACHE_DIR=str(tmp_path)))
    rest = ["_greedy", "_sampled", "_sampled", "_compact", "_blocks", "_merge"]
    names = [[gpu, name] for gpu, _, shapes in gpus for name in ["_attend", "_merge"] * len(shapes) + rest]
    assert [[gpu, name] for name, gpu, _ in launched] == names
    room = {gpu: 1024 * shared for gpu, shared, _ in gpus}
    assert all(used <= room[gpu] for _, gpu, used in launched)


# ------------------------------------------------------------------------------------------------- without a GPU

@pytest.mark.parametrize("sampling", [
    Sampling(), Sampling(0.8), Sampling(0.8, top_k=5), Sampling(0.8, repetition_penalty=2.0, logit_bias={1: 2.0}),
    Sampling(logit_bias={0: -1.0}),
], ids=str)  # fmt: skip
def test_on_a_cpu_acceptance_is_the_rule_of_the_temperature(sampling):
    logits, tree, q, accept, bonus = accept_case(0, drawn=not sampling.greedy)
    tree.q, seen = q, torch.arange(logits.shape[2]).expand(logits.shape) % 5 == 0
    if sampling.greedy:
        expected = greedy_tree(adjust(logits, sampling, seen).argmax(-1), *nodes(tree))
    else:
        expected = sampled_tree(probabilities(logits, sampling, seen), *nodes(tree), q, accept, bonus)
    found = kernels.accept(logits, tree, sampling, accept, bonus, seen)
    assert all(torch.equal(getattr(found, name), x) for name, x in vars(expected).items())


def test_on_a_cpu_compaction_and_the_likeliest_tokens_are_those_of_a_loop():
    cache, (path, first) = KVCache(3, 20), PATHS
    cache.keys = {layer: torch.randn(3, 2, 20, 24) for layer in range(2)}
    cache.values = {layer: torch.randn(3, 2, 20, 8) for layer in range(2)}  # heads of another size: their own launch
    expected = loop([*cache.keys.values(), *cache.values.values()], first, path)
    kernels.compact(cache, first, path)
    assert all(map(torch.equal, [*cache.keys.values(), *cache.values.values()], expected))
    logits = torch.randn(4, 50)
    logp, draft, target = kernels.draft_topk(logits, 3, torch.arange(50) * 2)
    assert draft.tolist() == [sorted(range(50), key=lambda i, row=row: -row[i])[:3] for row in logits.tolist()]
    assert torch.equal(target, 3 * draft)
    torch.testing.assert_close(logp, logits.log_softmax(-1).gather(1, draft))


def test_attention_that_the_kernel_does_not_take_goes_the_plain_way():
    q, k, mask = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 9, 16), torch.zeros(1, 1, 3, 9)
    wide, long = q.new_zeros(1, 4, 3, 272), q.new_zeros(1, 4, 129, 16)
    refused = [
        (q, k, k, None), (q, k, k, mask.expand(1, 4, 3, 9)), (long, k, k, q.new_zeros(1, 1, 129, 9)),
        (wide, k.new_zeros(1, 2, 9, 272), k, mask), (q, k, k[..., :8], mask), (q.half(), k, k, mask),
        (q, k.transpose(2, 3).contiguous().transpose(2, 3), k, mask),
    ]  # fmt: skip
    assert [kernels._attention(*case) for case in refused] == [None] * len(refused)


# ------------------------------------------------------------------------------------------------- CUDA graphs

@pytest.fixture
def recordings(monkeypatch):
    """The functions that were recorded, by a recorder that works as CUDA's does: fixed inputs, fixed outputs."""
    made = []

    def record(function, inputs):
        fixed = [None if x is None else x.clone() for x in inputs]
        outputs = function(*fixed)
        made.append(function)

        def replay(*inputs):
            for to, x in zip(fixed, inputs, strict=True):
                if x is not None:
                    to.copy_(x)
            return outputs.copy_(function(*fixed))

        return replay

    monkeypatch.setattr(graphs, "_record", record)
    return made


def double(x, y):
    return 2 * x if y is None else 2 * x + y


def test_a_function_is_recorded_once_per_key_and_shape_and_gives_the_same(recordings):
    many = graphs.Graphs(torch.device("cuda"))
    for _ in range(3):
        for key, width in (("a", 3), ("a", 4), ("b", 3)):
            for y in (None, torch.randn(width)):
                x = torch.randn(width)
                assert torch.equal(many.run(key, double, x, y), double(x, y))
    assert len(recordings) == 6
    many.clear()
    assert torch.equal(many.run("a", double, x, None), 2 * x) and len(recordings) == 6  # warms up anew


def test_the_graph_unused_for_longest_makes_room(recordings):
    few, x = graphs.Graphs(torch.device("cuda"), limit=2), torch.ones(2)
    for key in "aabbacca":
        few.run(key, double, x, None)
    assert len(recordings) == 3  # a, b, c: when c came, b went and a stayed
    few.run("b", double, x, None)
    few.run("b", double, x, None)
    assert len(recordings) == 4


def test_what_cannot_be_recorded_runs_as_it_is_and_the_reason_is_logged_once(monkeypatch, caplog):
    def refuse(*_):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "_record", refuse)
    plain, x = graphs.Graphs(torch.device("cuda")), torch.ones(2)
    with caplog.at_level(logging.WARNING):
        assert all(torch.equal(plain.run(("verify", 6), double, x, None), 2 * x) for _ in range(4))
    reason = "('verify', 6) runs without a CUDA graph: CUDA error: operation not permitted when stream is capturing"
    assert [r.getMessage() for r in caplog.records] == [reason]


def test_nothing_is_recorded_on_a_cpu_or_where_it_may_not_be(recordings):
    for off in (graphs.Graphs(torch.device("cpu")), graphs.Graphs(torch.device("cuda"), record=False)):
        assert [float(off.run("a", double, torch.ones(()), None)) for _ in range(3)] == [2.0] * 3
        assert off.bucket(300, 1000) == 300
    on = graphs.Graphs(torch.device("cuda"))
    assert [on.bucket(n, 1000) for n in (1, 256, 257, 900)] == [256, 256, 512, 1000]
    assert not recordings
