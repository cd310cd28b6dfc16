"""The typed config tree. A recipe YAML and `key=value` overrides fill it; nothing else configures a run.

The dataclasses below are the whole schema: names, types, defaults; behind them, which keys belong to which head types.
Ranges and cross-checks are in `headtrain/configcheck.py`, loading (recipe lookup, Hydra's override grammar, errors that
name the key) in `headtrain/configload.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ShapeConfig:
    """The target's dimensions, so that `plan` and `smoke` need no weights and no network."""

    layers: int | None = None  # blocks
    hidden: int | None = None  # width of the residual stream
    heads: int | None = None  # query heads
    kv_heads: int | None = None  # key/value heads
    head_dim: int | None = None  # values per head
    intermediate: int | None = None  # width of the MLP
    vocab: int | None = None  # rows of lm_head
    experts: int | None = None  # of a block with a mixture of experts: those that tokens are routed to
    experts_per_token: int | None = None  # of them, used by each token
    shared_experts: int | None = None  # besides, used by every token
    expert_intermediate: int | None = None  # width of each expert
    dense_layers: int | None = None  # blocks with one MLP, of `intermediate`, instead


@dataclass
class TargetConfig:
    model: str | None = None  # Hub id, folder, .gguf file, or package:NAME/FILE
    family: str | None = None  # transformers model_type
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    revision: str | None = None  # commit, branch or tag of a Hub model
    adapter: str | None = None  # peft adapter (folder or Hub id) that is merged into the weights
    adapter_revision: str | None = None  # commit, branch or tag of a Hub adapter
    dtype: str = "bfloat16"  # of the forward pass in data stages (evaluation has its own); auto = see train.precision
    device: str = "auto"  # auto = cuda when there is one, else cpu
    gpus: int = 1  # CUDA devices that the target lies on together
    split: str = "layers"  # layers: whole blocks on each, in one process; tensor: parts of every matrix, a process each
    gpu_memory: float | None = None  # GB of weights on each, at most; the rest waits in the CPU's memory (slow)
    cpu_memory: float | None = None  # GB of weights there, at most; the rest is read from the target's files (slower)
    attn_implementation: str = "headtrain"  # our registered attention, or any name transformers knows
    chat_template: str | None = None  # file with the chat template that is served, instead of the tokenizer's own
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # for the chat template, such as enable_thinking
    trust_remote_code: bool = False  # run Python code that comes with the model


@dataclass
class PromptSource:
    source: str = ""  # file (.json, .jsonl, .parquet, .txt), folder, package:NAME/FILE, or a Hub data set (user/name)
    limit: int | None = None  # at most this many prompts, lowest content hash first
    weight: float | None = None  # share of this source in the mix, relative to the other sources' weights
    split: str | None = None  # of a Hub data set or of one saved by `datasets`; None: its only one, or train
    subset: str | None = None  # of a Hub data set that has several
    revision: str | None = None  # commit, branch or tag of a Hub data set


@dataclass
class PromptFilter:
    """Keeps a prompt by the text of its last user turn; every rejection is counted by reason."""

    min_chars: int = 1  # fewest characters
    max_chars: int | None = None  # most characters
    min_ascii: float = 0.0  # share of characters below 128
    min_letters: float = 0.0  # share of letters and spaces


@dataclass
class ResponsesConfig:
    backend: str = "local"  # local: the target answers; server: at urls; given: the data's own answers (off-policy)
    urls: list[str] = field(default_factory=list)  # server: addresses such as http://gpu1:8000, one or several
    model: str | None = None  # server: the name the target is served by; None: target.model, or the only one there
    concurrency: int = 64  # server: requests at a time to each
    timeout: float = 600.0  # server: seconds in which a request must be answered
    tries: int = 5  # server: requests for one response that may fail before its prompt is left out
    patience: float = 600.0  # server: seconds without any server that answers before the run stops
    temperature: float = 0.0  # 0 = the most likely token
    top_p: float = 1.0  # share of probability that is sampled from
    max_new_tokens: int = 512  # per response
    batch_tokens: int = 16384  # budget of one generation batch: rows x (longest prompt + max_new_tokens)


