"""SuffixDecoding: continuations by frequency, from the request's own text and from what was answered before.

Two suffix automata are kept: one of the request's prompt and text, one of the answers of requests that ended. Every
suffix of the text that either of them has seen says how often which token followed it. The draft is the one of which
most tokens are expected to be accepted; it is no longer than the suffix it rests on, and ends where that seldom holds.
Source: Oliaro et al., "SuffixDecoding", 2024 (arXiv 2411.04975); its least probability is the one used here.

Memory: an automaton has at most two states per token (about 0.5 kB a token). Of ended requests at most the latest LIMIT
tokens are kept, which makes 25 MB; a request's own text is bounded by its capacity.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from headtrain.eval.decoder.drafters.lookup import LookupDrafter

LIMIT = 50_000  # tokens of ended requests
LEAST = 0.1  # a token with a smaller estimated chance of being reached and accepted is not drafted
CHAIN = 16  # suffixes considered, from the longest down; in natural text there are fewer
COUNTED = 64  # states counted per new token; only a text that repeats one loop all the time has more
REACH = 64  # tokens of a text that are matched against answers added since
GAP = -1  # stands between two texts: no token is


class Automaton:
    """A suffix automaton with counts: state 0 is the empty string, every other one a set of strings that always end
    at the same places; `length` is that of the longest, `count` the number of places, `link` the state of the longest
    suffix that ends at more places, `next` the states one token further."""

    def __init__(self):
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        self.last = 0

    def _state(self, length: int, link: int, following: dict[int, int], count: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.link) - 1

    def add(self, token: int) -> None:
        """Blumer et al. 1985, one token further; then counts the new end of every suffix of the text."""
        following, link, length = self.next, self.link, self.length
        new = self._state(length[self.last] + 1, 0, {}, 0)
        at = self.last
        while at >= 0 and token not in following[at]:
            following[at][token] = new
            at = link[at]
        if at >= 0:
            same = following[at][token]
            if length[same] != length[at] + 1:
                copy = self._state(length[at] + 1, link[same], dict(following[same]), self.count[same])
                while at >= 0 and following[at].get(token) == same:
                    following[at][token] = copy
                    at = link[at]
                link[same] = same = copy
            link[new] = same
        self.last = at = new
        for _ in range(COUNTED):
            if at == 0:
                break
            self.count[at] += 1
            at = link[at]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """From the longest known suffix (its state and length) to that of the text with `token` added."""
        while state and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        following = self.next[state].get(token)
        return (0, 0) if following is None else (following, length + 1)

    def draft(self, state: int, k: int) -> tuple[float, list[int]]:
        """(tokens expected to be accepted, tokens): at most k likeliest ones after a state's strings.

        Where the text ends, the longest shorter suffix that goes on takes over, so that a loop is continued.
        """
        chance, expected, tokens = 1.0, 0.0, []
        while len(tokens) < k:
            while state and not self.next[state]:
                state = self.link[state]
            if not state:
                break
            total, best, following = 0, 0, 0
            for token, child in self.next[state].items():
                total += self.count[child]
                if self.count[child] >= best:  # of equal ones the latest
                    best, following, likeliest = self.count[child], child, token
            chance *= best / total
            if chance < LEAST or likeliest == GAP:
                break
            expected += chance
            tokens.append(likeliest)
            state = following
        return expected, tokens

    def best(self, state: int, length: int, k: int) -> tuple[float, list[int]]:
        """The best draft over the suffixes of the text, the longest being (state, length), each at most as long as its
        suffix; of equal ones the longest suffix's."""
        expected, tokens = 0.0, []
        for _ in range(CHAIN):
            if state <= 0 or expected >= min(k, length):  # no shorter suffix can promise more
                break
            found = self.draft(state, min(k, length))
            if found[0] > expected:
                expected, tokens = found
            state = self.link[state]
            length = self.length[state]
        return expected, tokens


class Answers:
    """The latest answers of requests that ended, at most LIMIT tokens, in one automaton."""

    def __init__(self):
        self.texts: deque[list[int]] = deque()
        self.automaton, self.tokens, self.added = Automaton(), 0, 0

    def add(self, text: list[int]) -> None:
        """Takes in a text; when there are too many tokens, the oldest texts are forgotten until half of them are."""
        self.added += 1
        self.texts.append(text[-LIMIT // 2 :])
        self.tokens += len(self.texts[-1])
        new = [self.texts[-1]]
        if self.tokens > LIMIT:
            while self.tokens > LIMIT // 2:
                self.tokens -= len(self.texts.popleft())
            self.automaton, new = Automaton(), self.texts
        for tokens in new:
            for token in (*tokens, GAP):
                self.automaton.add(token)


class Text:
    """One request: its text's own automaton, and the longest suffix of the text that the answers know.

    That suffix is followed token by token, and looked for anew (up to REACH tokens of it) when answers were added.
    """

    def __init__(self, first: int, answers: Answers):
        self.tokens, self.own, self.answers = [first], Automaton(), answers
        self.own.add(first)
        self.state, self.length, self.added = 0, 0, -1

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self.own.add(token)
        self.tokens += tokens
        if self.added != self.answers.added:
            self.state, self.length, self.added = 0, 0, self.answers.added
            tokens = self.tokens[-REACH:]
        for token in tokens:
            self.state, self.length = self.answers.automaton.step(self.state, self.length, token)

    def continuation(self, k: int) -> list[int]:
        """The draft that promises most; the request's own text comes first where both promise the same."""
        repeated = self.own.link[self.own.last]
        own = self.own.best(repeated, self.own.length[repeated], k)
        known = self.answers.automaton.best(self.state, self.length, k)
        return max(own, known, key=lambda found: found[0])[1]


class SuffixDrafter(LookupDrafter):
    """Remembers the answers of every request that it has drafted for, across batches, as long as the object lives.

    That is what makes it fast on repetitive work, and why a drafter that is to be measured must be a new one. (Above
    temperature 0 a request's answer follows the target's distribution, but which answer it is depends on earlier ones.)
    """

    name = "suffix"

    def __init__(self):
        self._answers, self._rows = Answers(), []

    def record(self, first: int) -> Text:
        return Text(first, self._answers)

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        self._remember(range(len(self._rows)))
        self._prompts = [len(prompt) for prompt in prompts]
        super().start(prompts, capacity)

    def select(self, rows: Tensor) -> None:
        going = rows.tolist()
        self._remember(set(range(len(self._rows))) - set(going))
        self._prompts = [self._prompts[i] for i in going]
        super().select(rows)

    def _remember(self, ended) -> None:
        for i in sorted(ended):
            self._answers.add(self._rows[i].tokens[self._prompts[i] :])
