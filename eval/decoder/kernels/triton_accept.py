"""Acceptance as a Triton kernel: argmax or softmax, min(1, p/q), residual draw and the accepted path in one launch.

One program per request walks its tree from the root and reads the logits of the nodes it reaches only: those accepted
and the root. The rules are those of `verify.greedy_tree` and `verify.sampled_tree`, with the same uniform numbers; sums
over the vocabulary run in another order, so a number within rounding of a threshold may fall on its other side.
Shapes: B requests, N nodes, L = N + 1 positions (the root first), V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 16
NO_INDEX = tl.constexpr(2**31 - 1)


@triton.jit
def _at(x_N, node_N, node):
    """x_N[node] of values held in registers."""
    return tl.sum(tl.where(node_N == node, x_N, 0), 0)


@triton.jit
def _finish(accepted, bonus, path, b, nodes, node_N, parents_N, end, depth, token):
    """Stores a verdict: the path of `depth` nodes from the root to node `end`, -1 after it, and the bonus token."""
    path += b * nodes
    tl.store(path + node_N, tl.full(node_N.shape, -1, tl.int64), mask=(node_N >= depth) & (node_N < nodes))
    tl.store(accepted + b, depth)
    tl.store(bonus + b, token)
    at = end
    for up in range(depth):
        tl.store(path + depth - 1 - up, at)
        at = _at(parents_N, node_N, at)


@triton.jit
def _argmax(row, V: tl.constexpr, BLOCK: tl.constexpr):
    """Index of the largest of row[0 … V-1], the first of equals."""
    best, index = -float("inf"), 0
    for start in range(0, V, BLOCK):
        v_V = start + tl.arange(0, BLOCK)
        x_V = tl.load(row + v_V, mask=v_V < V, other=-float("inf")).to(tl.float32)
        top = tl.max(x_V, 0)
        at = tl.min(tl.where(x_V == top, v_V, NO_INDEX), 0)
        index = tl.where(top > best, at, index)
        best = tl.maximum(best, top)
    return index


@triton.jit(do_not_specialize=["nodes", "parents_b"])  # they change from step to step
def _greedy(
    logits, tokens, parents, counts, accepted, bonus, path, nodes, logits_b, logits_l, parents_b,
    V: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The deepest node whose path holds the argmax after each of its nodes; the first of equally deep ones."""
    b = tl.program_id(0).to(tl.int64)
    node_N = tl.arange(0, NODES)
    real_N = node_N < tl.load(counts + b)
    tokens_N = tl.load(tokens + b * nodes + node_N, mask=node_N < nodes, other=-1).to(tl.int32)
    parents_N = tl.load(parents + b * parents_b + node_N, mask=node_N < nodes, other=-2).to(tl.int32)
    depth_N = tl.zeros([NODES], tl.int32)  # of nodes found right; 0: not, or not yet
    choice = _argmax(logits + b * logits_b, V, BLOCK)
    end, depth, final = -1, 0, choice
    depth_N = tl.where(real_N & (parents_N == -1) & (tokens_N == choice), 1, depth_N)
    node = tl.min(tl.where(depth_N > 0, node_N, NO_INDEX), 0)
    while node < NODES:
        choice = _argmax(logits + b * logits_b + (node + 1) * logits_l, V, BLOCK)
        own = _at(depth_N, node_N, node)
        end, final = tl.where(own > depth, node, end), tl.where(own > depth, choice, final)
        depth = tl.maximum(depth, own)
        depth_N = tl.where(real_N & (parents_N == node) & (tokens_N == choice), own + 1, depth_N)
        node = tl.min(tl.where((depth_N > 0) & (node_N > node), node_N, NO_INDEX), 0)
    _finish(accepted, bonus, path, b, nodes, node_N, parents_N, end, depth, final)


