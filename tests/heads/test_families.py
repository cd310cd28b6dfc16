"""Every family of targets: loaded, captured, taught from, drafted for, exported; or refused with a reason.

Each is a tiny random model of transformers, saved as a folder. Head sizes are none that a default would guess.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from headtrain.config import RecipeConfig, TargetConfig
from headtrain.data_gen.passes import read_rows
from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters import make_drafter
from headtrain.eval.decoder.drafters.head import HeadDrafter
from headtrain.eval.decoder.sampling import Sampling
from headtrain.export import export
from headtrain.heads.base import load_head, new_head, save_head
from headtrain.target import Target, TargetError, load_parts
from headtrain.training.batches import collate

VOCAB, TAPS, NEW = 97, (1, 2, 3), 10
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 128, "initializer_range": 0.3,
    "eos_token_id": 5, "bos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
OWN = dict.fromkeys(("head_dim",))  # keys of SIZES that a family derives itself
LATENT = OWN | ROUTED | {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
PER_TYPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}  # fmt: skip
LINEAR = PER_TYPE["full_attention"]
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip

# family, settings of its own, and what the head must have: (query heads, key heads, head size), rope
PLAIN = (4, 2, 24)
FAMILIES = [
    ("llama", {"rope_parameters": LLAMA3}, PLAIN, LLAMA3),
    ("mistral", {"sliding_window": 8}, PLAIN, None),
    ("qwen2", {"tie_word_embeddings": True}, PLAIN, None),
    ("qwen3", {"rope_parameters": YARN}, PLAIN, YARN),
    ("qwen3_moe", EXPERTS, PLAIN, None),
    ("qwen3_next", DELTA | EXPERTS | {"shared_expert_intermediate_size": 32}, PLAIN, None),
    ("gpt_oss", LOCAL | MIXED, PLAIN, {"rope_type": "yarn", "factor": 32.0, "truncate": False}),
    ("gemma3_text", MIXED | {"rope_parameters": PER_TYPE, "tie_word_embeddings": True}, PLAIN, LINEAR),
    ("gemma3", {"text_config": SIZES | MIXED | {"rope_parameters": PER_TYPE}, "vision_config": VISION}, PLAIN, LINEAR),
    ("glm4_moe", ROUTED, PLAIN, {"rope_type": "default", "rope_theta": 1e4}),
    ("deepseek_v3", LATENT | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, (4, 4, 16), YARN),
    ("phi3", {}, PLAIN, None),
    ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}, PLAIN, None),
    ("olmo2", {}, PLAIN, None),
    ("smollm3", {}, PLAIN, None),
    ("mixtral", LOCAL, PLAIN, None),
    ("nemotron", {}, PLAIN, {"rope_type": "default", "rope_theta": 1e4}),
    ("deepseek_v2", LATENT | {"topk_method": "greedy"}, (4, 4, 16), None),
    ("glm4_moe_lite", LATENT, (4, 4, 16), None),
    ("gemma2", MIXED | {"final_logit_softcapping": 4.0}, PLAIN, None),
    ("qwen3_5_text", DELTA, PLAIN, None),
    ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 32}, PLAIN, None),
    ("glm4", {}, PLAIN, None),
    ("olmo", {}, PLAIN, None),  # its final norm has no weight
    ("olmo3", MIXED, PLAIN, None),
    ("cohere2", MIXED | {"logit_scale": 0.5}, PLAIN, None),
    ("starcoder2", {}, PLAIN, None),
    ("llama4_text", LOCAL | {"attention_chunk_size": 8}, PLAIN, None),
    ("gpt2", OWN | {"num_key_value_heads": None, "intermediate_size": None}, (4, 4, 16), None),
    ("gpt_neox", OWN, (4, 2, 16), None),  # lm_head has another name in the files
    ("opt", {}, PLAIN, None),
    ("ernie4_5", {}, PLAIN, None),
    ("hunyuan_v1_dense", {}, PLAIN, None),
    ("granitemoe", LOCAL, PLAIN, None),
    ("minimax_m2", LOCAL, PLAIN, None),
    ("afmoe", EXPERTS | MIXED, PLAIN, None),
    ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, PLAIN, None),
    ("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
                   "mamba_chunk_size": 8}, PLAIN, None),
]  # fmt: skip


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({str(n): n for n in range(VOCAB)}, unk_token="3")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="5")


def saved(folder, family, **more) -> TargetConfig:
    """A tiny random model of a family in a folder, all of whose tensors matter, and how to load it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {} if "text_config" in more else SIZES
    settings = {key: value for key, value in (sizes | more).items() if value is not None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return TargetConfig(model=str(folder), dtype="float32", device="cpu")


def captured(target, texts):
    """Packed rows of the target's states; an answer begins at token 4."""
    rows = [read_rows(target, [ids], TAPS, torch.float32).flat() for ids in texts]
    rows = [SimpleNamespace(**row, supervised=torch.arange(len(row["ids"])) >= 4) for row in rows]
    return collate(rows, [str(n) for n in range(len(rows))])


@pytest.mark.parametrize("family, more, sizes, rope", FAMILIES, ids=[row[0] for row in FAMILIES])
def test_a_family_is_captured_taught_from_drafted_for_and_exported(family, more, sizes, rope, tmp_path):
    config = saved(tmp_path / "target", family, **more)
    target = Target.load(config)
    made = torch.Generator().manual_seed(1)
    texts = [torch.randint(6, VOCAB, (n,), generator=made) for n in (24, 17)]
    batch = captured(target, texts)
    with torch.inference_mode():
        logits = torch.cat([target.model(input_ids=ids[None]).logits[0].float() for ids in texts])
    real = torch.ones(len(logits), dtype=torch.bool).index_fill(0, batch.cu_R1[1:].long() - 1, False)
    torch.testing.assert_close(batch.logsumexp_N[real], logits.logsumexp(-1)[real], rtol=1e-4, atol=1e-4)
    assert torch.equal(batch.argmax_N[real], logits.argmax(-1)[real])

    parts = load_parts(config)
    probe = torch.randn(5, target.hidden_size, generator=made)
    probe = probe - probe.mean(-1, keepdim=True)
    normed = probe / probe.square().mean(-1, keepdim=True).sqrt() * parts.norm_weight
    torch.testing.assert_close(normed, (target.norm(probe) - target.norm(-probe)) / 2, rtol=1e-4, atol=1e-4)

    recipe = RecipeConfig()
    recipe.head.draft_vocab, recipe.head.taps, recipe.head.unroll = 48, list(TAPS), 3
    counts = torch.bincount(batch.argmax_N, minlength=VOCAB)
    head = new_head(recipe, parts, counts, counts, batch)
    teacher = (batch.last_NT @ head._lent["teacher"].T) * head.logit_scale
    teacher = teacher if head.softcap is None else head.softcap * torch.tanh(teacher / head.softcap)
    torch.testing.assert_close(teacher[real], logits[real][:, head.t2d], rtol=1e-4, atol=1e-4)
    c = head.config
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim) == sizes
    assert rope is None or (rope.items() <= c.rope.items() and "partial_rotary_factor" not in c.rope)

    optimizer, losses = torch.optim.AdamW(head.parameters(), lr=1e-3), []
    for _ in range(2):
        loss = head(batch).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(head(batch).loss) < losses[1] < losses[0]

    save_head(head, tmp_path / "head")
    drafter = HeadDrafter(load_head(tmp_path / "head", target.embed.weight), Sampling())
    prompts = [ids[:n].tolist() for ids, n in zip(texts, (9, 3), strict=True)]
    answers = [a.ids for a in decode(target, drafter, prompts, k=3, max_new_tokens=NEW, batch=2)]
    assert answers == [generated(target.model, prompt) for prompt in prompts]
    export(tmp_path / "head", "vllm", tmp_path / "exported", {"model": config.model})


