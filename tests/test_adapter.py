"""target.adapter: a LoRA adapter merged into the target in memory, wherever its weights are used."""

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model

from headtrain.config import TargetConfig
from headtrain.data_gen.passes import read_rows
from headtrain.identity import target_identity
from headtrain.target import Target, TargetError, load_parts

VOCAB, TAPS = 97, (1, 2)


def model(**more):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "eos_token_id": 5}
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", num_attention_heads=2, initializer_range=0.3, **sizes | more)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.fixture
def save(tmp_path):
    """save(name, model): its folder, with a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(n): n for n in range(VOCAB)}, unk_token="3"))

    def write(name, made):
        made.save_pretrained(tmp_path / name)
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="5").save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return write


@pytest.fixture
def adapt(tmp_path):
    """adapt(model folder, **how): (folder of a random adapter, the model with it as peft merges it)."""

    def make(base, made, **how):
        adapted = get_peft_model(made, LoraConfig(r=4, init_lora_weights=False, **how))
        adapted.peft_config["default"].base_model_name_or_path = base
        with torch.no_grad():  # what modules_to_save trains
            for name, parameter in adapted.named_parameters():
                if "modules_to_save" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        return str(tmp_path / "adapter"), adapted.merge_and_unload()

    return make


def target(folder, adapter=None):
    return TargetConfig(model=folder, adapter=adapter, dtype="float32", device="cpu")


@pytest.mark.parametrize("how", [
    {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
])  # fmt: skip
def test_captures_and_teacher_with_an_adapter_are_those_of_the_merged_model(how, save, adapt):
    base = save("base", model())
    adapter, merged = adapt(base, model(), **how)
    ours, theirs, plain = target(base, adapter), target(save("merged", merged)), target(base)
    ids = torch.randint(6, VOCAB, (12,), generator=torch.Generator().manual_seed(1))
    captured = [read_rows(Target.load(c), [ids], TAPS, torch.float32).flat() for c in (ours, theirs, plain)]
    for name, tensor in captured[1].items():
        torch.testing.assert_close(captured[0][name], tensor)
    assert not torch.allclose(captured[0]["last"], captured[2]["last"])
    parts = [load_parts(c) for c in (ours, theirs, plain)]
    for name in ("embedding", "lm_head", "norm_weight"):
        torch.testing.assert_close(getattr(parts[0], name), getattr(parts[1], name))
    assert torch.equal(parts[0].lm_head, parts[2].lm_head) is ("lm_head" not in str(how))


def test_an_adapter_of_another_shape_is_refused_with_both_names(save, adapt):
    adapter, _ = adapt("someone/wide", model(hidden_size=64), target_modules=["q_proj"])
    with pytest.raises(TargetError, match=r"adapter: made for someone/wide, does not fit .*base .*size mismatch"):
        Target.load(target(save("base", model()), adapter))


def test_tensors_without_a_counterpart_are_not_passed_over(save, adapt):
    adapter, _ = adapt("someone/deep", model(num_hidden_layers=3), target_modules=["q_proj"])
    with pytest.raises(TargetError, match=r"made for someone/deep, does not fit .*2 tensors have no .*layers.2"):
        Target.load(target(save("base", model()), adapter))


def test_an_adapter_made_for_a_model_of_another_name_is_said(save, adapt, caplog):
    adapter, _ = adapt("someone/other", model(), target_modules=["q_proj"])
    Target.load(target(save("base", model()), adapter))
    assert "was made for someone/other; the target is" in caplog.text


def test_an_adapter_that_changes_a_shared_embedding_is_refused(save, adapt):
    base = save("base", model(tie_word_embeddings=True))
    adapter, _ = adapt(base, model(), target_modules=["q_proj", "lm_head"])
    with pytest.raises(TargetError, match="changes the embedding or lm_head, which are one tensor"):
        Target.load(target(base, adapter))
    with pytest.raises(TargetError, match="changes the embedding or lm_head, which are one tensor"):
        load_parts(target(base, adapter))


def test_prompt_tuning_and_folders_without_an_adapter_are_refused(save, tmp_path):
    base = save("base", model())
    with pytest.raises(TargetError, match=r"target.adapter=.*no adapter_config.json"):
        Target.load(target(base, base))
    get_peft_model(model(), PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")).save_pretrained(
        tmp_path / "prefix"
    )
    with pytest.raises(TargetError, match="adds tokens to prompts; only weights can be merged"):
        Target.load(target(base, str(tmp_path / "prefix")))


def test_another_adapter_is_another_target(save, adapt, tmp_path):
    base = save("base", model())
    adapter, _ = adapt(base, model(), target_modules=["q_proj"])
    plain = target_identity(target(base), tmp_path / "run")
    first = target_identity(target(base, adapter), tmp_path / "run")
    adapt(base, model(), target_modules=["v_proj"])
    second = target_identity(target(base, adapter), tmp_path / "run")
    assert plain == {key: value for key, value in first.items() if key != "adapter"} != first != second
    with pytest.raises(ValueError, match=r"target.adapter=/nowhere/at/all: no such file or folder"):
        target_identity(target(base, "/nowhere/at/all"), tmp_path / "run")
