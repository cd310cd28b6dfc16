"""Hash maps keyed by the last `n` tokens: `ngram-map-k` (one continuation) and `ngram-map-k4v` (up to four, counted).

A key says more than a short suffix, so these stay silent where `ngram` guesses: drafts are fewer and better.
Source: llama.cpp's `ngram-map-k` and `ngram-map-k4v` with their size-n, size-m and min-hits (there 12, 48 and 1, meant
for long copies of code). What llama.cpp adds, shorter drafts from a key whose last draft was rejected, is not done.
"""

from __future__ import annotations

from headtrain.eval.decoder.drafters.lookup import LookupDrafter
from headtrain.eval.decoder.drafters.ngram import copied

VALUES = 4  # different continuations kept per key; later ones are not counted
MAJORITY = 2  # the best continuation is drafted when it is this many times as frequent as the others together


class Latest:
    """The tokens of one request; per n-gram where its latest continuation begins, and how often the n-gram came."""

    def __init__(self, first: int, n: int, m: int, hits: int):
        self.tokens, self.n, self.m, self.hits = [first], n, m, hits
        self.seen: dict[tuple[int, ...], tuple[int, int]] = {}

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            if end >= self.n:
                key = tuple(self.tokens[end - self.n :])
                self.seen[key] = (end, self.seen.get(key, (0, 0))[1] + 1)
            self.tokens.append(token)

    def continuation(self, k: int) -> list[int]:
        """Up to min(k, m) tokens that followed the last n tokens' latest occurrence, once they came `hits` times."""
        start, times = self.seen.get(tuple(self.tokens[-self.n :]), (0, 0))
        return copied(self.tokens, start, min(k, self.m)) if times >= self.hits else []


class Counted:
    """The tokens of one request; per n-gram up to four different m-grams that followed it: [where, how often]."""

    def __init__(self, first: int, n: int, m: int, hits: int):
        self.tokens, self.n, self.m, self.hits = [first], n, m, hits
        self.values: dict[tuple[int, ...], list[list[int]]] = {}

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens; a key's continuation counts as soon as all m tokens of it are there."""
        for token in tokens:
            self.tokens.append(token)
            start = len(self.tokens) - self.m
            if start < self.n:
                continue
            values = self.values.setdefault(tuple(self.tokens[start - self.n : start]), [])
            new = self.tokens[start:]
            for value in values:
                if self.tokens[value[0] : value[0] + self.m] == new:
                    value[1] += 1
                    break
            else:
                if len(values) < VALUES:
                    values.append([start, 1])

    def continuation(self, k: int) -> list[int]:
        """Up to min(k, m) tokens of the most frequent m-gram after the last n tokens; none where it has no majority."""
        values = self.values.get(tuple(self.tokens[-self.n :]), [])
        times = sum(count for _, count in values)
        if not values or times < self.hits:
            return []
        start, most = max(values, key=lambda value: value[1])
        return self.tokens[start : start + min(k, self.m)] if most >= MAJORITY * (times - most) else []


class NgramMapDrafter(LookupDrafter):
    """`n`: tokens of a key; `m`: most tokens of a draft; `hits`: earlier occurrences a key needs before it is used."""

    def __init__(self, name: str, n: int = 3, m: int = 8, hits: int = 1):
        if min(n, m, hits) < 1:
            raise ValueError(f"{name}: size n={n}, m={m}, hits={hits}: each needs to be at least 1")
        self.name, self._settings = name, (n, m, hits)
        self._record = {"ngram-map-k": Latest, "ngram-map-k4v": Counted}[name]

    def record(self, first: int) -> Latest | Counted:
        return self._record(first, *self._settings)
