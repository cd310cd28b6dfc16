"""What SGLang's own draft classes make of our folders, on a CPU: `python sglang_drafts.py JOB.json`.

JOB: {target: folder, heads: {name: {folder, texts: [{ids, lengths}]}}, k, out: file}. The file gets the k drafts after
each length: {name: [[[draft, …] per length] per text]}, or {name: error}.

SGLang's are the classes with their loader, RoPE, norms and linears, the rule which layers of the target they are
handed, and the replacement of the embedding. Plain torch stands in for its attention, and transformers for the target.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import socket
import sys
import types
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pydantic

# Packages that SGLang imports and that nothing here calls: kernels for GPUs, multimedia, grammars, servers.
ABSENT = {
    "IPython", "av", "blobfile", "cuda", "cutlass", "decord", "decord2", "deep_ep", "deep_gemm", "deepseek_recipe",
    "easydict", "flash_attn", "flash_attn_4", "flash_mla", "flashinfer", "humming", "kernels", "modelscope", "nvidia",
    "nvshmem", "openai_harmony", "outlines", "orjson", "py_spy", "pynvml", "quack", "scipy", "sgl_deep_gemm",
    "sgl_kernel", "sglang_kernel", "smg_grpc_servicer", "soundfile", "tilelang", "timm", "tml_renderers",
    "torch_memory_saver", "torchaudio", "torchcodec", "torchvision", "triton", "tvm_ffi", "uvloop", "vllm", "xgrammar",
    "xxhash",
    "zstandard",
}  # fmt: skip


class Absent(types.ModuleType):
    """A module in which every name is there: a class where it is capitalised, else something that swallows calls."""

    __path__ = ()

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        base = pydantic.BaseModel if self.__name__.startswith("xgrammar") else object  # for fields of SGLang's models
        value = type(name, (base,), {}) if name[:1].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Absent(spec.name)

    def exec_module(self, module):
        pass


def prepare(target: str) -> None:
    """Makes SGLang importable and starts it as one process on a CPU."""
    import transformers.utils.import_utils as found

    for name in dir(found):  # transformers looks for packages before they seem to be there
        if name.startswith("is_") and name.endswith("_available"):
            try:
                getattr(found, name)()
            except TypeError:
                continue
    import transformers.image_utils  # noqa: F401

    sys.meta_path.insert(0, Finder())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import activation, layernorm
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path=target, device="cpu", attention_backend="torch_native")
    publish(arguments, role="test", ranks=SpawnRanks(world_rank=0))
    parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    publish(arguments, role="test", ranks=SpawnRanks(world_rank=0))
    get_parallel().override_permanently(world_group=parallel_state._WORLD)
    parallel_state.initialize_model_parallel(backend="gloo")
    RadixAttention.forward = attention
    layernorm.RMSNorm.forward = layernorm.RMSNorm.forward_native
    activation.SiluAndMul.forward = activation.SiluAndMul.forward_native


CLASSES = {"LlamaForCausalLMEagle": "llama_eagle", "LlamaForCausalLMEagle3": "llama_eagle3"}  # class: its module
CACHE: dict[int, tuple] = {}  # keys and values [slots, key heads, head size] of each layer


def attention(self, q, k, v, forward_batch=None, save_kv_cache=True, **_):
    """Causal attention of the newest rows to all that is cached."""
    import torch
    from torch.nn import functional as F

    rows = len(q)
    q, k, v = (x.view(rows, -1, self.head_dim) for x in (q, k, v))
    if self.layer_id in CACHE:
        k, v = (torch.cat(pair) for pair in zip(CACHE[self.layer_id], (k, v), strict=True))
    CACHE[self.layer_id] = k, v
    mask = torch.ones(rows, len(k), dtype=torch.bool).tril(len(k) - rows)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scaling, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(rows, -1)


class OneRequest:
    """Neither of the forward modes with work for several requests or devices."""

    def __getattr__(self, name):
        if name.startswith("is_"):
            return lambda: False
        raise AttributeError(name)


class Drafter:
    """A head's folder in SGLang's class, lent the target's embedding as its worker does."""

    def __init__(self, folder: Path, target):
        import torch
        from safetensors.torch import load_file
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder)
        torch.set_default_dtype(torch.float32)
        (name,) = config.architectures
        self.model = getattr(import_module(f"sglang.srt.models.{CLASSES[name]}"), name)(config).float()
        self.model.load_weights(load_file(folder / "model.safetensors").items())
        embedding = target.get_input_embeddings().weight
        self.taps = captured(target.config, config) if self.model.capture_aux_hidden_states else None
        if not self.taps or self.model.load_lm_head_from_target:
            self.model.set_embed_and_head(embedding, target.lm_head.weight)
        else:
            self.model.set_embed(embedding)
        self.target, self.hot = target, getattr(self.model, "hot_token_id", None)

    def drafts(self, ids: list[int], lengths: list[int], k: int) -> list[list[int]]:
        """The k drafts after each of the lengths of a text."""
        import torch

        states = self.target(torch.tensor([ids]), output_hidden_states=True).hidden_states
        states = [states[tap][0] for tap in self.taps or (-1,)]  # the last one is after the final norm
        features = torch.cat(states, -1)[:-1]
        CACHE.clear()
        normed, fed_back = self._step(ids[1:], features, range(len(ids) - 1))
        full, found = dict(CACHE), []
        for n in lengths:
            CACHE.update({layer: (k[: n - 1], v[: n - 1]) for layer, (k, v) in full.items()})
            drafts = [self._best(normed[n - 2])]
            hidden = fed_back[n - 2 : n - 1]
            while len(drafts) < k:
                output, hidden = self._step(drafts[-1:], hidden, [n - 2 + len(drafts)])
                drafts.append(self._best(output[-1]))
            found.append(drafts)
        return found

    def _step(self, ids, features, positions):
        import torch

        ids, positions = torch.tensor(ids), torch.tensor(list(positions))
        batch = SimpleNamespace(
            input_ids=ids, mm_input_embeds=None, forward_mode=OneRequest(),
            spec_info=SimpleNamespace(hidden_states=features),
        )  # fmt: skip
        out = self.model.model(ids, positions, batch)
        return (out[0], out[1][0]) if self.taps else (out, out)

    def _best(self, normed) -> int:
        best = int((self.model.lm_head.weight @ normed).argmax())
        return best if self.hot is None else int(self.hot[best])


def captured(target, config) -> list[int]:
    """The states of the target that SGLang's Llama hands to the draft, ascending; its loop reads those of 0 … L - 1."""
    from sglang.srt.models.llama import LlamaForCausalLM

    model = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), config=target, model=SimpleNamespace())
    ids = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    LlamaForCausalLM.set_eagle3_layers_to_capture(model, ids)
    return [layer for layer in range(target.num_hidden_layers) if layer in model.model.layers_to_capture]


def main(job: dict) -> None:
    prepare(job["target"])
    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32)
    found: dict[str, object] = {}
    with torch.no_grad():
        for name, head in job["heads"].items():
            try:
                drafter = Drafter(Path(head["folder"]), target)
                found[name] = [drafter.drafts(text["ids"], text["lengths"], job["k"]) for text in head["texts"]]
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
                found[name] = f"{type(error).__name__}: {error}"
    Path(job["out"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
