"""`smoke=true`: any recipe on a tiny random target of the same family, with our own prompts, without a network.

The target gets a byte-level tokenizer (256 bytes and a few special tokens) and a chat template of our own, and is saved
as an ordinary model folder, so that every later stage runs as it does for a real one.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

from headtrain.config import (
    BY_DEPTH,
    SCRATCH,
    ConfigError,
    LoraSection,
    PromptFilter,
    PromptSource,
    RecipeConfig,
    ResponsesConfig,
    ShapeConfig,
)
from headtrain.files import room_for

PROMPTS = "package:headtrain.data_gen/smoke_prompts.jsonl"
SHAPE = ShapeConfig(layers=8, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=384)
SPECIAL = ["<|pad|>", "<|turn|>", "<|end|>"]
TINY = {  # settings that a family has besides, where they are not None
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4), "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32), "first_k_dense_replace": 1,
    **dict.fromkeys(("n_group", "topk_group"), 1), **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16), "sliding_window": 64,
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def shrink(config: RecipeConfig) -> RecipeConfig:
    """The config of the recipe's smoke run: same family, head and objective; tiny target, few rows, few steps."""
    if not config.target.family:
        raise ConfigError("smoke=true needs target.family, the transformers model_type of the target (llama, qwen3, …)")
    small = copy.deepcopy(config)
    small.target.model = str(target_folder(config))
    small.target.shape, small.target.revision, small.target.device = copy.deepcopy(SHAPE), None, "cpu"
    small.target.adapter = small.target.adapter_revision = small.target.chat_template = None
    small.target.dtype, small.target.gpus, small.target.split = "float32", 1, "layers"
    small.target.gpu_memory = small.target.cpu_memory = None
    if config.target.shape.heads and config.target.shape.heads == config.target.shape.kv_heads:
        small.target.shape.kv_heads = SHAPE.heads
    small.data.prompts, small.data.filter = [PromptSource(PROMPTS)], PromptFilter()
    small.data.held_out, small.data.valid, small.data.max_length = 4, 4, 192
    if config.data.responses.backend == "server":  # a smoke run needs no network
        asked = config.data.responses
        small.data.responses = ResponsesConfig(temperature=asked.temperature, top_p=asked.top_p)
    small.data.captures.backend, small.data.captures.engine = "local", {}
    small.data.responses.max_new_tokens, small.data.responses.batch_tokens = 24, 2048
    head, train = small.head, small.train
    head.draft_vocab = "full" if config.head.draft_vocab == "full" else 128
    head.intermediate = head.heads = head.kv_heads = head.head_dim = None
    head.init_from = SCRATCH if head.type == "mtp" else None  # the tiny target has no MTP layers
    head.lora = LoraSection()  # which needs a parent
    if head.taps is not None:
        head.taps = [2, 4, 5][: len(head.taps)]
    head.unroll = min(head.unroll, 3)
    train.epochs, train.steps, train.seconds = None, 10, None
    train.batch_tokens, train.accumulate, train.precision = 512, 1, "fp32"
    train.save_every, train.eval_every, train.eval_rows, train.log_every = 5, 5, 4, 2
    train.threads, train.offload, train.decode_prompts = 1, False, min(train.decode_prompts, 4)
    small.eval.suites, small.eval.limit, small.eval.batch = ["heldout"], 4, [4]
    small.eval.k = [min(3, head.unroll) if head.type in BY_DEPTH else 3]
    small.eval.dtype, small.eval.max_new_tokens = "float32", 24
    small.eval.speed_prompts, small.eval.speed_tokens = [2], 16
    small.eval.cost_batches = small.eval.cost_batches[:1]
    small.eval.draft_model = small.eval.draft_model and small.target.model
    small.eval.skip_from = small.eval.skip_from and min(small.eval.skip_from, SHAPE.layers // 2)
    small.launch.gpus = config.launch.gpus if config.launch.gpus != "auto" else 1
    small.launch.hostfile = None
    small.push.dry_run = bool(config.push.repo)  # a smoke run needs no network, and its head is worth nothing
    small.export.formats = [name for name in config.export.formats if name != "mtp"]  # nor can one be given to it
    return small


def target_folder(config: RecipeConfig) -> Path:
    return Path(config.run_dir or "") / "target" / f"tiny-random-{config.target.family}"


def build_target(config: RecipeConfig, folder: Path) -> None:
    """Writes the tiny random target of `config` (as shrunk) into `folder`: model, tokenizer, template. Atomic."""
    import torch
    from transformers import AutoModelForCausalLM

    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    torch.manual_seed(config.seed)
    model = AutoModelForCausalLM.from_config(model_config(config.target.family or "", config.target.shape))
    with torch.no_grad():  # spread the logits, so that greedy answers are not one token repeated
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with room_for(folder):
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
    if folder.exists():
        shutil.rmtree(folder)
    part.rename(folder)


def model_config(family: str, shape: ShapeConfig) -> Any:
    """The transformers config of a tiny text model of a family."""
    from transformers import AutoConfig

    end = 256 + SPECIAL.index("<|end|>")
    wanted = {
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": end,
        "pad_token_id": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    try:
        usual = AutoConfig.for_model(family)
        return AutoConfig.for_model(
            family, **wanted, **{key: n for key, n in TINY.items() if getattr(usual, key, None) is not None}
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"target.family={family}: transformers cannot build a tiny one ({error})") from error


def byte_tokenizer() -> Any:
    """256 tokens, one per byte, then the special tokens; with our chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", eos_token="<|end|>", extra_special_tokens=["<|turn|>"],
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer
