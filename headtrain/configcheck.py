"""What the keys of a config may hold, one by one (`RULES`) and together (`validate`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from headtrain.config import (
    DRAFTERS,
    HEAD_DRAFTERS,
    HEAD_KEYS,
    HEAD_TYPES,
    OF_ENGINE,
    OF_SERVERS,
    SCRATCH,
    TRAIN_KEYS,
    ConfigError,
    DataConfig,
    EvalConfig,
    HeadSection,
    RecipeConfig,
    ResponsesConfig,
    ShapeConfig,
    TargetConfig,
    TrainConfig,
)
from headtrain.engines import EXPORT_FORMATS
from headtrain.privacy import masked
from headtrain.vocabfile import is_file


@dataclass
class Rule:
    """`check` is asked about one value (each item of a list); `allowed` completes "allowed: …"."""

    check: Callable[[Any], bool]
    allowed: str


def _number(low: float, high: float = math.inf, *, open_low: bool = False) -> Rule:
    def check(value: Any) -> bool:
        return math.isfinite(value) and (low < value if open_low else low <= value) and value <= high

    lower = f"above {low:g}" if open_low else f"{low:g} or more"
    return Rule(check, lower if math.isinf(high) else f"{'above ' if open_low else ''}{low:g} … {high:g}")


def _one_of(*choices: Any) -> Rule:
    return Rule(lambda value: value in choices, ", ".join(map(str, choices)))


def _matching(pattern: str, allowed: str) -> Rule:
    return Rule(lambda value: re.fullmatch(pattern, str(value)) is not None, allowed)


_COUNT, _SHARE = _number(1), _number(0, 1)
_DTYPE = _one_of("float32", "bfloat16", "float16")
_PROCESSES = _matching(r"auto|[1-9]\d*", "auto, or 1 or more")

# What each key may hold. A key that is None is not looked up; text keys that are free have no rule.
RULES: dict[str, Rule] = {
    **{f"target.shape.{key.name}": _COUNT for key in fields(ShapeConfig)},
    **dict.fromkeys(("target.shape.shared_experts", "target.shape.dense_layers"), _number(0)),
    "target.dtype": _one_of("auto", "float32", "bfloat16", "float16"),
    "target.device": _matching(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda, cuda:N"),
    "target.gpus": _COUNT,
    "target.split": _one_of("layers", "tensor"),
    **dict.fromkeys(("target.gpu_memory", "target.cpu_memory"), _number(0, open_low=True)),
    "data.prompts.source": _matching(r".*\S.*", "a file, a folder, package:NAME/FILE, or a Hub data set (user/name)"),
    "data.prompts.limit": _COUNT,
    "data.prompts.weight": _number(0, open_low=True),
    "data.filter.min_chars": _number(0),
    "data.filter.max_chars": _COUNT,
    "data.filter.min_ascii": _SHARE,
    "data.filter.min_letters": _SHARE,
    "data.held_out": _number(0),
    "data.valid": _number(0),
    "data.max_length": _number(2),
    "data.turns": _COUNT,
    "data.responses.backend": _one_of("local", "server", "given"),
    "data.responses.urls": _matching(
        r"https?://[^/@\s?#]+(/[^@\s?#]*)?", "http://HOST:PORT, without a password, key or query in it"
    ),
    **{f"data.responses.{key}": _COUNT for key in ("concurrency", "tries")},
    **{f"data.responses.{key}": _number(0, open_low=True) for key in ("timeout", "patience")},
    "data.responses.temperature": _number(0),
    "data.responses.top_p": _number(0, 1, open_low=True),
    "data.responses.max_new_tokens": _COUNT,
    "data.responses.batch_tokens": _COUNT,
    "data.captures.backend": _one_of("local", "vllm"),
    "data.captures.dtype": _one_of("float32", "bfloat16", "float16", "float8"),
    "data.captures.mode": _one_of("offline", "online"),
    "head.type": _one_of(*HEAD_TYPES),
    "head.taps": _COUNT,
    "head.layers": _COUNT,
    "head.mask_token": _number(0),
    "head.dialect": _one_of("deepseek", "qwen", "mimo"),
    "head.start": _one_of("calibrated", "random"),
    "head.unroll": _number(1, 64),
    **dict.fromkeys(("head.lora.rank", "head.medusa2.rank"), _COUNT),
    **dict.fromkeys(("head.lora.alpha", "head.medusa2.alpha"), _number(0, open_low=True)),
    "head.medusa2.lr": _number(0, open_low=True),
    "head.medusa2.heads_first": _SHARE,
    "head.medusa2.distill": _number(0),
    "head.blocks": _COUNT,
    "head.draft_vocab": _matching(r"full|[1-9]\d*|.*\.json", "a size of 1 or more, full, or a .json file"),
    **{f"head.{key}": _COUNT for key in ("intermediate", "heads", "kv_heads", "head_dim")},
    "train.epochs": _number(0, open_low=True),
    "train.steps": _COUNT,
    "train.seconds": _number(0, open_low=True),
    "train.batch_tokens": _number(8),
    "train.accumulate": _COUNT,
    "train.lr": _number(0, open_low=True),
    "train.optimizer": _one_of("adamw", "muon"),
    "train.betas": Rule(lambda value: 0 <= value < 1, "two numbers, each 0 or more and below 1"),
    "train.weight_decay": _number(0),
    "train.muon_lr": _number(0, open_low=True),
    "train.muon_momentum": Rule(lambda value: 0 <= value < 1, "0 or more and below 1"),
    "train.clip": _number(0),
    "train.warmup": _SHARE,
    "train.schedule": _one_of("cosine", "linear", "wsd", "constant"),
    "train.min_lr": _SHARE,
    "train.objective": _one_of("soft_ce", "lk_alpha", "lk_hybrid", "tv"),
    "train.hard_weight": _SHARE,
    "train.feature_weight": _number(0),
    "train.weights": _one_of("decay", "dpace", "vat"),
    "train.position_keep": _number(0, 1, open_low=True),
    "train.noise": _number(0),
    "train.decay": _number(0, 1, open_low=True),
    "train.precision": _one_of("auto", "bf16", "fp32", "fp16"),
    "train.zero_stage": _one_of(0, 1, 2, 3),
    "train.ema": Rule(lambda value: 0 <= value < 1, "0 or more and below 1"),
    "train.spike": Rule(lambda value: value == 0 or 1 < value < math.inf, "0, or above 1"),
    "train.patience": _COUNT,
    "train.save_every": _COUNT,
    "train.keep": _COUNT,
    "train.eval_every": _COUNT,
    "train.eval_rows": _COUNT,
    "train.decode_prompts": _number(0),
    "train.log_every": _COUNT,
    "train.threads": _COUNT,
    "eval.limit": _COUNT,
    "eval.k": _number(1, 64),
    "eval.temperature": _number(0),
    "eval.top_p": _number(0, 1, open_low=True),
    "eval.top_k": _number(0),
    "eval.min_p": _SHARE,
    "eval.tree": _matching(
        r"chain|static-[1-9]\d*|(iid-)?([2-9]|[1-9]\d+)x[1-9]\d*",
        "chain, WIDTHxNODES such as 4x16, iid-WIDTHxNODES such as iid-2x8, or static-NODES such as static-16",
    ),
    "eval.rule": _one_of("exact", "block", "typical"),
    "eval.batch": _COUNT,
    "eval.drafters": _one_of(*DRAFTERS),
    "eval.skip_from": _COUNT,
    **{f"eval.ngram_{key}": _COUNT for key in ("n", "m", "hits")},
    "eval.min_confidence": _SHARE,
    "eval.plain_below": _SHARE,
    "eval.dtype": _DTYPE,
    "eval.max_new_tokens": _COUNT,
    "eval.speed_prompts": _number(0),
    "eval.speed_tokens": _COUNT,
    "eval.cost_batches": _COUNT,
    "export.formats": _one_of(*EXPORT_FORMATS),
    "push.repo": _matching(
        r"(?a)(?!.*(--|\.\.|\.git$))(?=.{3,96}$)\w([\w.-]*\w)?/\w([\w.-]*\w)?", "USER/NAME on the Hub"
    ),
    "push.revision": _matching(r"(?a)(?![0-9a-f]{40}$)(?!.*(\.\.|//))\w([\w./-]*\w)?", "the name of a branch"),
    "launch.gpus": _PROCESSES,
    "launch.target": _one_of("same", "apart"),
    "launch.workers": _PROCESSES,
    "launch.master_port": _number(1, 65535),
    "seed": _number(0, 2**63 - 1),
    "logger": _one_of("none", "wandb"),
}


def validate(config: RecipeConfig) -> None:
    """Raises ConfigError naming the first key whose value is out of range, or keys that contradict each other."""
    _check_values("", config)
    shape, head, train = config.target.shape, config.head, config.train
    if config.data.held_out + config.data.valid == 0 and config.data.prompts:
        raise ConfigError("data.held_out=0 and data.valid=0 leave nothing to measure on; set data.held_out")
    if config.data.filter.max_chars and config.data.filter.max_chars < config.data.filter.min_chars:
        raise ConfigError(
            f"data.filter.max_chars={config.data.filter.max_chars} is below data.filter.min_chars="
            f"{config.data.filter.min_chars}: no prompt can pass"
        )
    _validate_target(config)
    _validate_data(config.data)
    _validate_servers(config)
    _validate_engine(config)
    if shape.heads and shape.kv_heads and shape.heads % shape.kv_heads:
        raise ConfigError(f"target.shape.heads={shape.heads}: not a multiple of target.shape.kv_heads={shape.kv_heads}")
    if shape.experts and not (shape.experts_per_token and shape.expert_intermediate):
        raise ConfigError(
            "target.shape.experts: write target.shape.experts_per_token and target.shape.expert_intermediate too"
        )
    if head.taps is not None and (len(set(head.taps)) != len(head.taps) or head.taps != sorted(head.taps)):
        raise ConfigError(f"head.taps={head.taps}: taps must be different and ascending")
    if head.taps is not None and shape.layers and head.taps[-1:] > [shape.layers]:
        raise ConfigError(f"head.taps={head.taps}: the target has blocks 1 … {shape.layers}")
    if isinstance(head.draft_vocab, int) and shape.vocab and head.draft_vocab > shape.vocab:
        raise ConfigError(
            f"head.draft_vocab={head.draft_vocab} exceeds the target's {shape.vocab} tokens; write `full` for all"
        )
    if head.rebuild_vocab and not head.init_from and not config.smoke:  # a smoke run has no parent
        raise ConfigError(
            "head.rebuild_vocab=true without head.init_from: a fresh head's draft vocabulary is new anyway; "
            "set head.init_from, or leave head.rebuild_vocab out"
        )
    if is_file(head.draft_vocab) and head.init_from not in (None, SCRATCH) and not head.rebuild_vocab:
        raise ConfigError(
            f"head.draft_vocab={head.draft_vocab} with head.init_from: the parent has a draft vocabulary of its own; "
            "set head.rebuild_vocab=true to change it"
        )
    if len(train.betas) != 2:
        raise ConfigError(f"train.betas={train.betas}: two numbers are needed")
    if train.offload and train.zero_stage == 0:
        raise ConfigError("train.offload=true needs train.zero_stage of 1 or more: it is ZeRO's state that moves")
    if train.offload and train.optimizer == "muon":
        raise ConfigError("train.offload=true with train.optimizer=muon: Muon needs the GPU; use adamw")
    if config.data.valid == 0 and (train.patience or train.decode_prompts):
        key = "patience" if train.patience else "decode_prompts"
        raise ConfigError(f"train.{key} with data.valid=0: there are no validation prompts; set data.valid")
    if train.decode_prompts > train.eval_rows:
        raise ConfigError(
            f"train.decode_prompts={train.decode_prompts} exceeds train.eval_rows={train.eval_rows}"
        )
    if not config.push.repo:
        for key in fields(config.push):
            if (value := getattr(config.push, key.name)) != key.default:
                raise ConfigError(f"push.{key.name}={value}: nothing is uploaded without push.repo; set that too")
    if config.launch.target == "apart" and config.data.captures.mode == "offline":
        raise ConfigError("launch.target=apart: training has no target; set data.captures.mode=online too")
    if config.data.captures.mode == "online" and config.target.split == "tensor":
        raise ConfigError("target.split=tensor with data.captures.mode=online: leave one of them out")
    if config.data.captures.mode == "online" and config.launch.target == "same" and config.target.gpus > 1:
        raise ConfigError(
            f"target.gpus={config.target.gpus} with data.captures.mode=online: set launch.target=apart too"
        )
    if config.launch.target == "apart" and config.launch.hostfile:
        raise ConfigError(
            "launch.target=apart with launch.hostfile: DeepSpeed's launcher shows processes their own GPUs alone; "
            "start `headtrain train` by srun or another launcher"
        )
    _validate_head(head, train)
    _validate_lora(head, train, config.smoke)
    _validate_medusa2(config)
    _validate_eval(config.eval, shape)


def _validate_target(config: RecipeConfig) -> None:
    """A target that lies on several devices is run, not changed or trained, and has its GPUs for itself."""
    target = config.target
    if target.split == "tensor":
        if target.gpus == 1:
            raise ConfigError("target.split=tensor: set target.gpus too, the number of its parts")
        for key in ("gpu_memory", "cpu_memory"):
            if getattr(target, key) is not None:
                raise ConfigError(f"target.{key}: not used with target.split=tensor; leave it out")
    spread = [key for key in ("gpus", "gpu_memory", "cpu_memory") if getattr(target, key) != getattr(TargetConfig, key)]
    if not spread:
        return
    key = f"target.{spread[0]}={getattr(target, spread[0])}"
    if target.adapter:
        raise ConfigError(f"target.adapter with {key}: save the merged model, and give its folder as target.model")
    if re.fullmatch(r"cuda:\d+", target.device):
        raise ConfigError(f"target.device={target.device} with {key}: write target.device=cuda")
    if config.head.medusa2.rank:
        raise ConfigError(f"head.medusa2.rank with {key}: a target in training lies on each process's one GPU")
    if config.train.decode_prompts:
        raise ConfigError(f"train.decode_prompts with {key}: training holds the GPUs then; leave it out")


def _validate_data(data: DataConfig) -> None:
    given = data.responses.backend == "given"
    if data.turns > 1 and given:
        raise ConfigError(f"data.turns={data.turns}: given answers keep all their turns; leave it out")
    if data.keep_truncated and not given:
        raise ConfigError("data.keep_truncated=true is about given answers; set data.responses.backend=given")
    weighted = [place.source for place in data.prompts if place.weight is not None]
    if weighted and len(weighted) < len(data.prompts):
        raise ConfigError(f"data.prompts: {weighted[0]} has a weight; give every source one, or none")


def _validate_servers(config: RecipeConfig) -> None:
    rule, where = config.data.responses, "data.responses.backend=server"
    if rule.backend != "server":
        for key in OF_SERVERS:
            if (value := getattr(rule, key)) != getattr(ResponsesConfig(), key):
                raise ConfigError(f"data.responses.{key}={value}: set {where} too, or leave it out")
    elif not rule.urls:
        raise ConfigError(f"{where} needs data.responses.urls=[http://HOST:PORT,…]")
    elif config.target.adapter and not rule.model:
        raise ConfigError(f"target.adapter with {where}: set data.responses.model to the name it is served by")


def _validate_engine(config: RecipeConfig) -> None:
    rule, where = config.data.captures, "data.captures.backend=vllm"
    if rule.backend != "vllm":
        for key, value in rule.engine.items():
            raise ConfigError(f"data.captures.engine.{key}={value}: set {where} too, or leave it out")
    elif config.data.responses.backend == "local":
        raise ConfigError(
            f"{where} with data.responses.backend=local: the target's states are kept while it answers, so nothing is "
            "left for vLLM to do; let servers answer (data.responses.backend=server), or leave it out"
        )
    elif config.target.adapter:
        raise ConfigError(f"{where} with target.adapter: vLLM loads target.model; save it with the adapter merged")
    elif rule.mode == "online":
        raise ConfigError(
            f"{where} with data.captures.mode=online: training asks the target as it is loaded here; leave one out"
        )
    for key, value in rule.engine.items():
        if key in OF_ENGINE:
            raise ConfigError(f"data.captures.engine.{key}={value}: headtrain sets this itself; leave it out")
        if key.endswith("_parallel_size") and not (type(value) is int and value > 0):
            raise ConfigError(f"data.captures.engine.{key}={value}: not allowed; allowed: 1 or more")


def _validate_head(head: HeadSection, train: TrainConfig) -> None:
    for section, node, owners in (("head", head, HEAD_KEYS), ("train", train, TRAIN_KEYS)):
        for key in fields(node):
            types, value = owners.get(key.name, HEAD_TYPES), getattr(node, key.name)
            if (section, key.name) == ("train", "checkpointing") and head.medusa2.rank:
                continue  # of the target's own blocks
            if head.type not in types and value != key.default:
                raise ConfigError(
                    f"{section}.{key.name}={value}: heads of type {head.type} have no such setting "
                    f"(only {', '.join(types)}); leave it out"
                )
    if head.type == "mtp" and head.init_from is None:
        for key in ("intermediate", "heads", "kv_heads", "head_dim", "dialect"):
            if (value := getattr(head, key)) is not None:
                raise ConfigError(
                    f"head.{key}={value}: the target's own MTP module has a {key} already; leave it out, "
                    f"or set head.init_from={SCRATCH} for a new module"
                )
    if head.type == "eagle" and head.draft_vocab != "full":
        raise ConfigError(
            f"head.draft_vocab={head.draft_vocab}: heads of type {head.type} draft with the target's own lm_head, over "
            "all its tokens; set head.draft_vocab=full"
        )
    if head.type == "medusa" and not head.share_lm_head:
        if head.freeze_lm_head:
            raise ConfigError("head.freeze_lm_head=true: frozen copies would all be the same; set head.share_lm_head")
        if train.weights != "decay":
            raise ConfigError(f"train.weights={train.weights}: depths are weighed together; set head.share_lm_head")


def _validate_lora(head: HeadSection, train: TrainConfig, smoke: bool) -> None:
    lora = head.lora
    if lora.rank is None:
        for key in ("alpha", "targets"):
            if (value := getattr(lora, key)) is not None:
                raise ConfigError(f"head.lora.{key}={value} without head.lora.rank: set the rank too")
        return
    where = f"head.lora.rank={lora.rank}"
    if head.init_from in (None, SCRATCH) and not smoke:  # a smoke run has no parent
        raise ConfigError(f"{where}: factors change a head that exists; give one as head.init_from")
    if train.optimizer == "muon":
        raise ConfigError(f"{where} with train.optimizer=muon: Muon is for whole matrices; use adamw")
    if head.train_embedding:
        raise ConfigError(f"{where} with head.train_embedding=true: all but the factors is frozen; leave one out")
    if head.freeze_lm_head and any("lm_head" in target for target in lora.targets or ()):
        raise ConfigError(f"head.lora.targets={lora.targets} with head.freeze_lm_head=true; leave one out")


def _validate_medusa2(config: RecipeConfig) -> None:
    head, train = config.head, config.train
    if head.medusa2.rank is None:
        for key in fields(head.medusa2):
            if (value := getattr(head.medusa2, key.name)) != key.default:
                raise ConfigError(f"head.medusa2.{key.name}={value} without head.medusa2.rank: set the rank too")
        return
    where = f"head.medusa2.rank={head.medusa2.rank}"
    if head.type != "medusa":
        raise ConfigError(f"{where}: only heads of type medusa are trained along with the target; leave it out")
    refused = {
        "target.adapter": config.target.adapter, "head.lora.rank": head.lora.rank, "train.ema": train.ema,
        "train.decode_prompts": train.decode_prompts, "train.zero_stage": train.zero_stage == 3 and 3,
        "train.optimizer": train.optimizer == "muon" and "muon",
    }  # fmt: skip
    for key, value in refused.items():
        if value:
            raise ConfigError(f"{where} with {key}={value}: this does not go with a target in training; leave it out")


def _validate_eval(e: EvalConfig, shape: ShapeConfig) -> None:
    if len(e.speed_prompts) not in (1, len(e.suites)):
        raise ConfigError(
            f"eval.speed_prompts={e.speed_prompts}: give one number, or one per suite ({len(e.suites)})"
        )
    own = {
        "draft_model": ("draft_model",), "skip_from": ("layer_skip",),
        **dict.fromkeys(("ngram_n", "ngram_m"), tuple(name for name in DRAFTERS if "ngram" in name)),
        "ngram_hits": ("ngram-map-k", "ngram-map-k4v"), "min_confidence": (*HEAD_DRAFTERS, "draft_model", "layer_skip"),
    }  # fmt: skip
    for key, drafters in own.items():
        value, used = getattr(e, key), [name for name in e.drafters if name in drafters]
        if value and not used:
            raise ConfigError(f"eval.{key}={value}: only for {', '.join(drafters)}, which eval.drafters does not have")
        if not value and used and key in ("draft_model", "skip_from"):
            raise ConfigError(f"eval.drafters has {used[0]}, which needs eval.{key}")
    if e.skip_from and shape.layers and e.skip_from >= shape.layers:
        raise ConfigError(f"eval.skip_from={e.skip_from}: fewer than the target's {shape.layers} layers are needed")
    trees = [tree for tree in e.tree if tree != "chain"]
    if trees and not any(name in HEAD_DRAFTERS for name in e.drafters):
        raise ConfigError(f"eval.tree={trees[0]}: only heads draft such trees, and eval.drafters has none with a head")
    if e.rule == "block" and (trees or "head+ngram-tree" in e.drafters):
        raise ConfigError(f"eval.rule=block takes chains; leave out {trees[0] if trees else 'drafter head+ngram-tree'}")
    if max(e.temperature) == 0:
        for key in (f"tree={tree}" for tree in trees if tree.startswith("iid")):
            raise ConfigError(f"eval.{key}: children are drawn independently, which needs a temperature above 0")


def _check_values(prefix: str, node: Any) -> None:
    for key in fields(node):
        path, value = f"{prefix}{key.name}", getattr(node, key.name)
        if is_dataclass(value):
            _check_values(f"{path}.", value)
            continue
        if isinstance(value, list) and not value and path in _NEVER_EMPTY:
            raise ConfigError(f"{path}=[]: at least one value is needed; allowed: {RULES[path].allowed}")
        if path in _DISTINCT and (twice := [item for i, item in enumerate(value) if item in value[:i]]):
            raise ConfigError(f"{path}={value}: {twice[0]} is given twice and would be counted twice; leave one out")
        for item in value if isinstance(value, list) else [value]:
            if is_dataclass(item):
                _check_values(f"{path}.", item)
            elif item is not None and path in RULES and not RULES[path].check(item):
                raise ConfigError(masked(f"{path}={item}: not allowed; allowed: {RULES[path].allowed}"))


_NEVER_EMPTY = {
    "eval.k", "eval.tree", "eval.temperature", "eval.batch", "eval.speed_prompts", "train.betas", "head.taps"
}  # fmt: skip
_DISTINCT = {
    "data.responses.urls", *(f"eval.{key}" for key in ("k", "tree", "temperature", "batch", "drafters", "suites"))
}  # fmt: skip
