"""Captures by vLLM without vLLM: what a stand-in for it is asked and gives, what is refused, what is left behind."""

import importlib
import sys

import pytest
import torch

from headtrain import children, pipeline, smoke
from headtrain.config import ConfigError
from headtrain.configcheck import validate
from headtrain.data_gen import capture, prompts, respond, vllm_states
from headtrain.data_gen.store import CaptureStore
from headtrain.files import claimed
from headtrain.identity import stage_marks

TAPS = (1, 2)
FAKE = {  # its files are written one step after the answers, as vLLM does
    "__init__.py": """
import itertools
from pathlib import Path
from types import SimpleNamespace as Answer
import torch
from safetensors.torch import save_file
from headtrain.config import TargetConfig
from headtrain.target import Target

fault, made = None, []

class SamplingParams:
    def __init__(self, **told):
        self.told = told

class LLM:
    def __init__(self, model, **told):
        made.append(self)
        if fault == "unknown":
            raise ValueError("Value error, no such\\n   architecture")
        self.told, self.pending, self.numbers, self.most, self.asked = told, {}, itertools.count(), 0, []
        self.target = Target.load(TargetConfig(model=model, dtype=told["dtype"], device="cpu"))
        self.layers = told["speculative_config"]["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        self.folder = Path(told["kv_transfer_config"]["kv_connector_extra_config"]["shared_storage_path"])
        self.llm_engine = self

    def generate(self, asked, sampling, use_tqdm):
        assert sampling.told["max_tokens"] == 1 and sampling.told["temperature"] == 0 and not self.pending
        if fault == "dies":
            raise RuntimeError("EngineCore encountered an issue")
        answers = []
        for prompt in asked:
            ids = prompt["prompt_token_ids"]
            assert 0 < len(ids) < told_longest(self)
            states = self.target.forward(torch.tensor([ids]), taps=tuple(self.layers))
            found = states.taps_BLAH[0].clone()
            token = int(self.target.logits(states.last_BLH[0, -1]).argmax())
            if fault == "lost":
                found = torch.randn_like(found)
            if fault == "nan" and not self.most:
                found[0, 0, 0] = float("nan")
            path = self.folder / f"{next(self.numbers)}-abc.safetensors"
            if fault == "fewer":
                ids, found = ids[1:], found[1:]
            self.pending[path] = {"token_ids": torch.tensor(ids), "hidden_states": found}
            told = {"hidden_states_path": str(path)}
            answers.append(Answer(kv_transfer_params=told, outputs=[Answer(token_ids=[token])]))
        return answers

    def step(self):
        for path, tensors in self.pending.items():
            save_file(tensors, path)
            Path(f"{path}.lock").touch()
            if fault == "full":
                path.write_bytes(path.read_bytes()[:-40])
        self.pending = {}
        self.most = max(self.most, len(list(self.folder.glob("*.safetensors"))))

def told_longest(llm):
    return llm.told["max_model_len"]
""",
    "engine/arg_utils.py": "class EngineArgs:\n    tensor_parallel_size: int = 1\n    max_num_seqs: int = 8\n",
    "model_executor/models/extract_hidden_states.py": "class ExtractHiddenStatesModel:\n    pass\n",
    "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py": """
import os
from safetensors.torch import load_file

def load_hidden_states(path):
    return load_file(path)

def cleanup_hidden_states(path):
    os.remove(path), os.remove(path + ".lock")
""",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The stand-in's folder, in front of everything else that is called vllm."""
    root = tmp_path / "packages" / "vllm"
    for name, text in FAKE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(root.parent))
    yield root
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def fake(package):
    return importlib.import_module("vllm")


@pytest.fixture
def by_vllm(recipe):
    """The recipe, whose captures vLLM makes of answers that came with the data."""
    recipe.data.captures.backend, recipe.data.responses.backend = "vllm", "given"
    return recipe


