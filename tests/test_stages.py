"""What runs inside a child process of a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from headtrain import checks, stages
from headtrain.config import ConfigError, RecipeConfig
from headtrain.data_gen import store


def test_the_decoded_tau_is_that_of_the_first_validation_prompts_at_the_evaluations_settings(tmp_path, monkeypatch):
    from headtrain import target
    from headtrain.eval.decoder import decode
    from headtrain.eval.decoder.drafters.head import HeadDrafter

    lengths = {"train-0": (3, 4), "valid-2": (2, 3), "valid-0": (4, 2), "valid-1": (0, 5), "valid-3": (1, 1)}
    infos = [store.RowInfo(name, name[:5], "made", p + a, "length", p, a) for name, (p, a) in lengths.items()]
    ids = torch.arange(sum(p + a for p, a in lengths.values()), dtype=torch.int32)
    supervised = torch.cat([torch.arange(p + a) >= p for p, a in lengths.values()])
    store.write_unit(tmp_path / "responses", "responses", 0, infos, {"ids": ids, "supervised": supervised},
                     on_policy=True)  # fmt: skip
    store.write_index(tmp_path / "responses", "responses", 1)
    config, asked, loads = RecipeConfig(), [], []
    config.train.decode_prompts, config.eval.k, config.eval.batch, config.eval.max_new_tokens = 3, [2, 4], [1, 6], 50

    def answer(_target, drafter, prompts, **options):
        asked.append((drafter, prompts, options))
        steps = [SimpleNamespace(accepted=n) for n in (3, 0, 2)]
        return [SimpleNamespace(steps=steps), SimpleNamespace(steps=steps[:1])]

    def load(_config, dtype):
        loads.append(dtype)
        return SimpleNamespace(config=SimpleNamespace(max_position_embeddings=44))

    monkeypatch.setattr(decode, "decode", answer)
    monkeypatch.setattr(target.Target, "load", load)
    score = stages.decoded_tau(config, tmp_path)
    assert not loads  # the target is loaded when it is needed
    head = SimpleNamespace(config=SimpleNamespace(taps=[1, 2], vocab_size=9, draft_vocab_size=9))
    assert score(head) == score(head) == 1 + 8 / 4
    assert loads == ["float32"]
    drafter, prompts, options = asked[0]
    assert isinstance(drafter, HeadDrafter) and drafter.head is head
    assert prompts == [[12, 13, 14, 15], [7, 8]]  # of valid-0 and valid-2; valid-1 begins with the answer
    assert options == {"k": 4, "max_new_tokens": 40, "batch": 6}


def test_prompts_of_an_evaluation_under_way_stay_as_they_were_first_read(tmp_path, monkeypatch):
    from headtrain.data_gen import chat

    monkeypatch.setattr(chat, "prompt_ids", lambda _tokenizer, messages, _kwargs: [len(messages[-1]["content"])])
    config, path = RecipeConfig(), tmp_path / "own.jsonl"
    config.eval.suites = [str(path)]
    path.write_text('{"prompt": "four"}')
    first, tokenise = stages.eval_prompts(config, tmp_path, None)
    assert [prompt.ids for prompt in first] == [[4]] and tokenise([{"content": "seven77"}]) == [7]
    path.write_text('{"prompt": "something else"}')
    assert stages.eval_prompts(config, tmp_path, None)[0] == first


def test_a_head_of_another_target_is_refused_by_name(tmp_path, monkeypatch):
    from headtrain.heads import base

    made_for = SimpleNamespace(vocab_size=100, target_hidden_size=64, target_layers=4)
    head = SimpleNamespace(config=made_for, to=lambda _device: head)
    monkeypatch.setattr(base, "load_head", lambda *_: head)
    target = SimpleNamespace(lent=lambda: (None, None), dtype=None, device="cpu", vocab_size=100, hidden_size=64,
                             num_layers=4)  # fmt: skip
    config = RecipeConfig()
    assert stages.measured_heads(config, tmp_path, target) == {"head": head}
    made_for.target_layers = 5
    with pytest.raises(ConfigError, match="head head: made for a target of 5 layers, hidden size 64 and 100 tokens"):
        stages.measured_heads(config, tmp_path, target)
    config.eval.drafters = ["ngram"]
    assert stages.measured_heads(config, tmp_path, target) == {}


def test_the_draft_model_is_loaded_at_its_pinned_commit_as_the_target_is(tmp_path):
    config = RecipeConfig()
    config.target.device, config.target.revision, config.eval.draft_model = "cpu", "abc", "me/small"
    assert stages.draft_target(config, tmp_path).revision is None
    (tmp_path / "draft_model.json").write_text('{"commit": "def"}')
    small = stages.draft_target(config, tmp_path)
    assert (small.model, small.revision, small.device) == ("me/small", "def", "cpu")


def test_what_an_evaluation_cannot_do_is_known_before_it_starts(tmp_path):
    config = RecipeConfig()
    config.eval.suites = []
    config.eval.skip_from = 4
    with pytest.raises(ConfigError, match=r"eval\.skip_from=4: fewer than the target's 4 layers are needed"):
        checks.check_eval(config, tmp_path, 4)
    checks.check_eval(config, tmp_path, 5)
    config.eval.tree = ["8x4"]
    with pytest.raises(ValueError, match="nodes ≥ width"):
        checks.check_eval(config, tmp_path, 5)
    config.eval.tree, config.eval.suites = ["chain"], ["a/x.jsonl", "b/x.jsonl"]
    with pytest.raises(ConfigError, match="two suites would both be called x"):
        checks.check_eval(config, tmp_path, 5)
