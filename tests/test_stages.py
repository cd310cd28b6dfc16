"""What runs inside a child process of a run."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from headtrain import stages
from headtrain.config import RecipeConfig
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
    head = SimpleNamespace(config=SimpleNamespace(taps=[1, 2]))
    assert score(head) == score(head) == 1 + 8 / 4
    assert loads == ["float32"]
    drafter, prompts, options = asked[0]
    assert isinstance(drafter, HeadDrafter) and drafter.head is head
    assert prompts == [[12, 13, 14, 15], [7, 8]]  # of valid-0 and valid-2; valid-1 begins with the answer
    assert options == {"k": 4, "max_new_tokens": 40, "batch": 6}