@pytest.fixture
def answered(recipe, tiny_target, tmp_path):
    """(responses, captures of the same by the target here)"""
    folders = [tmp_path / name for name in ("prompts", "responses", "captures")]
    prompts.gather(recipe, folders[0])
    respond.work(recipe, tiny_target, *folders, TAPS)
    respond.finish(recipe, folders[1], folders[2])
    return folders[1:]


def work(recipe, responses, captures, progress=None):
    ends = vllm_states.load_ends(recipe.target)
    return capture.work(recipe, ends, responses, captures, TAPS, progress)


# ------------------------------------------------------------------------------------------------- what is made

def test_the_files_are_those_of_the_local_backend(recipe, answered, fake, tmp_path, monkeypatch):
    responses, here = answered
    recipe.data.captures.backend, needed, told = "vllm", [], []
    monkeypatch.setattr(capture, "watch_disk", lambda folder, size: needed.append(size))
    done = work(recipe, responses, captures := tmp_path / "by-vllm", lambda *tokens: told.append(tokens))
    capture.finish(recipe, responses, captures)
    ours, theirs = CaptureStore(here), CaptureStore(captures)
    assert theirs.index | {"files": None} == ours.index | {"files": None} and done == len(ours.index["files"]) > 3
    for a, b in zip(ours.rows, theirs.rows, strict=True):
        assert a == b
        one, two = ours.read(a), theirs.read(b)
        for name in ("ids", "supervised", "argmax"):
            assert torch.equal(getattr(one, name), getattr(two, name))
        for name in ("taps", "last", "logsumexp"):
            torch.testing.assert_close(getattr(one, name), getattr(two, name), atol=1e-4, rtol=1e-4)
    (llm,) = fake.made
    assert llm.layers == [1, 2, 4] and llm.told["enable_prefix_caching"] is False and llm.told["dtype"] == "float32"
    sizes = [file["tokens"] for file in ours.index["files"]]
    assert needed == [2 * 3 * 64 * 4 * size for size in sizes]  # the captures, and vLLM's files on the way to them
    assert llm.most == max(file["rows"] for file in ours.index["files"])  # of one batch at a time
    assert not list((captures / "claims").glob("vllm-*/")) and told[-1][0] == sizes[-1]


def test_rows_of_one_and_two_tokens_and_taps_in_any_place(recipe, tiny_target, fake, tmp_path):
    recipe.data.max_length = 40
    for taps in ((4,), (), (1, 3)):
        engine = vllm_states.Engine(recipe, vllm_states.load_ends(recipe.target), taps, tmp_path)
        rows = [torch.tensor(ids) for ids in ([7], list(range(5, 45)), [3, 9], [7])]
        found = dict(engine.read(torch.bfloat16, rows))
        assert list(found) == [0, 1, 2, 3]
        for n, row in enumerate(rows):
            part = found[n]
            assert part["taps"].shape == (len(row), len(taps), 64) and part["taps"].dtype == torch.bfloat16
            assert torch.equal(part["ids"], row.int()) and not part["last"][-1].any()
            if len(row) == 1:
                assert not part["taps"].any() and not part["argmax"].any() and not part["logsumexp"].any()
                continue
            states = tiny_target.forward(row[None, :-1], taps=taps)
            torch.testing.assert_close(part["last"][:-1], states.last_BLH[0].bfloat16())
            if taps:
                torch.testing.assert_close(part["taps"][:-1], states.taps_BLAH[0].bfloat16())
            assert torch.equal(part["argmax"][:-1].long(), tiny_target.logits(states.last_BLH[0]).argmax(-1))
        assert dict(engine.read(torch.float32, [rows[0]]))[0]["last"].shape == (1, 64)


