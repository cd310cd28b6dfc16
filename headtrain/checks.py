"""What is looked at before a run's stages begin, so that what can be known to fail fails at once, not after hours.

No weights are loaded here: the target's config and tokenizer, its template and taps, servers and suites.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headtrain import vocabfile
from headtrain.children import NOTE
from headtrain.config import BY_DEPTH, TAPPED, ConfigError, RecipeConfig, TargetConfig
from headtrain.facts import text_marks
from headtrain.hardware import fast_bf16
from headtrain.plan import EXPERT_NAMES


def check(config: RecipeConfig, run: Path, options: dict[str, str]) -> None:
    """Everything that can be known to fail in the stages to come is looked at now: target, template, taps, suites."""
    from headtrain.adapter import read_adapter
    from headtrain.data_gen.chat import check_template

    whole, tokenizer = whole_config(config.target), load_tokenizer(config.target)
    text = whole.get_text_config()
    check_shape(config, text)
    check_quantised(config, whole)
    if config.target.adapter:
        read_adapter(config.target)
    check_template(tokenizer, config.target.template_kwargs)
    coming = options["coming"].split(",")
    if "responses" in coming and config.data.responses.backend == "server":
        from headtrain.data_gen import server

        if not server.all_kept(run / "responses"):
            server.check(config, tokenizer, text.vocab_size, server.end_ids(config.target, text, tokenizer))
    if "captures" in coming and config.data.captures.backend == "vllm":
        from headtrain.data_gen import vllm_states

        vllm_states.check(config)
    most = getattr(text, "max_position_embeddings", None)
    if "responses" in coming and most and config.data.max_length > most:
        raise ConfigError(f"data.max_length={config.data.max_length}: the target has {most} positions")
    if "training" in coming:
        import torch

        from headtrain.training.optim import check_optimizer

        check_optimizer(config.train, config.target.device != "cpu" and torch.cuda.is_available())
    slow = {"target.dtype": config.target.dtype == "bfloat16", "train.precision": config.train.precision == "bf16"}
    if any(slow.values()) and not fast_bf16(config.target.device):
        keys = " ".join(f"{key}=auto" for key, is_slow in slow.items() if is_slow)
        print(f"{NOTE}this CPU is several times slower in bfloat16 than in float32; set {keys}", flush=True)
    if "training" in coming or "captures" in coming:
        taps_of(config, text.num_hidden_layers)
    if "training" in coming and config.head.type == "mtp" and config.head.init_from is None:
        from headtrain.heads.mtp_checkpoint import locate_module, tensor_files

        where = f"target.model={config.target.model}"
        locate_module(set(tensor_files(config.target)), text.num_hidden_layers, where)
    head, vocab, deepest = config.head, config.head.draft_vocab, max(config.eval.k)
    if "training" in coming and isinstance(vocab, int) and vocab > text.vocab_size:
        raise ConfigError(f"head.draft_vocab={vocab}: the target has {text.vocab_size} tokens")
    if "training" in coming and vocabfile.is_file(vocab):
        vocabfile.read(vocab, text.vocab_size, text_marks(tokenizer)["tokenizer"])
    if "training" in coming and head.type in BY_DEPTH and deepest > head.unroll:
        raise ConfigError(f"eval.k={deepest}: a {head.type} head drafts at most head.unroll={head.unroll} tokens")
    if "report" in coming:
        check_eval(config, run, text.num_hidden_layers)


def check_eval(config: RecipeConfig, run: Path, layers: int) -> None:
    """Suites that can be read, tree shapes, and a layer to draft from."""
    from headtrain.eval.decoder.drafters.shape import TreeShape
    from headtrain.eval.suites import base_name, load_suite

    for tree in config.eval.tree:
        TreeShape.parse(tree)
    if config.eval.skip_from and config.eval.skip_from >= layers:
        raise ConfigError(f"eval.skip_from={config.eval.skip_from}: fewer than the target's {layers} layers are needed")
    names = [base_name(suite) for suite in config.eval.suites]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"eval.suites: two suites would both be called {twice[0]}; rename one of the files")
    for suite in config.eval.suites:
        if suite != "heldout" or (run / "prompts" / "prompts.jsonl").is_file():
            load_suite(suite, run / "prompts", config.eval.limit)


def check_shape(config: RecipeConfig, text: Any) -> None:
    """ConfigError where the recipe's target.shape or family disagrees with the model's own config."""
    own: dict[str, Any] = {
        "layers": text.num_hidden_layers, "hidden": text.hidden_size, "heads": text.num_attention_heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        "intermediate": getattr(text, "intermediate_size", None), "vocab": text.vocab_size,
    }  # fmt: skip
    own |= {key: next((getattr(text, name) for name in names if hasattr(text, name)), None)
            for key, names in EXPERT_NAMES.items()}  # fmt: skip
    for key, value in vars(config.target.shape).items():
        if value is not None and own.get(key) is not None and value != own[key]:
            raise ConfigError(f"target.shape.{key}={value}: {config.target.model} has {own[key]}; correct the recipe")


def check_quantised(config: RecipeConfig, whole: Any) -> None:
    """ConfigError where the target is quantised in a way that cannot be run here, or is to be trained along."""
    import torch

    from headtrain import quantised

    if config.head.medusa2.rank and (words := quantised.in_words(whole)):
        raise ConfigError(f"head.medusa2.rank: a quantised target ({words}) cannot be trained along")
    try:
        quantised.check(whole, "cuda" if config.target.device != "cpu" and torch.cuda.is_available() else "cpu")
    except ValueError as error:
        raise ConfigError(f"target.model={config.target.model}: {error}") from error


def target_config(target: TargetConfig) -> Any:
    """The text config of the target, without its weights."""
    return whole_config(target).get_text_config()


def whole_config(target: TargetConfig) -> Any:
    from transformers import AutoConfig

    from headtrain.target import model_path

    code = {"revision": target.revision, "trust_remote_code": target.trust_remote_code}
    return AutoConfig.from_pretrained(model_path(target), **code)


def load_tokenizer(target: TargetConfig) -> Any:
    from transformers import AutoTokenizer

    from headtrain.target import model_path, with_template

    place = model_path(target)
    code = {"revision": target.revision, "trust_remote_code": target.trust_remote_code}
    return with_template(AutoTokenizer.from_pretrained(place, **code), target)


def taps_of(config: RecipeConfig, num_layers: int) -> list[int]:
    from headtrain.engines import check_taps, default_taps

    if config.head.type not in TAPPED:
        return []
    return check_taps(config.head.taps if config.head.taps is not None else default_taps(num_layers), num_layers)