@dataclass
class CapturesConfig:
    backend: str = "local"  # local: the target as loaded here; vllm: its hidden-state extraction, for stored responses
    engine: dict[str, Any] = field(default_factory=dict)  # vllm: options of vllm.LLM, such as tensor_parallel_size
    dtype: str = "bfloat16"  # of the stored hidden states; float8: half the disk, one scale per state
    mode: str = "offline"  # offline: all rows are stored; online: training asks the target, little is stored
    allow_low_disk: bool = False  # start although the disk estimate exceeds the free space


@dataclass
class DataConfig:
    prompts: list[PromptSource] = field(default_factory=list)  # where prompts come from: [{source: …, limit: …}, …]
    filter: PromptFilter = field(default_factory=PromptFilter)
    held_out: float = 0.02  # prompts kept for evaluation; below 1: a share, else a count (lowest content hashes)
    valid: float = 0.02  # prompts whose captures pick the best checkpoint (the next hashes); never evaluated on
    max_length: int = 2048  # tokens of prompt + response; a longer row is cut, counted, and kept if still supervised
    turns: int = 1  # user turns of a chat that are asked, each after the target's own answers to those before
    keep_truncated: bool = False  # given answers with finish_reason `length`: keep them, without an end, or leave out
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    captures: CapturesConfig = field(default_factory=CapturesConfig)


@dataclass
class LoraSection:
    """Low-rank factors instead of all weights; with head.init_from, whose other weights stay as they are."""

    rank: int | None = None  # None: no LoRA
    alpha: float | None = None  # scale of what the factors add, over rank; None: 2 rank
    targets: list[str] | None = None  # linear layers, by name or its end; None: all but lm_head


@dataclass
class Medusa2Section:
    """Of medusa: low-rank factors of the target are trained along, towards what it said before (Medusa-2)."""

    rank: int | None = None  # None: the target stays as it is (Medusa-1)
    alpha: float | None = None  # scale of what the factors add, over rank; None: 2 rank
    targets: list[str] | None = None  # linear layers of the target's blocks, by the end of their names; None: all
    lr: float | None = None  # peak learning rate of the factors; None: a quarter of train.lr
    heads_first: float = 0.2  # share of the run in which the heads are trained alone
    distill: float = 5.0  # weight of staying with what the target said before, against the heads' loss


@dataclass
class HeadSection:
    type: str = "eagle3"  # kind of head
    taps: list[int] | None = None  # None: [2, L//2, L-3]
    layers: int | None = None  # peagle: decoder layers; None: 4. The others have 1
    unroll: int = 7  # draft steps that training simulates
    draft_vocab: Any = 32000  # a size, "full", or a file that `headtrain vocab out=FILE` wrote
    intermediate: int | None = None  # None: the target's
    heads: int | None = None  # None: the target's
    kv_heads: int | None = None  # None: the target's
    head_dim: int | None = None  # None: the target's
    norm_before_residual: bool = False  # add the normed hidden state as the residual (not every engine can)
    norm_output: bool = False  # feed back the normed output instead of the residual stream
    freeze_lm_head: bool = False  # keep lm_head at the target's rows
    blocks: int = 1  # medusa: residual blocks of each depth
    share_lm_head: bool = False  # medusa: one lm_head for all depths, instead of one each
    train_embedding: bool = False  # peagle: an embedding of its own, from the target's, instead of the frozen one
    mask_token: int | None = None  # peagle: token read at unknown positions; None: the last that the data does not have
    start: str = "calibrated"  # calibrated (features and copying in closed form) | random
    dialect: str | None = None  # mtp from scratch: how tensors are named and wired, deepseek (None), qwen or mimo
    init_from: str | None = None  # a head folder to start from (its mapping is kept), or scratch: a new mtp module
    lora: LoraSection = field(default_factory=LoraSection)
    medusa2: Medusa2Section = field(default_factory=Medusa2Section)
    rebuild_vocab: bool = False  # with init_from: choose the draft vocabulary anew and move the lm_head rows that stay