def test_states_that_are_not_finite_are_asked_for_once_more(recipe, answered, fake, tmp_path):
    recipe.data.captures.backend, fake.fault = "vllm", "nan"
    work(recipe, answered[0], captures := tmp_path / "by-vllm")
    capture.finish(recipe, answered[0], captures)
    store = CaptureStore(captures)
    assert len(store.rows) == 21 and all(store.read(row).taps.isfinite().all() for row in store.rows)


def test_a_batch_without_rows_is_an_empty_file(recipe, answered, fake, tmp_path):
    recipe.data.captures.backend = "vllm"
    ends = vllm_states.load_ends(recipe.target)
    empty = capture._capture(recipe, ends, None, [], TAPS, None, None)
    assert empty["taps"].shape == (0, 2, 64) and empty["taps"].dtype == torch.float32
    assert {name: tensor.dtype for name, tensor in empty.items() if tensor.dim() == 1} == {
        "ids": torch.int32, "argmax": torch.int32, "logsumexp": torch.float32, "supervised": torch.bool,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------- what goes wrong

@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("unknown", r"backend=vllm: .*cannot give this target's states: Value error, no such architecture$"),
        ("dies", r"cannot give this target's states: EngineCore encountered an issue"),
        ("lost", r"chose token \d+, but its states lead to token \d+"),
        ("fewer", r"gave states of shape \(\d+, 3, 64\) for a prompt that needs \(\d+, 3, 64\)"),
        ("full", r"0-abc\.safetensors cannot be read .*is the disk full\?"),
    ],
)
def test_states_that_are_not_those_asked_for_are_never_stored(recipe, answered, fake, tmp_path, fault, why):
    recipe.data.captures.backend, fake.fault = "vllm", fault
    with pytest.raises(vllm_states.EngineError, match=why) as error:
        work(recipe, answered[0], captures := tmp_path / "by-vllm")
    assert "\n" not in str(error.value) and not list(captures.glob("*.safetensors"))
    assert not list((captures / "claims").glob("vllm-*/"))


def test_a_file_that_never_comes_is_an_error(recipe, answered, fake, tmp_path, monkeypatch):
    recipe.data.captures.backend = "vllm"
    monkeypatch.setattr(vllm_states, "PATIENCE", 0.1)
    monkeypatch.setattr(fake.LLM, "step", lambda self: None)
    with pytest.raises(vllm_states.EngineError, match="No such file"):
        work(recipe, answered[0], tmp_path / "by-vllm")


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_has_is_not(tmp_path):
    for n in (0, 2):
        (tmp_path / f"vllm-{n}").mkdir()
        (tmp_path / f"vllm-{n}" / "5-abc.safetensors").write_text("x")
    with claimed(tmp_path / "vllm-0.lock") as mine, vllm_states.scratch(tmp_path) as own:
        assert mine and own == tmp_path / "vllm-1" and not list(own.iterdir())
        with vllm_states.scratch(tmp_path) as other:
            assert other == tmp_path / "vllm-2" and not list(other.iterdir())
        assert own.is_dir()
    assert [path.name for path in tmp_path.glob("vllm-*/")] == ["vllm-0"]


# ------------------------------------------------------------------------------------------------- what is refused

