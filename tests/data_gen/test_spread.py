"""A target whose blocks lie on several devices, in the CPU's memory and in its files gives what it gives on one."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headtrain import spread
from headtrain.cache import KVCache
from headtrain.config import TargetConfig
from headtrain.data_gen import passes
from headtrain.data_gen.respond import uniforms
from headtrain.lean import speed_up
from headtrain.target import Target, TargetError, _without_weights, load_parts

_spec = importlib.util.spec_from_file_location("two_devices", Path(__file__).with_name("two_devices.py"))
two_devices = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(two_devices)

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17], [20], [21, 22, 23], [5, 5, 5, 5, 5, 5]]
BUDGETS = [30, 3, 12, 30, 1, 20]
TAPS = (1, 2, 4)
BLOCKS = [f"model.layers.{n}" for n in range(4)]


@pytest.fixture(scope="module")
def bones(tiny_folder):
    return _without_weights(TargetConfig(model=str(tiny_folder)), str(tiny_folder), None)


@torch.inference_mode()
def passes_of(target):
    """What the data stages keep, of greedy and sampled answers with ragged ends and of given rows."""
    ends = target.model.generation_config
    found, ends.eos_token_id = [], [42, 77]
    for heat in (0.0, 0.8):
        random = uniforms(0, list("abcdef"), 30).to(target.device) if heat else None
        kept, finish = passes.answer(
            target, PROMPTS, BUDGETS, TAPS, torch.float32, passes.Sampling(heat, 0.9, random)
        )
        found.append(kept.flat() | {"finish": finish})
    rows = [torch.tensor(row, dtype=torch.int32) for row in PROMPTS]
    return [*found, passes.read_rows(target, rows, TAPS, torch.float32).flat()]


def assert_equal(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys() and a.pop("finish", None) == b.pop("finish", None)
        for name, tensor in a.items():
            assert torch.equal(tensor, b[name]), name


# ------------------------------------------------------------------------------------------------- where blocks go

def test_gpus_get_an_even_share_and_the_first_one_all_but_the_blocks(bones):
    ends, width = 1000.0, 100.0 / sum(p.numel() for p in bones.layers[0].parameters())  # a block of 100 bytes
    small, wide = {0: math.inf, 1: math.inf}, dict.fromkeys(range(4), math.inf)
    found = spread.lay_out(bones, small, 0.0, width)
    assert [found[name] for name in BLOCKS] == [0, 0, 1, 1]
    assert {found[name] for name in found.keys() - set(BLOCKS)} == {0}
    assert set(found) == {*BLOCKS, "model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"}
    assert [spread.lay_out(bones, wide, 0.0, width)[name] for name in BLOCKS] == [0, 1, 2, 3]
    assert [spread.lay_out(bones, small, ends, width)[name] for name in BLOCKS] == [1, 1, 1, 1]


def test_what_exceeds_the_gpus_goes_to_the_cpu_and_then_to_the_files(bones):
    width = 100.0 / sum(p.numel() for p in bones.layers[0].parameters())
    room = {0: 250.0, 1: 100.0, "cpu": 100.0, "disk": math.inf}
    found = spread.lay_out(bones, room, 150.0, width)
    assert [found[name] for name in BLOCKS] == [0, 1, "cpu", "disk"]
    assert spread.in_words(found) == "GPU 0 and GPU 1 and cpu and disk"
    with pytest.raises(ValueError, match=r"there is room for 3\.5e-07 GB on 2 GPUs: raise target.gpus, or set"):
        spread.lay_out(bones, {0: 250.0, 1: 100.0}, 150.0, width)
    with pytest.raises(ValueError, match=r"gpu_memory=1e-07: all but its blocks takes 1\.5e-07 GB"):
        spread.lay_out(bones, {0: 100.0}, 150.0, width)


def test_weights_count_as_they_are_loaded(bones, tiny_folder):
    config = TargetConfig(model=str(tiny_folder), dtype="bfloat16")
    ends, width = spread.weight_bytes(config, bones, str(tiny_folder))
    vocab = bones.vocab_size
    assert (ends, width) == (2 * (2 * vocab * 64 + 64), 2)


@pytest.mark.parametrize(("gpus", "others"), [(1, [2]), (2, [0, 1])])
def test_on_one_gpu_it_is_the_one_that_the_process_has_chosen(gpus, others, bones, tiny_folder, monkeypatch):
    for name, value in (("is_available", True), ("device_count", 4), ("current_device", 2)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda n: (80e9, 80e9))
    for keys in ({"gpu_memory": 1.0}, {"cpu_memory": 1.0}):
        config = TargetConfig(model=str(tiny_folder), dtype="float32", gpus=gpus, **keys)
        assert sorted(set(spread.device_map(config, bones, str(tiny_folder)).values())) == others


@pytest.mark.parametrize(
    ("keys", "said"),
    [({"gpus": 2}, "target.gpus=2: no CUDA device is here"), ({"gpu_memory": 9.0}, "target.gpu_memory=9.0: no CUDA")],
)
def test_gpus_that_are_not_there_are_one_line(keys, said, tiny_folder):
    with pytest.raises(TargetError, match=said):
        Target.load(TargetConfig(model=str(tiny_folder), dtype="float32", device="cpu", **keys))


def test_a_family_whose_weights_are_rearranged_cannot_stay_in_its_files(tmp_path, char_tokenizer):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=120, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    char_tokenizer(eos="[end]").save_pretrained(tmp_path)
    with pytest.raises(TargetError, match=r"rearranges its weights while .*: raise target\.cpu_memory"):
        Target.load(replace(_plain(tmp_path), cpu_memory=4e-5))


# ------------------------------------------------------------------------------------------------- what it computes

@pytest.fixture(scope="module")
def on_disk(tiny_folder):
    """The tiny target with two of its four blocks left in its file."""
    parts = load_parts(TargetConfig(model=str(tiny_folder)))
    ends = 4 * (parts.embedding.numel() + parts.lm_head.numel() + parts.norm_weight.numel())
    block = 4 * sum(p.numel() for p in Target.load(_plain(tiny_folder)).layers[0].parameters())
    return Target.load(replace(_plain(tiny_folder), cpu_memory=(ends + 2.5 * block) / 1e9))


def _plain(folder) -> TargetConfig:
    return TargetConfig(model=str(folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def in_memory(tiny_folder):
    """One of its own: others may have sped the shared one up."""
    return Target.load(_plain(tiny_folder))


def test_a_target_partly_in_its_file_gives_the_same_bits(on_disk, in_memory):
    assert [block.mlp.up_proj.weight.device.type for block in on_disk.layers] == ["cpu", "cpu", "meta", "meta"]
    assert on_disk.spread == "cpu and disk"
    speed_up(on_disk)  # steps aside: packing would hold all weights
    assert on_disk.lean is None and on_disk.layers[3].mlp.up_proj.weight.device.type == "meta"
    assert_equal(passes_of(on_disk), passes_of(in_memory))


@pytest.fixture
def split(tiny_folder):
    """(the tiny target on one twin device, the same one over both)."""
    import accelerate.hooks

    with two_devices.twins(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate.hooks, "set_module_tensor_to_device", lambda *_, **__: None)  # move() has done it
        whole, parts = Target.load(_plain(tiny_folder)), Target.load(_plain(tiny_folder))
        two_devices.move(whole.model, "twin:0")
        places = spread.lay_out(parts, {0: math.inf, 1: math.inf}, 0.0, 4.0)
        for name, place in places.items():
            two_devices.move(parts.model.get_submodule(name), f"twin:{place}")
        accelerate.dispatch_model(
            parts.model, {name: f"twin:{place}" for name, place in places.items()}, main_device="twin:0"
        )
        parts.spread = spread.in_words(places)
        yield whole, parts


def test_a_target_over_two_devices_gives_the_same_bits(split):
    whole, parts = split
    assert [str(block.mlp.up_proj.weight.device) for block in parts.layers] == ["twin:0"] * 2 + ["twin:1"] * 2
    assert_equal(passes_of(parts), passes_of(whole))


def test_keys_and_values_lie_where_their_block_does(split):
    cache = KVCache(2, 8)
    tokens = torch.tensor([[5, 6, 7], [8, 9, 5]], device="twin:0")
    states = split[1].forward(tokens, cache, taps=TAPS)
    assert [str(cache.keys[n].device) for n in range(4)] == ["twin:0", "twin:0", "twin:1", "twin:1"]
    outputs = states.last_BLH, states.taps_BLAH, split[1].logits(states.last_BLH)
    assert {str(x.device) for x in outputs} == {"twin:0"}


def test_the_twin_devices_refuse_to_mix():
    with two_devices.twins():
        a, b = torch.ones(3, device="twin:0"), torch.ones(3, device="twin:1")
        with pytest.raises(RuntimeError, match=r"tensors on twin:0 and twin:1"):
            a + b
        with pytest.raises(RuntimeError, match=r"tensors on"):
            b[torch.tensor([0], device="twin:0")]
        assert (a + b.to("twin:0")).tolist() == [2, 2, 2]


def test_decoding_from_files_drafts_and_verifies_the_same(on_disk, in_memory):
    from headtrain.eval.decoder.decode import decode
    from headtrain.eval.decoder.drafters import NgramDrafter

    prompts, found = [row * 4 for row in PROMPTS], []
    for target in (on_disk, in_memory):
        answers = decode(target, NgramDrafter(), prompts, k=3, max_new_tokens=20, batch=4)
        found.append([(row.ids, [step.accepted for step in row.steps]) for row in answers])
    assert found[0] == found[1]
    assert sum(sum(accepted) for _, accepted in found[0]) > 0