def generated(model, prompt):
    row = torch.tensor([prompt])
    more = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": 5}
    return model.generate(row, attention_mask=torch.ones_like(row), **more)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family, more, reason", [
    # sparse attention picks tokens by an index that the head's captures do not have
    ("deepseek_v32", LATENT, "deepseek_v32 family cannot be run here: .* passes 'indices'"),
    ("bloom", OWN, "bloom family cannot be run here: too many values to unpack"),  # it reads only masks of one row
    ("phi", {}, "its lm_head has a bias"),
    ("recurrent_gemma", OWN | {"lru_width": 64}, "the recurrent_gemma family needs an adapter"),
    ("minimax", LOCAL | {"layer_types": DELTA["layer_types"]}, "minimax family cannot be decoded here .* cache of its"),
    ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 16,
                    "ssm_state_size": 8, "chunk_size": 8}, "nemotron_h family cannot be decoded here .* off those of"),
])  # fmt: skip
def test_what_a_family_cannot_do_is_refused_with_a_reason(family, more, reason, tmp_path):
    config = saved(tmp_path / "target", family, **more)
    with pytest.raises(TargetError, match=reason):
        target = Target.load(config)
        load_parts(config)
        captured(target, [torch.arange(6, 20)])
        decode(target, make_drafter("ngram"), [[7, 8]], k=2, max_new_tokens=4)