def test_a_vllm_that_cannot_do_it_is_named_before_anything_starts(by_vllm, package, monkeypatch):
    vllm_states.check(by_vllm)
    by_vllm.data.captures.engine = {"tensor_paralel_size": 2}
    with pytest.raises(ConfigError, match=r"captures\.engine\.tensor_paralel_size: .*has no such option"):
        vllm_states.check(by_vllm)
    by_vllm.data.captures.engine = {}
    for file in vllm_states.NEEDED:
        text = (package / file).read_text()
        (package / file).write_text("class Another: ...")
        with pytest.raises(ConfigError, match=rf"backend=vllm: .*cannot extract hidden states .*vllm/{file}"):
            vllm_states.check(by_vllm)
        (package / file).unlink()
        with pytest.raises(ConfigError, match=r"cannot extract hidden states"):
            vllm_states.check(by_vllm)
        (package / file).write_text(text)
    monkeypatch.setattr(vllm_states.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"backend=vllm: the package vllm is not installed here; `pip install vllm`"):
        vllm_states.check(by_vllm)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data.responses.backend": "local"}, r"with data\.responses\.backend=local: the target's states are kept"),
        ({"target.adapter": "lora"}, r"target\.adapter: vLLM loads target\.model; save it with the adapter merged"),
        ({"data.captures.mode": "online"}, r"mode=online: training asks the target as it is loaded here"),
        ({"data.captures.engine": {"dtype": "half"}}, r"engine\.dtype=half: headtrain sets this itself"),
        ({"data.captures.engine": {"tensor_parallel_size": 0}}, r"tensor_parallel_size=0: not allowed; allowed: 1 or"),
        ({"data.captures.backend": "sglang"}, r"backend=sglang: not allowed; allowed: local, vllm"),
        (
            {"data.captures.backend": "local", "data.captures.engine": {"max_num_seqs": 4}},
            r"engine\.max_num_seqs=4: set data\.captures\.backend=vllm too",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(by_vllm, changes, why):
    by_vllm.data.captures.engine = {"tensor_parallel_size": 8}
    validate(by_vllm)
    for key, value in changes.items():
        *path, last = key.split(".")
        node = by_vllm
        for name in path:
            node = getattr(node, name)
        setattr(node, last, value)
    with pytest.raises(ConfigError, match=why):
        validate(by_vllm)


# ------------------------------------------------------------------------------------------------- where it runs

def test_an_engine_gets_its_gpus_and_there_are_as_many_as_fit(by_vllm, monkeypatch):
    monkeypatch.setattr(children, "gpu_ids", lambda: list("01234567"))
    by_vllm.target.device, engine = "auto", by_vllm.data.captures.engine

    def found():
        return [env["CUDA_VISIBLE_DEVICES"] for env in children.engines(by_vllm)]

    assert found() == list("01234567")
    engine["tensor_parallel_size"] = 4
    assert found() == ["0,1,2,3", "4,5,6,7"]
    by_vllm.launch.workers = 1
    assert found() == ["0,1,2,3"]
    by_vllm.launch.workers = 5
    engine["pipeline_parallel_size"] = 2
    assert found() == ["0,1,2,3,4,5,6,7"]
    engine["tensor_parallel_size"] = 8
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=8, .*: an engine would need 16 GPUs, and 8 are here"):
        found()
    by_vllm.target.device = "cpu"
    assert len(children.engines(by_vllm)) == 1


def test_the_engine_has_processes_of_its_own(by_vllm, tmp_path):
    by_vllm.run_dir, by_vllm.launch.workers = str(tmp_path / "run"), 1
    groups = pipeline.Job(by_vllm).groups(["prompts", "responses", "captures", "training"])
    assert [stages for stages, _ in groups] == [["check", "prompts"], ["responses"], ["captures"], ["training"]]
    by_vllm.data.captures.backend = "local"
    assert pipeline.Job(by_vllm).groups(["captures"])[0][0] == ["check", "captures"]


def test_what_changes_no_state_is_no_part_of_the_fingerprint(by_vllm):
    def mark(**engine):
        by_vllm.data.captures.engine = engine
        return stage_marks(by_vllm, {"model": "tiny"}, [])["captures"][0]

    first = mark()
    assert mark(tensor_parallel_size=8, gpu_memory_utilization=0.7) == first != mark(quantization="fp8")
    by_vllm.data.captures.backend = "local"
    assert mark() != first


def test_a_smoke_run_needs_no_vllm(by_vllm):
    by_vllm.target.family, by_vllm.run_dir = "llama", "run"
    by_vllm.data.captures.engine = {"tensor_parallel_size": 8}
    small = smoke.shrink(by_vllm)
    assert small.data.captures.backend == "local" and not small.data.captures.engine
    validate(small)
