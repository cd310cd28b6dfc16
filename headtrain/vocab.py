"""`headtrain vocab`: the draft vocabulary that finished responses give, what sizes of it cover, and one in a file.

The choice is the one that training makes (`heads.vocab.draft_vocab`), by the training rows; what it is worth shows on
the validation rows. Responses are read file by file, twice; of the target only its config and tokenizer are needed.

Shapes: N tokens of a file, R rows of it, V target vocabulary, C candidates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtrain import vocabfile
from headtrain.config import ConfigError, RecipeConfig
from headtrain.data_gen.store import ResponseStore, RowInfo
from headtrain.facts import text_marks
from headtrain.files import Manifest
from headtrain.heads.vocab import draft_vocab, mapping

SIZES = (4096, 8192, 16384, 32000)
READ = 100  # supervised tokens of a row by which its language is told
SURE = 0.4  # of a language, else it is `unclear`
SHOWN = 12  # domains and languages, those with the most tokens


@dataclass
class Candidate:
    """A draft vocabulary to compare: what was asked for, its ids, and their mask over the target's."""

    asked: int | str
    ids: Tensor  # int64 [D]
    t2d_V: Tensor  # bool [V]


@dataclass
class Tally:
    """What the candidates cover of some rows: sums over rows."""

    tokens: int = 0
    inside_C: Tensor | int = 0  # of the supervised tokens

    def add(self, tokens: int, inside_C: Tensor) -> None:
        self.tokens, self.inside_C = self.tokens + tokens, self.inside_C + inside_C

    def shares(self) -> list[float]:
        return [int(n) / self.tokens for n in self.inside_C] if self.tokens else []


@dataclass
class Found:
    """What the second reading finds. Groups: (kind, name) -> split -> Tally; kind: all, domain, language or run."""

    groups: dict[tuple[str, str], dict[str, Tally]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Tally))
    )
    choices: int = 0  # supervised positions of validation rows
    outside_C: Tensor | int = 0  # of them, those where the target's choice is outside
    drafted: int = 0  # tokens of validation rows behind the first of an answer
    steps_C: Tensor | int = 0  # target passes for them, with a drafter that always says the target's choice if it can


def vocab(
    config: RecipeConfig, runs: list[Path], sizes: list[str], out: str | None = None, domains: list[str] | None = None
) -> str:
    """The comparison as text; with `out` also writes the draft vocabulary of `head.draft_vocab` to that file.

    runs: folders with finished responses, counted together. sizes: numbers, `full` or files to compare besides
    `head.draft_vocab`; none: the usual ones. domains: only training rows of these sources choose. ConfigError when
    something does not fit.
    """
    from headtrain.checks import load_tokenizer, target_config
    from headtrain.data_gen.server import end_ids
    from headtrain.stages import quiet_libraries

    quiet_libraries()
    if out:
        _check_out(out, config.head.draft_vocab)
    stores = [_store(run) for run in runs]
    tokenizer, text = load_tokenizer(config.target), target_config(config.target)
    mark, V, ends = text_marks(tokenizer)["tokenizer"], text.vocab_size, end_ids(config.target, text, tokenizer)
    _same_target(runs)
    sources = _sources(stores, domains) if domains else None
    counts = [store.token_counts("train", V, sources) for store in stores]
    supervised_V, all_V = (sum(parts) for parts in zip(*counts, strict=True))
    if not int(supervised_V.sum()):
        raise ConfigError("no supervised token in a row of split train: nothing to choose a draft vocabulary by")
    asked = _asked(config.head.draft_vocab, sizes, V)
    candidates = []
    for one in asked:
        ids = draft_vocab(one, supervised_V, all_V, ends, mark)
        candidates.append(Candidate(one, ids, mapping(ids, V)[1]))
    found, languages = Found(), Languages(tokenizer)
    for run, store in zip(runs, stores, strict=True):
        _read(found, run, store, candidates, languages, max(config.eval.k))
    lines = _text(found, candidates, config, runs, supervised_V, domains)
    if out:
        lines += ["", _write(out, candidates[asked.index(config.head.draft_vocab)], supervised_V, mark, runs, domains)]
    return "\n".join(lines)


def _check_out(out: str, asked: int | str) -> None:
    if vocabfile.is_file(asked):
        raise ConfigError(f"out={out}: head.draft_vocab={asked} is a file already; give a size")
    if not out.endswith(".json"):
        raise ConfigError(f"out={out}: the file is JSON; call it NAME.json")
    if not Path(out).parent.is_dir():
        raise ConfigError(f"out={out}: there is no folder {Path(out).parent}; make it first")


def _store(run: Path) -> ResponseStore:
    if not Manifest(run / "responses").data.get("complete"):
        raise ConfigError(f"{run / 'responses'} is missing or unfinished; `headtrain generate` makes it")
    return ResponseStore(run / "responses")