@dataclass
class TrainConfig:
    epochs: float | None = None  # passes over the data
    steps: int | None = None  # optimizer steps
    seconds: float | None = None  # stop (and finish the schedule) after this much training wall time
    batch_tokens: int = 4096  # packed tokens of one micro-batch
    accumulate: int = 1  # micro-batches of one optimizer step
    lr: float = 1e-4  # peak learning rate
    optimizer: str = "adamw"  # adamw | muon
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # of AdamW
    weight_decay: float = 0.0  # on matrices; norms are never decayed
    muon_lr: float = 1e-3  # peak learning rate of the matrices that optimizer=muon updates
    muon_momentum: float = 0.95  # of optimizer=muon
    clip: float = 0.5  # largest gradient norm; 0 = no clipping
    warmup: float = 0.02  # share of the steps
    schedule: str = "cosine"  # cosine | linear | wsd | constant
    min_lr: float = 0.0  # final lr as a share of lr
    objective: str = "soft_ce"  # soft_ce (cross-entropy with the target's distribution) | lk_alpha | lk_hybrid | tv
    hard_weight: float = 0.0  # share of cross-entropy with the target's choice alone in the objective
    feature_weight: float = 0.0  # of smooth L1 between the head's and the target's last hidden state, added
    weights: str = "decay"  # of depths: decay (decay**d) | dpace (confidence) | vat (decay from the first rejection)
    decay: float = 0.8  # base of the depths' weights
    position_keep: float = 1.0  # share of positions that go on from each depth to the next; below 1 is faster
    noise: float = 0.0  # half-width of uniform noise on the features, which have unit size
    precision: str = "bf16"  # bf16 | fp32 | fp16 (GPU only), of the forward pass; auto = bf16 where it is fast
    zero_stage: int = 0  # DeepSpeed ZeRO stage, 0 to 3
    offload: bool = False  # the optimizer's state and step on the CPU (on a GPU, from zero_stage 1 on)
    checkpointing: bool = False  # compute each unroll depth again in the backward pass; less memory, more time
    ema: float = 0.0  # decay per step of the averaged weights that are measured and saved; 0 = no average
    spike: float = 0.0  # skip a step whose gradient norm exceeds so many times the median of the last 64; 0 = none
    patience: int | None = None  # stop after so many evaluations in a row without a better τ
    save_every: int = 200  # steps between checkpoints
    keep: int = 2  # checkpoints kept, besides the best
    eval_every: int = 100  # steps between simulated acceptance lengths
    eval_rows: int = 64  # rows of that simulation
    decode_prompts: int = 0  # of them, decoded with the target itself; if any, that τ picks the best head
    log_every: int = 10  # steps between lines of training/log.jsonl
    threads: int | None = None  # CPU threads of each training process; None: cores / processes


@dataclass
class EvalConfig:
    suites: list[str] = field(default_factory=lambda: ["heldout"])  # heldout, a benchmark, NAME=FILE, or a .jsonl file
    limit: int | None = None  # prompts per suite; None: all of one's own, 80 of a benchmark (40 of humaneval)
    k: list[int] = field(default_factory=lambda: [5])  # draft tokens per step; depth of a tree
    tree: list[str] = field(default_factory=lambda: ["chain"])  # of heads: chain, 4x16 (EAGLE-2), iid-2x8, static-16
    temperature: list[float] = field(default_factory=lambda: [0.0])  # 0 = greedy, with an identity check
    top_p: float = 1.0  # above temperature 0
    top_k: int = 0  # above temperature 0; 0 = all tokens
    min_p: float = 0.0  # above temperature 0: tokens at least so likely, relative to the likeliest; 0 = all
    rule: str = "exact"  # of acceptance: exact | block (exact, accepts more; chains) | typical (changes the output)
    batch: list[int] = field(default_factory=lambda: [16])  # requests decoded together
    drafters: list[str] = field(default_factory=lambda: ["head", "ngram", "head+ngram"])  # compared with plain decoding
    draft_model: str | None = None  # of drafter draft_model: a small model with the target's vocabulary
    skip_from: int | None = None  # of drafter layer_skip: how many of the target's first layers draft
    ngram_n: int | None = None  # of the n-gram drafters: tokens that are looked up; None: each drafter's own
    ngram_m: int | None = None  # of the n-gram drafters: tokens that are copied, at most; None: each drafter's own
    ngram_hits: int | None = None  # of the n-gram maps: times that a text was seen before it is copied; None: their own
    min_confidence: float = 0.0  # networks stop drafting where their confidences' product falls below; 0 = never
    adaptive: bool = False  # decode a request plainly while its acceptance is below plain_below
    plain_below: float = 0.4  # of adaptive: share of draft tokens accepted lately
    dtype: str = "float32"  # of the target while evaluating
    max_new_tokens: int = 128  # per prompt
    speed_prompts: list[int] = field(default_factory=lambda: [8])  # timed at batch 1: one number, or one per suite
    speed_tokens: int = 96  # new tokens of each timed prompt
    cost_batches: list[int] = field(default_factory=lambda: [1, 4, 16])  # timed for the cost model; [] = no cost model


