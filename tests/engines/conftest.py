"""Real engines beside our own decoder (make test-engines). What they agreed on is printed at the end of the run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

LINES = pytest.StashKey[list[str]]()


def neighbour(name: str) -> ModuleType:
    """A module of this folder, which is no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module tiny.py: a target, heads, our decoder's steps, and how they are compared with an engine's."""
    return neighbour("tiny")


@pytest.fixture(scope="session")
def vllm_engine() -> ModuleType:
    """The module vllm_engine.py; skips where vLLM is not installed."""
    pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-engines` has it")
    return neighbour("vllm_engine")


@pytest.fixture(scope="session")
def llama_engine() -> ModuleType:
    """The module llama_engine.py; skips where llama.cpp is not built."""
    for package in ("sentencepiece", "gguf"):
        pytest.importorskip(package, reason=f"{package} is not installed here; `make test-llama-cpp` has it")
    module = neighbour("llama_engine")
    if not module.PROGRAM.is_file():
        pytest.skip("llama.cpp is not built here; `make test-llama-cpp` builds it")
    return module


@pytest.fixture(scope="session")
def ledger(request) -> list[str]:
    """Lines that are printed at the end of the run."""
    return request.config.stash.setdefault(LINES, [])


def pytest_terminal_summary(terminalreporter, config):
    if lines := config.stash.get(LINES, []):
        terminalreporter.section("drafts of real engines beside ours")
        for line in lines:
            terminalreporter.write_line(line)
