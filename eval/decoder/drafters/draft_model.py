"""An independent smaller model as a drafter, with a KV cache of its own; it needs nothing of the target but its text.

Where the two tokenizers differ, tokens are told apart by their strings: one that the draft model lacks is read as a
placeholder, and a draft ends where its likeliest token is one that the target lacks.
Source: Leviathan et al. 2023. Shapes: B requests, K draft tokens, L new tokens, D draft vocab, V target vocab.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headtrain.cache import KVCache
from headtrain.eval.decoder.drafters.base import News
from headtrain.eval.decoder.drafters.unroll import UnrolledDrafter
from headtrain.eval.decoder.sampling import Sampling
from headtrain.target import Target
from headtrain.tree import DraftTree

SHARED = 0.5  # of the draft model's tokens, at least, must be the target's as well


class ModelDrafter(UnrolledDrafter):
    """`model` drafts for `target`; ValueError names the first differing token where vocabularies are too different."""

    name = "draft_model"

    def __init__(self, sampling: Sampling, target: Target, model: Target, min_confidence: float = 0.0):
        super().__init__(sampling, min_confidence)
        if model.stateful:
            raise ValueError(
                f"draft model {model.name} has {model.stateful!r} layers, whose running state cannot be taken back "
                "after a rejected draft; take one with attention layers only"
            )
        self.model = model
        to_target, to_draft = vocabulary_tables(target, model)
        own = torch.arange(model.vocab_size)
        # With one tokenizer, ids that it has no token for (rows of padding) are the same on both sides too.
        one = model.tokenizer.get_vocab() == target.tokenizer.get_vocab()
        if one and model.vocab_size == target.vocab_size:
            to_target = to_draft = own
        self._same = torch.equal(to_target, own) and model.vocab_size == target.vocab_size
        self._to_draft_V = to_draft.to(model.device)
        self._known_D = (to_target >= 0).to(model.device)
        self._columns = own[to_target >= 0].to(model.device), to_target[to_target >= 0].to(model.device)

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        super().start(prompts, capacity)
        self._positions = getattr(self.model.config, "max_position_embeddings", None) or capacity
        if (longest := max(map(len, prompts))) > self._positions:
            raise ValueError(f"draft model {self.model.name} reads {self._positions} tokens; a prompt has {longest}")
        self._cache = KVCache(len(prompts), capacity)
        self._true = [0] * len(prompts)  # leading slots that hold the request's text
        self._drafts_BK: Tensor | None = None  # what lies in the slots after the text

    def observe(self, news: News) -> None:
        """Of the drafts in the cache, those stay that the text goes on with; its last token is always read again."""
        drafts = [[]] * len(news.tokens) if self._drafts_BK is None else self._drafts_BK.tolist()
        for b, (tokens, drafted) in enumerate(zip(news.tokens, drafts, strict=True)):
            for token, draft in zip(tokens[:-1], drafted, strict=False):
                if token != draft:
                    break
                self._true[b] += 1
        self._drafts_BK = None
        super().observe(news)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._cache.select(rows)
        self._true = [self._true[i] for i in rows.tolist()]
        if self._drafts_BK is not None:
            self._drafts_BK = self._drafts_BK[rows]

    def propose(self, k: int, uniform_BK: Tensor | None = None) -> DraftTree:
        tree = super().propose(k, uniform_BK)
        if k:
            self._drafts_BK = tree.tokens[:, :-1]  # the last one was not read
        return tree

    def first(self, k: int) -> tuple[Tensor, Tensor | None]:
        """Reads what the cache lacks of every text, rows padded at the end."""
        new = [text[true:] for text, true in zip(self.text, self._true, strict=True)]
        width = max(map(len, new))
        tokens_BL = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in new], device=self._device)
        slots_BL = torch.tensor(self._true, device=self._device)[:, None] + torch.arange(width, device=self._device)
        # Padding goes where nothing true will be visible; the last slot stays free even of a text as long as allowed.
        slots_BL = slots_BL.clamp_max(self._cache.capacity - 1)
        ends_B = torch.tensor([len(tokens) - 1 for tokens in new], device=self._device)
        window = min(max(self._true) + width, self._cache.capacity)
        self._true = [len(text) for text in self.text]
        self._slots_B1, self._window = torch.tensor(self._true, device=self._device)[:, None] - 1, max(self._true)
        return self._logits(tokens_BL, slots_BL, window, ends_B)

    def further(self, tokens_B: Tensor) -> tuple[Tensor, Tensor | None]:
        self._slots_B1, self._window = self._slots_B1 + 1, self._window + 1
        return self._logits(tokens_B[:, None], self._slots_B1, self._window, torch.zeros_like(tokens_B))

    def _logits(self, tokens_BL: Tensor, slots_BL: Tensor, window: int, ends_B: Tensor) -> tuple[Tensor, Tensor | None]:
        """The model's logits after token ends_B of each row, over the target's vocabulary."""
        # An answer that outgrows the model's positions costs acceptance, not the run.
        positions_BL = slots_BL.clamp_max(self._positions - 1) if window > self._positions else None
        states = self.model.forward(self._to_draft_V[tokens_BL], self._cache, slots_BL, positions_BL, window=window)
        logits_BD = self.model.logits(states.last_BLH[torch.arange(len(ends_B), device=ends_B.device), ends_B])
        if self._same:
            return logits_BD, None
        logits_BV = logits_BD.new_full((len(ends_B), len(self._to_draft_V)), float("-inf"))
        logits_BV[:, self._columns[1]] = logits_BD[:, self._columns[0]]
        return logits_BV, self._known_D[logits_BD.argmax(-1)]


def vocabulary_tables(target: Target, model: Target) -> tuple[Tensor, Tensor]:
    """(int64 [D] target id of each token of the draft model, -1 for none; int64 [V] draft id of each of the target's).

    A target token that the draft model lacks is given its unknown token's id (else its end token's, else 0).
    Raises ValueError when fewer than half of the draft model's tokens are the target's.
    """
    mine, its = target.tokenizer.get_vocab(), model.tokenizer.get_vocab()
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    placeholder = min(model.eos_ids, default=0) if unknown is None else unknown
    to_target = torch.full((model.vocab_size,), -1)
    to_draft = torch.full((target.vocab_size,), placeholder)
    for token, there in its.items():
        here = mine.get(token)
        if here is not None and here < target.vocab_size and there < model.vocab_size:
            to_target[there], to_draft[here] = here, there
    shared = int((to_target >= 0).sum())
    if shared < SHARED * len(its):
        id_, token = min((i, token) for token, i in its.items() if mine.get(token) != i)
        raise ValueError(
            f"draft model {model.name}: only {shared} of its {len(its)} tokens are tokens of {target.name} (the first "
            f"that differs: id {id_} is {token!r}, the target's is {_token_of(mine, id_)!r}); take a model with the "
            "target's tokenizer"
        )
    return to_target, to_draft


def _token_of(vocabulary: dict[str, int], id_: int) -> str | None:
    return next((token for token, i in vocabulary.items() if i == id_), None)