@dataclass
class ExportConfig:
    formats: list[str] = field(default_factory=list)  # vllm, sglang, trtllm, speculators, gguf, eagle, medusa, mtp
    engine_version: str | None = None  # release that will serve, if not the tested one; several: vllm=0.32.0,sglang=…


@dataclass
class PushConfig:
    repo: str | None = None  # user/name on the Hub, to which `fit` uploads the head; None: nowhere
    private: bool = True  # make the repository private, and refuse one that is public
    dry_run: bool = False  # only list what would be uploaded; nothing is sent
    revision: str | None = None  # branch, made where it is missing; None: main


@dataclass
class LaunchConfig:
    gpus: Any = "auto"  # processes of the training stage; auto = the CUDA devices, or 1 on a CPU
    target: str = "same"  # online: in each training process, or apart: in a process beside each, on a GPU of its own
    workers: Any = "auto"  # processes of the data stages and of evaluation; auto = the CUDA devices, or the CPU cores
    hostfile: str | None = None  # DeepSpeed hostfile, for several machines
    master_port: int = 29500  # of the first machine


@dataclass
class RecipeConfig:
    """One run of one head for one target."""

    description: str = ""  # one line about the recipe
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    head: HeadSection = field(default_factory=HeadSection)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    push: PushConfig = field(default_factory=PushConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    run_dir: str | None = None  # None: runs/<recipe name>
    seed: int = 0  # of everything random
    smoke: bool = False  # tiny random target of the same family, few rows, no network
    logger: str = "none"  # none | wandb


class ConfigError(ValueError):
    """A key, value or combination that cannot be meant; the message says what is allowed."""


# ------------------------------------------------------------------------------------------------- names

DRAFTERS = (
    "ngram", "ngram-map-k", "ngram-map-k4v", "prompt_lookup", "suffix", "layer_skip", "draft_model",
    "head", "head+ngram", "head+ngram-tree",
)  # fmt: skip
HEAD_DRAFTERS = tuple(name for name in DRAFTERS if name.startswith("head"))
KINDS = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "medusa": "Medusa", "mtp": "MTP", "peagle": "P-EAGLE"}  # by head.type
HEAD_TYPES = tuple(KINDS)
TAPPED = ("eagle3", "peagle")  # head types that read taps; the others read the last hidden state alone
BORROWED = ("eagle", "mtp")  # head types that draft with the target's own lm_head
BY_DEPTH = ("medusa",)  # head types with an output of its own for each of head.unroll depths, and no layer that attends
OF_SERVERS = ("model", "urls", "concurrency", "timeout", "tries", "patience")  # data.responses, of backend=server
OF_ENGINE = (  # options of vllm.LLM that headtrain sets itself
    "model", "tokenizer", "dtype", "revision", "trust_remote_code", "max_model_len", "skip_tokenizer_init",
    "enable_prefix_caching", "speculative_config", "kv_transfer_config", "data_parallel_size",
)  # fmt: skip
CARRIED_OUT = (  # those in data.captures.engine that say how and where it works, and change no state
    "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_num_seqs",
    "max_num_batched_tokens", "enforce_eager", "cpu_offload_gb", "distributed_executor_backend", "disable_log_stats",
)  # fmt: skip
SCRATCH = "scratch"  # head.init_from of a head type that otherwise starts from what the target's checkpoint has
ATTENDING = tuple(kind for kind in HEAD_TYPES if kind not in BY_DEPTH)
# Head keys that only some types read; setting one for another type is an error.
HEAD_KEYS: dict[str, tuple[str, ...]] = {
    "taps": TAPPED, "norm_before_residual": TAPPED, "norm_output": ("eagle3",),
    **dict.fromkeys(("intermediate", "heads", "kv_heads", "head_dim"), ATTENDING),
    **dict.fromkeys(("freeze_lm_head", "rebuild_vocab"), tuple(kind for kind in HEAD_TYPES if kind not in BORROWED)),
    "blocks": ("medusa",), "share_lm_head": ("medusa",), "dialect": ("mtp",),
    **dict.fromkeys(("layers", "train_embedding", "mask_token"), ("peagle",)),
}  # fmt: skip
# Train keys that only some head types read.
TRAIN_KEYS = dict.fromkeys(("noise", "feature_weight", "position_keep", "checkpointing"), ATTENDING)