@triton.jit
def _weights(row, weights, temperature, V: tl.constexpr, SOFTMAX: tl.constexpr, BLOCK: tl.constexpr):
    """weights[0 … V-1] of a position, returned with what they are divided by: exp(logit / temperature - max) and the
    sum, or, from probabilities, these and 1."""
    top, total = 0.0, 1.0
    if SOFTMAX:
        top, total = -float("inf"), 0.0
        for start in range(0, V, BLOCK):
            v_V = start + tl.arange(0, BLOCK)
            x_V = tl.load(row + v_V, mask=v_V < V, other=-float("inf")).to(tl.float32) / temperature
            new = tl.maximum(top, tl.max(x_V, 0))
            shift = tl.maximum(new, -1e30)  # finite: all logits so far may be -inf
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(x_V - shift), 0)
            top = new
    for start in range(0, V, BLOCK):
        v_V = start + tl.arange(0, BLOCK)
        x_V = tl.load(row + v_V, mask=v_V < V, other=0.0).to(tl.float32)
        if SOFTMAX:
            x_V = tl.exp(x_V / temperature - top)
        tl.store(weights + v_V, x_V, mask=v_V < V)
    tl.debug_barrier()  # other threads read them
    return total


@triton.jit
def _left_V(weights, total, q, token, v_V, V: tl.constexpr, POINT: tl.constexpr):
    """max(0, p - q) of a block of tokens; without q the draft was a choice: all of q lies on it."""
    p_V = tl.load(weights + v_V, mask=v_V < V, other=0.0) / total
    if POINT:
        return tl.where(v_V == token, 0.0, p_V)
    return tl.maximum(p_V - tl.load(q + v_V, mask=v_V < V, other=0.0).to(tl.float32), 0.0)


@triton.jit
def _reject(weights, total, q, token, V: tl.constexpr, POINT: tl.constexpr, BLOCK: tl.constexpr):
    """weights ← max(0, p - q), and returns their sum; where all of that is 0 (rounding), nothing changes."""
    left = 0.0
    for start in range(0, V, BLOCK):
        left += tl.sum(_left_V(weights, total, q, token, start + tl.arange(0, BLOCK), V, POINT), 0)
    if left > 0:
        for start in range(0, V, BLOCK):
            v_V = start + tl.arange(0, BLOCK)
            tl.store(weights + v_V, _left_V(weights, total, q, token, v_V, V, POINT), mask=v_V < V)
    tl.debug_barrier()
    return tl.where(left > 0, left, total)


@triton.jit
def _draw(weights, uniform, V: tl.constexpr, BLOCK: tl.constexpr):
    """The token at which the cumulated weights pass uniform · their sum; float64."""
    total, last = tl.zeros([], tl.float64), 0
    for start in range(0, V, BLOCK):
        v_V = start + tl.arange(0, BLOCK)
        w_V = tl.load(weights + v_V, mask=v_V < V, other=0.0).to(tl.float64)
        total += tl.sum(w_V, 0)
        last = tl.maximum(last, tl.max(tl.where(w_V > 0, v_V, 0), 0))
    before, token, start = tl.zeros([], tl.float64), NO_INDEX, 0
    while (token == NO_INDEX) & (start < V):
        v_V = start + tl.arange(0, BLOCK)
        w_V = tl.load(weights + v_V, mask=v_V < V, other=0.0).to(tl.float64)
        token = tl.min(tl.where(before + tl.cumsum(w_V, 0) > uniform * total, v_V, NO_INDEX), 0)
        before += tl.sum(w_V, 0)
        start += BLOCK
    return tl.minimum(token, last)  # a guard against rounding


