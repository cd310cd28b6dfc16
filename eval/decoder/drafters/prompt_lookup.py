"""Prompt lookup as `transformers.generate(prompt_lookup_num_tokens=K)` does it, for comparisons with it.

It differs from `ngram` in the place it copies from (the first occurrence, not the latest) and in that the copy ends
with the text. Source: transformers, PromptLookupCandidateGenerator (its max_matching_ngram_size is 2 by default).
"""

from __future__ import annotations

from headtrain.eval.decoder.drafters.lookup import LookupDrafter


class FirstOccurrences:
    """The tokens of one request, and for every n-gram in them where its first continuation begins."""

    def __init__(self, first: int, longest: int):
        self.tokens, self.longest = [first], longest
        self.after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for n in range(1, min(self.longest, end) + 1):
                self.after.setdefault(tuple(self.tokens[end - n :]), end)
            self.tokens.append(token)

    def continuation(self, k: int) -> list[int]:
        """Up to k tokens that followed the longest known suffix when it first occurred."""
        for n in range(min(self.longest, len(self.tokens)), 0, -1):
            if (start := self.after.get(tuple(self.tokens[-n:]))) is not None:
                return self.tokens[start : start + k]
        return []


class PromptLookupDrafter(LookupDrafter):
    """Looks for the last `longest` tokens down to one, prompt included."""

    name = "prompt_lookup"

    def __init__(self, longest: int = 2):
        if longest < 1:
            raise ValueError(f"prompt_lookup: n-grams of at most {longest} tokens; needs at least 1")
        self.longest = longest

    def record(self, first: int) -> FirstOccurrences:
        return FirstOccurrences(first, self.longest)