def _same_target(runs: list[Path]) -> None:
    """ConfigError unless the runs differ and all their responses are of one target."""

    def target(run: Path) -> Any:
        return Manifest(run / "responses").data.get("made_from", {}).get("target", {}).get("identity")

    for n, run in enumerate(runs[1:], 1):
        if run.resolve() in [other.resolve() for other in runs[:n]]:
            raise ConfigError(f"run_dir: {run} is given twice and would be counted twice; leave one out")
        if target(run) != target(runs[0]):
            raise ConfigError(f"run_dir: {run} has the responses of another target than {runs[0]}; give runs of one")


def _sources(stores: list[ResponseStore], domains: list[str]) -> set[str]:
    """The sources that are asked for, by their whole name or its last part."""
    known = {row.source for store in stores for rows, _ in store.files() for row in rows}
    found = {source for source in known if source in domains or Path(source).name in domains}
    for name in domains:
        if not any(name in (source, Path(source).name) for source in found):
            raise ConfigError(f"domains: no row is from {name}; there are: {', '.join(sorted(known))}")
    return found


def _asked(own: int | str, sizes: list[str], vocab_size: int) -> list[int | str]:
    """What to compare, smallest first: `head.draft_vocab`, and the sizes given or the usual ones."""
    wanted = [int(size) if size.isdecimal() else size for size in sizes]
    wanted = wanted or [*(size for size in SIZES if size < vocab_size), "full"]
    return sorted({own, *wanted}, key=lambda size: (vocabfile.size_of(size, vocab_size), str(size)))


class Languages:
    """Tells a row's language by its first supervised tokens: an ISO 639 code, zxx (none: code, numbers) or unclear."""

    def __init__(self, tokenizer: Any):
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        self.tokenizer = tokenizer
        self.known = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=SURE)

    def of(self, ids: Tensor) -> str:
        text = self.tokenizer.decode(ids[:READ].tolist(), skip_special_tokens=True)
        name = self.known.classify(text)[0]
        return "unclear" if name == "und" else name


def _read(
    found: Found, run: Path, store: ResponseStore, candidates: list[Candidate], languages: Languages, k: int
) -> None:
    """Adds what the responses of a run say about the candidates."""
    choices = target_choices(run)
    masks_CV = torch.stack([candidate.t2d_V for candidate in candidates])
    for rows, read in store.files():
        if not rows:
            continue
        ids_N, supervised_N = read.ids.long(), read.supervised
        starts_R1 = torch.tensor([0, *(row.tokens for row in rows)]).cumsum(0)
        inside_CN = masks_CV[:, ids_N] & supervised_N
        sums_CN1 = torch.nn.functional.pad(inside_CN.cumsum(1), (1, 0))
        inside_CR = sums_CN1[:, starts_R1[1:]] - sums_CN1[:, starts_R1[:-1]]
        for n, row in enumerate(rows):
            span = slice(int(starts_R1[n]), int(starts_R1[n + 1]))
            names = {"all": "", "domain": row.source, "run": str(run)}
            names["language"] = languages.of(ids_N[span][supervised_N[span]])
            for kind, name in names.items():
                found.groups[kind, name][row.split].add(row.supervised, inside_CR[:, n])
        valid_R = torch.tensor([row.split == "valid" for row in rows])
        valid_N = valid_R.repeat_interleave(starts_R1.diff()) & supervised_N
        chosen_N = choices(rows, ids_N) if choices else ids_N
        known_CN = masks_CV[:, chosen_N]
        found.choices += int(valid_N.sum())
        found.outside_C = found.outside_C + (valid_N & ~known_CN).sum(1)
        begins_N = torch.zeros(len(ids_N), dtype=torch.bool)
        begins_N[starts_R1[:-1]] = True
        drafted_N, ends_N = behind_the_first(valid_N, begins_N)
        found.drafted += int(drafted_N.sum())
        steps = [fewest_steps(known_N[drafted_N], ends_N[drafted_N], k) for known_N in known_CN]
        found.steps_C = found.steps_C + torch.tensor(steps)


def target_choices(run: Path) -> Callable[[list[RowInfo], Tensor], Tensor] | None:
    """choices(rows of a responses file, their ids) -> for each token, what the target chose in its place, int64 [N].

    From the run's captures; None where there are none. In greedy responses, and in rows not captured, the token itself.
    """
    from safetensors import safe_open

    from headtrain.data_gen.store import read_header

    if not Manifest(run / "captures").data.get("complete"):
        return None

    def choices(rows: list[RowInfo], ids_N: Tensor) -> Tensor:
        path, chosen_N = run / "captures" / rows[0].file.replace("responses", "captures"), ids_N.clone()
        if not path.is_file():
            return chosen_N
        with safe_open(path, framework="pt") as handle:
            argmax, starts = handle.get_tensor("argmax").long(), handle.get_tensor("offsets").tolist()
        captured = {row.id: (starts[row.index], row.tokens) for row in read_header(path)[0]}
        at = 0
        for row in rows:
            if row.id in captured:
                start, length = captured[row.id]
                chosen_N[at + 1 : at + length] = argmax[start : start + length - 1]
            at += row.tokens
        return chosen_N

    return choices


