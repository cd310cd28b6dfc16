"""`headtrain plan`: GPU memory, disk and time of a run, from the recipe's shape facts alone. Loads no weights.

Every figure is a formula below; what it assumes is printed with it. Sizes are decimal (1 GB = 1e9 bytes).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from headtrain import vocabfile
from headtrain.config import BORROWED, TAPPED, ConfigError, HeadSection, RecipeConfig, ShapeConfig
from headtrain.data_gen.capture import ONLINE, bytes_per_token, stored_rows, what_helps
from headtrain.files import free_bytes, locate, read_json

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "bf16": 2, "fp16": 2, "fp32": 4}
BYTES["float8"] = 2  # states are bf16 until they are stored
LOGITS = 256 << 20  # full-vocabulary float32 logits that the data stages hold at a time
ASSUMED_GPU = 80e9  # bytes, when no GPU is here to ask
PIECE = 2048  # tokens whose later depths a P-EAGLE head computes at a time
PROMPT_TOKENS = 250  # of one prompt, template included
GPU_FLOPS, GPU_BANDWIDTH = 300e12, 2.0e12  # sustained by one H100-class GPU in bf16: matrix products, memory reads
CPU_FLOPS = 50e9  # sustained by one core
CONFIG_NAMES = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}  # fmt: skip
EXPERT_NAMES = {
    "experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "experts_per_token": ("num_experts_per_tok",), "expert_intermediate": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",), "dense_layers": ("first_k_dense_replace",),
}  # fmt: skip


@dataclass
class Model:
    """Parameter counts of a target and of its head."""

    shape: ShapeConfig
    taps: int
    draft_vocab: int
    head_heads: int
    head_kv_heads: int
    head_dim: int
    head_intermediate: int
    medusa: tuple[int, int, int] | None = None  # of a medusa head: depths, blocks of each, lm_heads
    borrows: bool = False  # the target's lm_head: fc over [embedding; hidden], then a block of ordinary width
    own_module: bool = False  # an MTP module of the target's checkpoint, with experts where the target has them

    peagle: tuple[int, bool] | None = None  # of a P-EAGLE head: layers, and whether it has an embedding of its own

    @property
    def target(self) -> int:
        return self._of_target(self.shape.experts)

    @property
    def active(self) -> int:
        """Parameters of the target that one token meets."""
        return self._of_target(self.shape.experts_per_token)

    def _of_target(self, experts: int | None) -> int:
        s = self.shape
        attention = s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads)
        dense = s.dense_layers or 0 if s.experts else s.layers
        mlps = dense * 3 * s.hidden * s.intermediate + (s.layers - dense) * self._experts(experts)
        return s.layers * (attention + 2 * s.hidden) + mlps + s.hidden + 2 * s.vocab * s.hidden

    def _experts(self, routed: int | None) -> int:
        """Of one block: so many experts besides those that are shared, and the router; 0 in a dense target."""
        s = self.shape
        used = (routed or 0) + (s.shared_experts or 0)
        return s.hidden * (3 * used * s.expert_intermediate + s.experts) if s.experts else 0

    @property
    def kv_per_token(self) -> int:
        """Numbers of the key/value cache per token."""
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim

    @property
    def head(self) -> int:
        """fc, one block whose attention reads 2 x hidden, the norms, lm_head over the draft vocabulary.

        Medusa: residual blocks and their lm_heads. EAGLE and MTP: see `borrows`.
        """
        return self._of_head(self.shape.experts)

    @property
    def head_active(self) -> int:
        """Parameters of the head that one token meets."""
        return self._of_head(self.shape.experts_per_token)

    def _of_head(self, experts: int | None) -> int:
        h = self.shape.hidden
        if self.medusa:
            depths, blocks, lm_heads = self.medusa
            return depths * blocks * (h * h + h) + lm_heads * self.draft_vocab * h
        if self.borrows:
            attention = 2 * h * self.head_dim * (self.head_heads + self.head_kv_heads)
            routed = self._experts(experts) if self.own_module else 0
            return 2 * h * h + attention + (routed or 3 * h * self.head_intermediate) + 5 * h
        attention = 2 * h * self.head_dim * (self.head_heads + 2 * self.head_kv_heads)
        attention += self.head_heads * self.head_dim * h
        eagle3 = self.taps * h * h + attention + 3 * h * self.head_intermediate + 4 * h + self.draft_vocab * h
        if not self.peagle:
            return eagle3
        layers, own_embedding = self.peagle  # later layers are of ordinary width
        further = 2 * h * self.head_dim * (self.head_heads + self.head_kv_heads)
        further += 3 * h * self.head_intermediate + 2 * h
        return eagle3 + (layers - 1) * further + self.taps * h + own_embedding * self.shape.vocab * h

    @property
    def frozen(self) -> int:
        """Lent to the head while it trains: the target's embedding, and lm_head's rows of the draft vocabulary."""
        return ((0 if self.medusa else self.shape.vocab) + self.draft_vocab) * self.shape.hidden


def shape_of(config: RecipeConfig) -> ShapeConfig:
    """The recipe's shape, completed from the model's config.json where one is within reach without the network.

    ConfigError when they disagree, or when neither says enough.
    """
    shape, own = config.target.shape, reachable_config(config)
    for key, name in CONFIG_NAMES.items():
        written, stated = getattr(shape, key), own.get(name)
        if written is not None and stated is not None and written != stated:
            raise ConfigError(f"target.shape.{key}={written}: {config.target.model} has {stated}; correct the recipe")
        setattr(shape, key, written if written is not None else stated)
    for key, names in EXPERT_NAMES.items():
        setattr(shape, key, getattr(shape, key) or next((own[name] for name in names if own.get(name)), None))
    shape.kv_heads = shape.kv_heads or shape.heads
    if shape.head_dim is None and shape.hidden and shape.heads:
        shape.head_dim = shape.hidden // shape.heads
    missing = [f"target.shape.{key}" for key in CONFIG_NAMES if getattr(shape, key) is None]
    if missing:
        raise ConfigError(f"plan needs {', '.join(missing)}: write them into the recipe (see the model's config.json)")
    return shape


def reachable_config(config: RecipeConfig) -> dict:
    """config.json of a model folder or of the local Hub cache; empty when there is none."""
    if not config.target.model:
        return {}
    path = Path(locate(config.target.model)).expanduser() / "config.json"
    if not path.is_file() and config.target.model.count("/") == 1 and ":" not in config.target.model:
        from huggingface_hub import errors, try_to_load_from_cache

        with contextlib.suppress(errors.HFValidationError):  # a folder without one, such as /data
            found = try_to_load_from_cache(config.target.model, "config.json", revision=config.target.revision)
            path = Path(found) if isinstance(found, str) else path
    if not path.is_file():
        return {}
    content = read_json(path, "copy the model again")
    return content.get("text_config", content)


def tap_count(head: HeadSection) -> int:
    return 0 if head.type not in TAPPED else len(head.taps) if head.taps is not None else 3


def model_of(config: RecipeConfig) -> Model:
    shape, head = shape_of(config), config.head
    if (draft_vocab := vocabfile.size_of(head.draft_vocab, shape.vocab)) > shape.vocab:
        raise ConfigError(
            f"head.draft_vocab={head.draft_vocab} exceeds the target's {shape.vocab} tokens; write `full` for all"
        )
    return Model(
        shape=shape,
        taps=tap_count(head),
        draft_vocab=draft_vocab,
        head_heads=head.heads or shape.heads,
        head_kv_heads=head.kv_heads or shape.kv_heads,
        head_dim=head.head_dim or shape.head_dim,
        head_intermediate=head.intermediate or shape.intermediate,
        medusa=(head.unroll, head.blocks, 1 if head.share_lm_head else head.unroll) if head.type == "medusa" else None,
        borrows=head.type in BORROWED,
        own_module=head.type == "mtp" and head.init_from is None,
        peagle=(head.layers or 4, head.train_embedding) if head.type == "peagle" else None,
    )


# ------------------------------------------------------------------------------------------------- estimates

def training_bytes(model: Model, config: RecipeConfig, gpus: int, zero: int) -> dict[str, float]:
    """Bytes on one GPU while the head trains, by part, at a ZeRO stage over `gpus` processes."""
    width = BYTES[config.train.precision]
    shard = [1 / gpus if zero >= stage else 1.0 for stage in (1, 2, 3)]
    state = 12 if width == 2 else 8  # Adam's two moments in fp32, and fp32 masters beside 16-bit weights
    if (config.train.offload and zero) or config.head.lora.rank:  # of factors it is next to nothing
        state = 0
    state += 4 if config.train.ema and state else 0
    s, tokens = model.shape, config.train.batch_tokens
    depth = 3 * config.head.blocks * s.hidden if model.medusa else 14 * s.hidden + 4 * model.head_intermediate
    kept = config.head.unroll * depth
    if config.train.checkpointing and not model.medusa:  # one depth, and between depths hidden states, keys, values
        kept = config.head.unroll * (2 * s.hidden + 2 * model.head_kv_heads * model.head_dim) + depth
    if model.peagle:
        kept = _by_pieces(model, config, depth)
    per_token = kept + (model.taps + 1) * s.hidden
    if config.head.medusa2.rank:  # the target is in training too
        block = 14 * s.hidden + 4 * s.intermediate
        per_token += s.layers * s.hidden + block if config.train.checkpointing else s.layers * block
    parts = {
        "weights": model.head * width * (shard[2] + bool(config.head.lora.rank)),  # with LoRA merged ones too
        "gradients": model.head * width * shard[1],
        "optimizer": model.head * state * shard[0],
        "frozen": (model.frozen + (model.target if config.head.medusa2.rank else 0)) * width,
        "activations": tokens * per_token * width + LOGITS,
    }
    return parts | ({"target": target_bytes(model, config)} if target_place(config) == "same" else {})


def target_place(config: RecipeConfig) -> str | None:
    """Where online training has the target, same or apart; None when it trains on stored captures."""
    return config.launch.target if config.data.captures.mode == "online" else None


def target_bytes(model: Model, config: RecipeConfig) -> float:
    """Bytes on its GPUs of the target that reads a micro-batch: weights, the states it keeps, logits, one block."""
    s, width = model.shape, BYTES[config.target.dtype]
    kept = (model.taps + 1) * s.hidden * BYTES[config.data.captures.dtype]
    block = (6 * s.hidden + 3 * s.intermediate) * width
    gpus = config.target.gpus
    weights = _on_each(model.target * width, config, gpus) * gpus
    return weights + config.train.batch_tokens * (kept + block) + LOGITS


def training_processes(config: RecipeConfig, devices: Devices) -> int:
    """Of this machine; with targets apart, a part of its GPUs are theirs."""
    shared = config.launch.gpus == "auto" and target_place(config) == "apart"
    return max(1, devices.gpus // (1 + config.target.gpus) if shared else devices.gpus)


def _by_pieces(model: Model, config: RecipeConfig, depth: int) -> float:
    """Numbers per token that a P-EAGLE head keeps: of several pieces, one and what joins them."""
    train, h, (layers, _) = config.train, model.shape.hidden, model.peagle
    rows = sum(train.position_keep**d for d in range(config.head.unroll))
    whole = layers * rows * depth
    if train.batch_tokens <= PIECE and not train.checkpointing:
        return whole
    joints = layers * (h + 2 * model.head_kv_heads * model.head_dim) + rows * h
    return joints + whole * min(PIECE / train.batch_tokens, 1)


def data_bytes(model: Model, config: RecipeConfig) -> dict[str, float]:
    """Bytes of one process that answers prompts: weights, the cache of one batch, the states it keeps, logits."""
    width, tokens = BYTES[config.target.dtype], config.data.responses.batch_tokens
    kept = (model.taps + 1) * model.shape.hidden * BYTES[config.data.captures.dtype]
    return {
        "weights": model.target * width, "cache": tokens * model.kv_per_token * width, "states": tokens * kept,
        "logits": LOGITS,
    }  # fmt: skip


def rows_of(config: RecipeConfig) -> int | None:
    """Prompts, when every source has a limit."""
    limits = [source.limit for source in config.data.prompts]
    return sum(limits) if limits and all(limits) else None


def row_tokens(config: RecipeConfig) -> int:
    """Tokens of a row, at most."""
    if config.data.responses.backend == "given":
        return config.data.max_length
    return min(config.data.max_length, PROMPT_TOKENS + config.data.responses.max_new_tokens)


@dataclass
class Devices:
    """What a run would use: CUDA devices (0 = a CPU), bytes of one, CPU cores."""

    gpus: int
    bytes: float
    measured: bool
    cores: int


def devices_of(config: RecipeConfig) -> Devices:
    found, cores = gpu_bytes(), len(os.sched_getaffinity(0))
    asked = None if config.launch.gpus == "auto" else int(config.launch.gpus)
    if found:
        return Devices(asked or len(found), min(found), True, cores)
    small = model_of(config).target < 1e9
    return Devices(0 if small and asked is None else asked or 8, ASSUMED_GPU, False, cores)


def gpu_bytes() -> list[float]:
    """Memory of every GPU here, in bytes."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    out = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return [float(line) * 2**20 for line in out.split("\n") if line.strip().isdigit()]


