"""llama.cpp drafts what our decoder drafts, from our GGUF files and from those its converter makes of our folders.

Greedy, in fp32. A difference is excused only as a near-tie of the head's logits; faults that are planted on purpose
show that equality means something. Needs `make test-llama-cpp`, which builds llama.cpp.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch

from headtrain.config import HeadSection

pytestmark = pytest.mark.engines

K = 4
LLAMA3 = {
    "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
HEADS = {  # name: the target's family and rope, the head
    "full vocabulary": ("llama", None, HeadSection("eagle3")),
    "draft vocabulary": ("llama", None, HeadSection("eagle3", draft_vocab=100)),
    "norm_before_residual, taps [1, 3, 6], one key head": (
        "llama", None, HeadSection("eagle3", taps=[1, 3, 6], norm_before_residual=True, kv_heads=1),
    ),
    "for Qwen3": ("qwen3", None, HeadSection("eagle3", draft_vocab=100)),
    "rope of Llama 3": ("llama", LLAMA3, HeadSection("eagle3")),
    "rope of YaRN": ("llama", YARN, HeadSection("eagle3")),
    "linear rope": ("llama", LINEAR, HeadSection("eagle3")),
}  # fmt: skip
SAME_ROPE = [name for name in HEADS if name not in ("rope of YaRN", "linear rope")]  # said in other words by ours


@pytest.fixture(scope="session")
def made(tiny, llama_engine, tmp_path_factory):
    """made(name) -> a trained head of HEADS, its files and our decoder's steps; made once."""
    from headtrain.export import export

    @cache
    def get_target(family, rope):
        folder = tmp_path_factory.mktemp("target")
        target = tiny.make_target(folder, family, **({"rope_parameters": dict(rope)} if rope else {}))
        target.lm_head.weight.data[: llama_engine.FIRST] = 0  # tokens of a prompt have to be characters
        target.model.save_pretrained(folder)
        llama_engine.add_tokenizer(folder, target.vocab_size)
        return target, folder, llama_engine.convert(folder, folder / "target.gguf")

    @cache
    def get(name):
        family, rope, section = HEADS[name]
        target, folder, file = get_target(family, tuple(rope.items()) if rope else None)
        run = tmp_path_factory.mktemp("run")
        section.unroll, section.draft_vocab = K, section.draft_vocab if section.draft_vocab == 100 else "full"
        prompts = [[llama_engine.SPACE, *(max(i, llama_engine.FIRST) for i in p[1:])] for p in tiny.prompts()]
        with pytest.MonkeyPatch.context() as patch:  # trained on answers to these, so that drafts are accepted
            patch.setattr(tiny, "prompts", lambda: prompts)
            head = tiny.make_head(target, section, run / "head")
        ours = export(run / "head", "gguf", run / "gguf", {"model": str(file)}, dtype="float32") / "draft.gguf"
        exported = export(run / "head", "vllm", run / "vllm", dtype="float32")
        theirs = llama_engine.convert(exported, run / "converted.gguf", folder)
        return SimpleNamespace(
            target=target, file=file, tokenizer=folder / "tokenizer.model", head=head, folder=run / "head", ours=ours,
            theirs=theirs, prompts=prompts, decoding=tiny.decoded(target, head, prompts, K),
        )  # fmt: skip

    return get


@pytest.fixture(scope="session")
def llama_says(tiny, llama_engine):
    """llama_says(made, file) -> llama.cpp's steps with that file of the head.

    It drafts before it has a token of the target, which our decoder has then: it gets the first one with the prompt.
    """

    def run(head, file):
        found = tiny.Decoding([], [], [0] * K)
        for prompt, (first, *_) in zip(head.prompts, head.decoding.answers, strict=True):
            answer, steps = llama_engine.decode(head.file, file, head.tokenizer, [*prompt, first], K, tiny.NEW - 1)
            found.answers.append([first, *answer])
            found.steps.append([])
            length = len(prompt) + 1
            for drafts, accepted in steps:
                found.steps[-1].append(tiny.Step(length, drafts, accepted))
                length += accepted + 1
                for place in range(accepted):
                    found.accepted[place] += 1
        return found

    return run