def behind_the_first(supervised_N: Tensor, begins_N: Tensor) -> tuple[Tensor, Tensor]:
    """(the supervised tokens behind the first of each span, bool [N]; those that end a span, bool [N]).

    begins_N: where a row begins. The first token of an answer comes from the prompt's own pass, not from a step.
    """
    before_N = supervised_N.roll(1) & ~begins_N
    after_N = (supervised_N & ~begins_N).roll(-1)
    before_N[:1], after_N[-1:] = False, False
    return supervised_N & before_N, supervised_N & ~after_N


def fewest_steps(known_N: Tensor, ends_N: Tensor, k: int) -> int:
    """Steps that a chain of k drafts needs for spans of tokens, when every token that is known is drafted right.

    A step settles up to k known tokens and one more of any kind; a token not known ends it. ends_N: spans' last tokens.
    """
    ends = (~known_N | ends_N).nonzero()[:, 0]
    lengths = torch.diff(ends, prepend=torch.tensor([-1]))
    return int((-(-lengths // (k + 1))).sum())


# ------------------------------------------------------------------------------------------------- what is said

def _text(
    found: Found, candidates: list[Candidate], config: RecipeConfig, runs: list[Path], supervised_V: Tensor,
    domains: list[str] | None,
) -> list[str]:  # fmt: skip
    whole = found.groups["all", ""]
    by = "training rows" + (f" of {', '.join(domains)}" if domains else "")
    seen, V = int((supervised_V > 0).sum()), len(supervised_V)
    lines = [
        f"responses of {', '.join(map(str, runs))}: {whole['train'].tokens:,} supervised tokens to train on, "
        f"{whole['valid'].tokens:,} to validate",
        f"chosen by the {by}: {seen:,} of the target's {V:,} tokens occur there",
        "",
    ]
    k = max(config.eval.k)
    rows = [["draft tokens", "train", "valid", "target's choice outside", f"τ at most (K = {k})", ""]]
    shares = {split: whole[split].shares() or [None] * len(candidates) for split in ("train", "valid")}
    for n, one in enumerate(candidates):
        outside = int(found.outside_C[n]) / found.choices if found.choices else None
        most = found.drafted / int(found.steps_C[n]) if found.drafted else None
        mine = "<- head.draft_vocab" if one.asked == config.head.draft_vocab else ""
        rows.append([
            _name(one), _percent(shares["train"][n]), _percent(shares["valid"][n]), _percent(outside),
            "–" if most is None else f"{most:.2f}", mine,
        ])  # fmt: skip
    lines += _table(rows)
    for kind in ("run", "domain", "language"):
        names = [name for group, name in found.groups if group == kind]
        if len(names) > 1 or kind == "language":
            lines += ["", *_table(list(_group_rows(found, kind, names, candidates)))]
    return lines


def _group_rows(found: Found, kind: str, names: list[str], candidates: list[Candidate]) -> Iterator[list[str]]:
    """A table of groups: tokens, then per candidate how much is covered of the training and of the validation rows."""
    yield [f"by {kind}: train / valid", "tokens", *map(_name, candidates)]
    groups = {name: found.groups[kind, name] for name in names}
    order = sorted(names, key=lambda name: -sum(tally.tokens for tally in groups[name].values()))
    for name in order[:SHOWN]:
        tallies = [groups[name][split] for split in ("train", "valid")]
        shares = [tally.shares() or [None] * len(candidates) for tally in tallies]
        cells = [" / ".join(map(_percent, pair)) for pair in zip(*shares, strict=True)]
        yield [name if len(name) <= 40 else f"…{name[-39:]}", f"{sum(tally.tokens for tally in tallies):,}", *cells]
    if rest := order[SHOWN:]:
        yield [f"{len(rest)} more", f"{sum(t.tokens for name in rest for t in groups[name].values()):,}"]


def _name(candidate: Candidate) -> str:
    return candidate.asked if candidate.asked == "full" else f"{len(candidate.ids):,}" + (
        f" ({Path(candidate.asked).name})" if vocabfile.is_file(candidate.asked) else ""
    )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f} %"


def _table(rows: list[list[str]]) -> list[str]:
    """Rows of cells in columns, the first one flush left, the others flush right."""
    widths = [max(len(row[n]) for row in rows if n < len(row)) for n in range(max(map(len, rows)))]
    return [
        "  ".join(cell.rjust(widths[n]) if n else cell.ljust(widths[n]) for n, cell in enumerate(row)).rstrip()
        for row in rows
    ]


def _write(
    out: str, candidate: Candidate, supervised_V: Tensor, mark: str, runs: list[Path], domains: list[str] | None
) -> str:
    """Writes the candidate to the file `out`; what was written."""
    made_from = {
        "responses": [Manifest(run / "responses").data.get("fingerprint") for run in runs], "domains": domains,
        "head.draft_vocab": candidate.asked,
    }  # fmt: skip
    ids = candidate.ids.tolist()
    file = vocabfile.VocabFile(ids, len(supervised_V), mark, supervised_V[candidate.ids].tolist(), made_from)
    file.write(out)
    return f"{out}: {len(ids):,} tokens, mapping {file.mapping}; train with head.draft_vocab={out}"