def seconds(model: Model, config: RecipeConfig, devices: Devices, rows: int) -> dict[str, float | None]:
    """Seconds of answering and of training, for `rows` rows of the longest length."""
    total, new = rows * row_tokens(config), rows * min(config.data.responses.max_new_tokens, row_tokens(config))
    passes = config.train.epochs
    used = model.head_active + model.borrows * model.draft_vocab * model.shape.hidden
    used *= 1 + 0.8 * (config.head.unroll - 1)
    if model.medusa:  # every depth has blocks of its own, and uses an lm_head
        depths, _, lm_heads = model.medusa
        used = model.head + (depths - lm_heads) * model.draft_vocab * model.shape.hidden
    flops_per_trained = 6 * used
    place, read = target_place(config), total
    if place == "same":
        flops_per_trained += 2 * model.active
    elif place == "apart":  # the slower of the two
        flops_per_trained = max(flops_per_trained, 2 * model.active)
    if config.data.responses.backend != "local":  # the target reads the answers once, whole
        stored = stored_rows(config, rows, row_tokens(config), model.shape.hidden, model.taps)
        new, read = 0, stored * row_tokens(config)
    if devices.gpus == 0:
        speed = CPU_FLOPS * devices.cores
        answering = 2 * model.active * read / speed
        training = total * (passes or 0) * flops_per_trained / CPU_FLOPS
    else:
        together = max(1, config.data.responses.batch_tokens // row_tokens(config))
        step = max(
            model.target * BYTES[config.target.dtype] / GPU_BANDWIDTH, 2 * model.active * together / GPU_FLOPS
        )
        processes = max(1, devices.gpus // config.target.gpus)  # blocks on several GPUs work one after another
        answering = (new / together * step + 2 * model.active * (read - new) / GPU_FLOPS) / processes
        training = total * (passes or 0) * flops_per_trained / GPU_FLOPS / training_processes(config, devices)
    return {"answering": answering, "training": config.train.seconds or (training if passes else None)}


# ------------------------------------------------------------------------------------------------- the text

def text(config: RecipeConfig) -> str:
    """The whole plan as text."""
    model, devices = model_of(config), devices_of(config)
    s, width = model.shape, BYTES[config.target.dtype]
    active = f", {count(model.active)} of them for each token" if s.experts else ""
    lines = [
        f"plan for {config.target.model or config.target.family} "
        f"({s.layers} blocks, hidden {s.hidden}, vocabulary {s.vocab:,}); no weights were loaded",
        "",
        f"target     {count(model.target)} parameters{active} (counted as untied), "
        f"{size(model.target * width)} in {config.target.dtype}; cache {size(model.kv_per_token * width)} per token",
        f"head       {count(model.head)} parameters ({config.head.type}, {model.taps} taps, draft vocabulary "
        f"{model.draft_vocab:,}), {size(model.head * 2)} as served in bfloat16",
    ]
    for part in (_data_lines, _training_lines, _disk_lines, _time_lines):
        lines += ["", *part(model, config, devices)]
    return "\n".join(lines)


def _data_lines(model: Model, config: RecipeConfig, devices: Devices) -> list[str]:
    parts, each, room = data_bytes(model, config), config.target.gpus, devices.bytes
    what = "responses and captures" if config.data.responses.backend == "local" else "captures"
    tokens = config.data.responses.batch_tokens
    lines = [
        f"{what}, one process ({tokens:,} tokens a batch): {size(sum(parts.values()))}",
        "  " + ", ".join(f"{name} {size(value)}" for name, value in parts.items()),
    ]
    if devices.gpus == 0:
        return [*lines, f"  on a CPU: {devices.cores} cores, each process needs that much memory"]

    def on_first(gpus: int) -> float:
        """Bytes on the first of so many GPUs: blocks with their caches are shared out, the rest lies there."""
        return _on_each(parts["weights"], config, gpus) + parts["cache"] / gpus + parts["states"] + parts["logits"]

    one = f"one GPU of {size(room)}{_origin(devices)}"
    those = one if each == 1 else f"{each} GPUs of {size(room)} together{_origin(devices)} (target.gpus)"
    if on_first(each) <= room:
        count_of = max(1, devices.gpus // each)
        return [*lines, f"  fits {those}: " + ("one process per GPU" if each == 1 else f"{count_of} such processes")]
    spare, per_token = room - on_first(each) + parts["cache"] / each + parts["states"], parts["cache"] / each
    fitting = int(spare / ((per_token + parts["states"]) / tokens))
    enough = next((n for n in range(each + 1, 257) if on_first(n) <= 0.9 * room), None)
    ways = [f"lower data.responses.batch_tokens to {fitting:,}"] if fitting > 0 else []
    ways += [f"set target.gpus={enough}, as many GPUs together"] if enough else []
    return [*lines, f"  too much for {those}: {', or '.join(ways) or 'use a smaller target'}"]


def _on_each(weights: float, config: RecipeConfig, gpus: int) -> float:
    """Bytes of the target's weights on each of `gpus`; what exceeds target.gpu_memory waits in the CPU's memory."""
    most = config.target.gpu_memory
    return weights / gpus if most is None else min(weights / gpus, most * 1e9)


def _origin(devices: Devices) -> str:
    return "" if devices.measured else " (assumed; none is here)"


def _training_lines(model: Model, config: RecipeConfig, devices: Devices) -> list[str]:
    count_of = training_processes(config, devices)
    columns = [("weights", 8), ("gradients", 9), ("optimizer", 9), ("frozen", 7), ("activations", 11)]
    columns += [("target", 8)] if target_place(config) == "same" else []
    head = "  ".join(name.rjust(width) for name, width in columns)
    lines = [
        f"training on {count_of} {'GPU' if devices.gpus else 'CPU process'}{'s' if count_of > 1 else ''}, per process "
        f"({config.train.batch_tokens:,} tokens, unroll depth {config.head.unroll}, {config.train.precision}):",
        f"  ZeRO  {head}  together",
    ]  # fmt: skip
    for zero in range(4):
        parts = training_bytes(model, config, count_of, zero)
        cells = "  ".join(size(parts[name]).rjust(width) for name, width in columns)
        chosen = "  <- train.zero_stage" if zero == config.train.zero_stage else ""
        fits = "" if not devices.gpus or sum(parts.values()) <= devices.bytes else "  does not fit"
        lines.append(f"  {zero}     {cells}  {size(sum(parts.values())):>8}{fits}{chosen}")
    if target_place(config) == "apart":
        apart, gpus = target_bytes(model, config), config.target.gpus
        fits = "" if not devices.gpus or apart <= devices.bytes * gpus else "  does not fit: raise target.gpus"
        lines.append(f"  beside each the target on {gpus} more (launch.target=apart): {size(apart)}{fits}")
    return lines


def _disk_lines(model: Model, config: RecipeConfig, devices: Devices) -> list[str]:
    token = bytes_per_token(model.shape.hidden, model.taps, config.data.captures.dtype)
    tokens, rows, free = row_tokens(config), rows_of(config), free_bytes(config.run_dir or ".")
    online = config.data.captures.mode == "online"
    count_of = stored_rows(config, rows or 10_000, tokens, model.shape.hidden, model.taps)
    total = token * tokens * count_of
    which = "for about" if online else "at most for all" if rows else "at most for every"
    lines = [
        f"captures   {token:,} B per token ({model.taps} taps + last hidden, {config.data.captures.dtype}), "
        f"{token * tokens:,} B per row of {tokens:,} tokens",
        f"           {size(total)} {which} {count_of:,} rows{ONLINE * online}; free {size(free)}",
    ]
    if rows and total > free:
        then = "starts all the same" if config.data.captures.allow_low_disk else "does not start"
        ways = what_helps(config.data.captures.dtype, config.data.responses.backend == "given", total, online)
        lines += [f"           TOO LITTLE SPACE: a run {then}. What helps: {ways}"]
    if not rows:
        lines.append("           (no source has a limit, so the number of rows is not known before they are read)")
    return lines


def _time_lines(model: Model, config: RecipeConfig, devices: Devices) -> list[str]:
    rows = rows_of(config) or 10_000
    found = seconds(model, config, devices, rows)
    training = duration(found["training"]) if found["training"] else "set train.epochs or train.seconds to see it"
    if devices.gpus:
        assumed = f"{GPU_FLOPS / 1e12:.0f} TFLOP/s and {GPU_BANDWIDTH / 1e12:.1f} TB/s sustained by each GPU"
    else:
        assumed = f"{CPU_FLOPS / 1e9:.0f} GFLOP/s sustained by each core"
    answers = "responses" if target_place(config) else "responses with captures"
    what = {"local": answers, "server": "captures (besides the servers' time for the responses)"}
    what = what.get(config.data.responses.backend, "captures")
    given = config.data.responses.backend == "given"
    rows_by = "data.max_length, at most" if given else f"prompts of {PROMPT_TOKENS}"
    return [
        f"time       for {rows:,} rows: {what} {duration(found['answering'])}, training {training}",
        f"           assumed: {assumed}, rows of {row_tokens(config):,} tokens ({rows_by});",
        f"           {'shorter rows' if given else 'answers that end early'} make a real run faster",
    ]


def size(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def count(value: float) -> str:
    for unit in ("", " k", " M"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g} B"


def duration(value: float) -> str:
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