@pytest.mark.parametrize("maker", ["ours", "theirs"])
@pytest.mark.parametrize("name", HEADS)
def test_llama_cpp_drafts_and_accepts_what_our_decoder_does(name, maker, tiny, made, llama_says, ledger):
    head = made(name)
    says = llama_says(head, getattr(head, maker))
    found = tiny.compare(head.target, head.head, head.prompts, head.decoding, says)
    ours, theirs = head.decoding.accepted, says.accepted
    file = {"ours": "our file", "theirs": "its converter's"}[maker]
    ledger.append(
        f"llama.cpp b11434, {name}, {file}: {found.equal} of {found.drafts} drafts equal in {found.steps} steps, "
        f"{found.ties} near-ties; accepted by position {theirs} (llama.cpp), {ours} (ours)"
    )
    assert not found.unlike, found.unlike
    assert found.steps >= 200
    assert found.ties <= max(1, found.steps // 1000)
    assert sum(ours) >= 40 and ours[1] > 0, "the test would say little if nothing were accepted"
    if not found.ties:
        assert theirs == ours


def content(file):
    import gguf

    read = gguf.GGUFReader(file)
    keys = {key: field.contents() for key, field in read.fields.items() if not key.startswith("GGUF.")}
    return keys, {tensor.name: tensor for tensor in read.tensors}


@pytest.mark.parametrize("name", SAME_ROPE)
def test_our_file_is_what_llama_cpps_converter_writes(name, made):
    (ours, tensors), (theirs, wanted) = content(made(name).ours), content(made(name).theirs)
    names = {key for key in theirs if key.startswith("general.") and key != "general.architecture"}
    assert names >= {"general.name", "general.file_type"}
    for key in names - {"general.file_type", "general.quantization_version", "general.type"}:  # for people to read
        ours.pop(key, None), theirs.pop(key)
    assert ours == theirs
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].tensor_type == tensor.tensor_type and (tensors[name].shape == tensor.shape).all(), name
        torch.testing.assert_close(torch.tensor(tensors[name].data), torch.tensor(tensor.data), rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------------- planted faults


def taps_off_by_one(config, tensors):
    config["headtrain"]["taps"] = [tap + 1 for tap in config["headtrain"]["taps"]]


def another_rope(config, tensors):
    config["rope_theta"] = 100.0


def residual_after_its_norm(config, tensors):
    config["norm_before_residual"] = True


def offsets_for_ids(config, tensors):
    tensors["d2t"] -= torch.arange(len(tensors["d2t"]))


def ones(name):
    return lambda config, tensors: tensors[name].fill_(1)


FAULTS = {
    "taps off by one": ("full vocabulary", taps_off_by_one),
    "rope base": ("full vocabulary", another_rope),
    "norm_before_residual": ("full vocabulary", residual_after_its_norm),
    "norm of the embedding missing": ("full vocabulary", ones("midlayer.input_layernorm.weight")),
    "norm of the features missing": ("full vocabulary", ones("midlayer.hidden_norm.weight")),
    "d2t as offsets": ("draft vocabulary", offsets_for_ids),
    "rows of queries and keys as transformers has them": ("full vocabulary", None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_file_makes_llama_cpp_draft_otherwise(
    fault, tiny, made, llama_says, tmp_path, ledger, monkeypatch
):
    from headtrain.export import gguf
    from headtrain.export.folder import read_head

    name, change = FAULTS[fault]
    head = made(name)
    layout = gguf.layout(read_head(head.folder), {"model": str(head.file)}, None)
    if change:
        change(layout.config, layout.tensors)
    else:
        monkeypatch.setattr(gguf, "interleaved", lambda weight, heads: weight)
    layout.write(tmp_path / "draft.gguf", layout)
    says = llama_says(head, tmp_path / "draft.gguf")
    found = tiny.compare(head.target, head.head, head.prompts, head.decoding, says)
    ledger.append(f"planted fault, {fault} (llama.cpp): {found.equal} of {found.drafts} drafts equal")
    assert found.unlike, f"{fault}: every draft is the same, so the comparison cannot see it"
    assert says.answers == head.decoding.answers, "a wrong draft may cost time, never change an answer"
