"""The simple n-gram drafter: what followed the same few tokens the last time, in the prompt or the text so far.

Sources: Saxena, "Prompt Lookup Decoding", 2023; with `longest` = `shortest` = size-n and `most` = size-m it is the
`ngram-simple` of llama.cpp.
"""

from __future__ import annotations

from headtrain.eval.decoder.drafters.lookup import LookupDrafter


class History:
    """The tokens of one request, and for every n-gram in them where its latest continuation begins."""

    def __init__(self, first: int, shortest: int, longest: int):
        self.tokens = [first]
        self.lengths = range(longest, shortest - 1, -1)
        self.after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens; the n-grams that end just before each of them now point at it."""
        for token in tokens:
            end = len(self.tokens)
            for n in self.lengths:
                if n <= end:
                    self.after[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def continuation(self, k: int) -> list[int]:
        """The k tokens that followed the longest known suffix when it last occurred; empty when none did.

        Where the copy runs into the end of the text it goes on into itself, so that a loop is continued.
        """
        for n in self.lengths:
            if n <= len(self.tokens) and (start := self.after.get(tuple(self.tokens[-n:]))) is not None:
                return copied(self.tokens, start, k)
        return []


def copied(tokens: list[int], start: int, k: int) -> list[int]:
    """k tokens of the text from `start` on; from its end the copy goes on into itself."""
    period = len(tokens) - start
    return tokens[start : start + k] if k <= period else [tokens[start + i % period] for i in range(k)]


class NgramDrafter(LookupDrafter):
    """Looks for suffixes of `longest` down to `shortest` tokens; drafts at most `most` tokens (None: all asked for)."""

    name = "ngram"

    def __init__(self, shortest: int = 1, longest: int = 3, most: int | None = None):
        if not 1 <= shortest <= longest or (most is not None and most < 1):
            raise ValueError(
                f"n-gram lengths {shortest} … {longest}, draft length {most}: needs 1 ≤ shortest ≤ longest, most ≥ 1"
            )
        self.shortest, self.longest, self.most = shortest, longest, most

    def record(self, first: int) -> History:
        return History(first, self.shortest, self.longest)

    def propose(self, k, uniform_BK=None):
        return super().propose(k if self.most is None else min(k, self.most), uniform_BK)