@triton.jit(do_not_specialize=["nodes", "parents_b", "accept_b", "temperature"])
def _sampled(
    x, tokens, parents, counts, accepted, bonus, path, nodes, x_b, x_l, parents_b,
    q, accept, uniform, weights, q_b, q_n, accept_b, temperature,
    V: tl.constexpr, NODES: tl.constexpr, POINT: tl.constexpr, SOFTMAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Children of a node are tried in node order, the first kept one is next; the bonus comes from what is left of p.

    x: logits, or probabilities where not SOFTMAX. weights: float32 [B, V] to work in.
    """
    b = tl.program_id(0).to(tl.int64)
    node_N = tl.arange(0, NODES)
    real_N = node_N < tl.load(counts + b)
    parents_N = tl.load(parents + b * parents_b + node_N, mask=real_N, other=-2).to(tl.int32)
    x, weights = x + b * x_b, weights + b * V
    end, depth = -1, 0
    total = _weights(x, weights, temperature, V, SOFTMAX, BLOCK)
    child = tl.min(tl.where(parents_N == -1, node_N, NO_INDEX), 0)
    while child < NODES:
        token = tl.load(tokens + b * nodes + child).to(tl.int32)
        q_row = q + b * q_b + child * q_n
        chance = tl.load(weights + token) / total
        if not POINT:
            q_token = tl.load(q_row + token).to(tl.float32)
            chance = tl.where(q_token > 0, chance / q_token, 0.0)
        if tl.load(accept + b * accept_b + child) < chance:
            tl.debug_barrier()  # all have read the weights
            end, depth = child, depth + 1
            total = _weights(x + (child + 1) * x_l, weights, temperature, V, SOFTMAX, BLOCK)
            child = tl.min(tl.where(parents_N == end, node_N, NO_INDEX), 0)
        else:
            total = _reject(weights, total, q_row, token, V, POINT, BLOCK)
            child = tl.min(tl.where((parents_N == end) & (node_N > child), node_N, NO_INDEX), 0)
    token = _draw(weights, tl.load(uniform + b), V, BLOCK)
    _finish(accepted, bonus, path, b, nodes, node_N, parents_N, end, depth, token)


def _walk(
    kernel: triton.JITFunction, x_BLV: Tensor, tokens_BN: Tensor, parents: Tensor, counts_B: Tensor, *more, **flags
) -> list[Tensor]:
    """Runs a kernel on the trees of all requests: [accepted_B, bonus_B, path_BN], int64."""
    batch, nodes = tokens_BN.shape
    x_BLV, tree = _rows(x_BLV), [x.contiguous() for x in (tokens_BN, parents, counts_B)]
    out = [tokens_BN.new_empty(batch), tokens_BN.new_empty(batch), tokens_BN.new_empty(batch, nodes)]
    with torch.cuda.device_of(x_BLV):
        kernel[batch,](
            x_BLV, *tree, *out, nodes, *x_BLV.stride()[:2], nodes if parents.dim() == 2 else 0, *more,
            V=x_BLV.shape[2], NODES=max(2, triton.next_power_of_2(nodes)), BLOCK=BLOCK, num_warps=WARPS, **flags,
        )  # fmt: skip
    return out


def greedy(logits_BLV: Tensor, tokens_BN: Tensor, parents: Tensor, counts_B: Tensor) -> list[Tensor]:
    """[accepted_B, bonus_B, path_BN], int64, of `verify.greedy_tree` with the logits' argmax (any float dtype)."""
    return _walk(_greedy, logits_BLV, tokens_BN, parents, counts_B)


def sampled(
    x_BLV: Tensor, tokens_BN: Tensor, parents: Tensor, counts_B: Tensor, q_BNV: Tensor | None, accept_BN: Tensor,
    bonus_B: Tensor, temperature: float | None,
) -> list[Tensor]:  # fmt: skip
    """[accepted_B, bonus_B, path_BN], int64, of `verify.sampled_tree`.

    x_BLV: probabilities, or, with a temperature, logits. accept_BN, bonus_B: float64 uniform numbers.
    """
    weights_BV = x_BLV.new_empty(len(x_BLV), x_BLV.shape[2], dtype=torch.float32)
    accept_BN, q = _rows(accept_BN), weights_BV if q_BNV is None else _rows(q_BNV)
    return _walk(
        _sampled, x_BLV, tokens_BN, parents, counts_B, q, accept_BN, bonus_B.contiguous(), weights_BV, *q.stride()[:2],
        accept_BN.stride(0), temperature or 1.0, POINT=q_BNV is None, SOFTMAX=temperature is not None,
    )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
