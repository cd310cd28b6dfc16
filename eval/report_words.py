"""The sentences of a report: what was trained, how well it drafts, what limits it, what to run next.

Everything here is a function of the report's numbers, so that a sentence cannot say more than was measured.
"""

from __future__ import annotations

import math
from typing import Any

from headtrain.engines import servable_name, serve_command
from headtrain.eval.acceptance import difference_interval

NAMES = {"head": "head", "ngram": "n-gram", "head+ngram": "head + n-gram", "none": "plain decoding"}
KINDS = {"eagle3": "EAGLE-3"}
SUITES = {"heldout": "held-out prompts", "humaneval": "HumanEval"}
LEVEL_BAND = 0.02  # without intervals, acceptance lengths within 2 % count as level


def known(value: Any) -> bool:
    """Whether a number was measured (not None, not NaN)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def suite_name(suite: str) -> str:
    return SUITES.get(suite, suite.rsplit("/", 1)[-1])


def model_name(model: str | None) -> str:
    """The last part of a Hub id, folder or file location, without what only the file needs."""
    return (model or "an unnamed model").rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


def title(report: dict[str, Any]) -> str:
    kind = report["heads"][0]["type"]
    return f"{KINDS.get(kind, kind)} head for {model_name(report['target'].get('model'))}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds" if seconds >= 10 else f"{seconds:.1f} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def count(number: float) -> str:
    """1234567 -> 1.2 million; 9810000 -> 9.8 million; small numbers stay exact."""
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.1f} {word}"
    return f"{number:,.0f}"


# ---------------------------------------------------------------------------------------------- comparisons

MEASURED = ("tau", "tau_ci", "alpha", "alpha_conditional", "steps", "accepted", "tokens", "prompts", "batch")
TIMED = ("tokens_per_s", "plain_tokens_per_s", "speedup", "draft_share", "verify_share", "concurrent_workers")


def comparisons(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results side by side: one entry per (suite, temperature, k, tree) with every drafter's numbers.

    Acceptance comes from the row with the most steps (all prompts, batched), speed from the row that was timed for it
    (kind `speed`; where there is none, the row with the smallest batch). Order: as measured.
    """
    groups: dict[tuple, list[dict[str, Any]]] = {}
    plain = [row for row in results if row["drafter"] == "none"]
    for row in results:
        if row["drafter"] != "none":
            key = (row["suite"], row["temperature"], row["k"], row.get("tree") or "chain")
            groups.setdefault(key, []).append(row)
    for row in plain:  # plain decoding has no k: it stands beside every setting of its suite and temperature
        for key in [k for k in groups if k[:2] == (row["suite"], row["temperature"])]:
            groups[key].append(row)
    return [
        dict(zip(("suite", "temperature", "k", "tree"), key, strict=True)) | {"drafters": _by_drafter(rows)}
        for key, rows in groups.items()
    ]


def _by_drafter(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    order = {name: i for i, name in enumerate(("head", "ngram", "head+ngram"))}
    names = sorted({row["drafter"] for row in rows} - {"none"}, key=lambda name: (order.get(name, len(order)), name))
    out = {}
    for name in [*names, *(["none"] if any(row["drafter"] == "none" for row in rows) else [])]:
        mine = [row for row in rows if row["drafter"] == name]
        accepting = max(mine, key=lambda row: (row.get("kind") != "speed", row.get("steps") or 0))
        timed = min(mine, key=lambda row: (row.get("kind") != "speed", row.get("batch") or 0))
        out[name] = {key: accepting.get(key) for key in MEASURED} | {key: timed.get(key) for key in TIMED}
        out[name]["by_prompt"] = _by_prompt(accepting)
        out[name] |= {f"timed_{key}": timed.get(key) for key in ("tau", "batch", "prompts")}
    return out


def _by_prompt(row: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(steps, accepted) of every prompt of a result, from its flat step counts; empty where it has none."""
    out, at, flat = {}, 0, row.get("accepted_per_step") or []
    for prompt in row.get("per_prompt") or []:
        out[prompt["id"]] = (prompt["steps"], sum(flat[at : at + prompt["steps"]]))
        at += prompt["steps"]
    return out


def main_comparison(groups: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The setting the headline is about: first suite, lowest temperature, the k at which most is gained."""
    if not groups:
        return None
    suite, temperature = groups[0]["suite"], min(group["temperature"] for group in groups)
    mine = [g for g in groups if g["suite"] == suite and g["temperature"] == temperature] or groups[:1]

    def gain(group):
        rows = [row for name, row in group["drafters"].items() if name != "none"]
        speeds = [row["speedup"] for row in rows if known(row["speedup"])]
        taus = [row["tau"] for row in rows if known(row["tau"])]
        return (max(speeds, default=0.0), max(taus, default=0.0))

    return max(mine, key=gain)


def against(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """`above`, `below` or `level`: our acceptance length beside theirs; None when either was not measured.

    On the same prompts: level when the 95 % interval of the paired difference holds 0. Else with intervals of each:
    level as long as they overlap; without: level within 2 %.
    """
    if not (known(ours.get("tau")) and known(theirs.get("tau"))):
        return None
    mine, others = ours.get("by_prompt") or {}, theirs.get("by_prompt") or {}
    if mine and mine.keys() == others.keys():
        interval = difference_interval(list(mine.values()), [others[prompt] for prompt in mine])
        if interval:
            return "above" if interval[0] > 0 else "below" if interval[1] < 0 else "level"
    ours_ci, theirs_ci = ours.get("tau_ci"), theirs.get("tau_ci")
    if ours_ci and theirs_ci and all(map(known, [*ours_ci, *theirs_ci])):
        if ours_ci[0] > theirs_ci[1]:
            return "above"
        return "below" if ours_ci[1] < theirs_ci[0] else "level"
    ratio = ours["tau"] / theirs["tau"]
    return "level" if abs(ratio - 1) <= LEVEL_BAND else ("above" if ratio > 1 else "below")


# ------------------------------------------------------------------------------------------------ sentences


def headline(report: dict[str, Any]) -> str:
    """What was trained on what, in one sentence."""
    head, data, training = report["heads"][0], report["data"], report["training"]
    kind = KINDS.get(head["type"], head["type"])
    article = "An" if kind[0] in "AEIOUaeiou" else "A"
    size = f" ({count(head['parameters'])} parameters)" if known(head.get("parameters")) else ""
    text = f"{article} {kind} head{size} for {model_name(report['target'].get('model'))}"
    rows, tokens = data.get("responses_used"), data.get("response_tokens")
    if known(rows):
        whose = "the model's own answers" if data.get("on_policy", True) else "the data set's answers (off-policy)"
        text += f", trained on {rows:,} of {whose}" + (f" ({tokens:,} tokens)" if known(tokens) else "")
    if known(training.get("seconds")):
        text += f" in {duration(training['seconds'])}"
    return text + "."


def verdict(report: dict[str, Any]) -> str:
    """How well the head drafts, beside the n-gram that costs nothing."""
    group = main_comparison(comparisons(report["results"]))
    if group is None or "head" not in group["drafters"] or not known(group["drafters"]["head"]["tau"]):
        return "The head has not been measured yet, so nothing can be said about how well it drafts."
    rows = group["drafters"]
    place = suite_name(group["suite"])
    text = f"On {place} the head settles {rows['head']['tau']:.2f} tokens per target pass (plain decoding: 1.00)"
    free = rows.get("ngram")
    standing = against(rows["head"], free) if free else None
    if standing == "above":
        text += f", more than the free n-gram lookup's {free['tau']:.2f}."
    elif standing == "below":
        text += f". The free n-gram lookup settles {free['tau']:.2f}: on its own, this head is not worth serving here."
    elif standing == "level":
        text += f", level with the free n-gram lookup's {free['tau']:.2f} (the difference is within the noise)."
    else:
        text += ". No n-gram lookup was measured beside it, so whether it beats the free drafter is unknown."
    return text + _together(rows) + _pace(rows)


def _together(rows: dict[str, dict[str, Any]]) -> str:
    both = rows.get("head+ngram")
    if not both or not known(both["tau"]):
        return ""
    singles = [rows[name] for name in ("head", "ngram") if name in rows and known(rows[name]["tau"])]
    best = max(singles, key=lambda row: row["tau"])
    if len(singles) < 2:
        return f" With the n-gram's help it settles {both['tau']:.2f}."
    word = {
        "above": "more than either alone",
        "below": "less than the better of the two alone",
        "level": "about as much as the better of the two alone",
    }[against(both, best) or "level"]
    return f" Together they settle {both['tau']:.2f}, {word}."


def _pace(rows: dict[str, dict[str, Any]]) -> str:
    timed = {name: row for name, row in rows.items() if name != "none" and known(row["speedup"])}
    if not timed:
        return " Speed was not measured."
    name = max(timed, key=lambda n: timed[n]["speedup"])
    best, batch = timed[name]["speedup"], timed[name].get("timed_batch")
    where = "on this machine" + (f" at batch {batch}" if batch and batch > 1 else "")
    who = NAMES.get(name, name)
    if best < 0.98:
        return f" None of it pays {where}: the fastest ({who}) runs at {best:.2f}× plain speed."
    if best < 1.02:
        return f" {where.capitalize()} the fastest ({who}) runs no faster than plain decoding ({best:.2f}×)."
    text = f" {where.capitalize()} the fastest is {who}, at {best:.2f}× plain speed"
    if name != "head" and "head" in timed:
        text += f"; the head alone reaches {timed['head']['speedup']:.2f}×"
    return text + "."


def identity(report: dict[str, Any]) -> str:
    """Whether greedy speculative text equals plain greedy text."""
    greedy = [r for r in report["results"] if r["drafter"] != "none" and r.get("identical_to_plain") is not None]
    if not greedy:
        return "Whether speculative text equals plain text was not checked in this run."
    wrong = [r for r in greedy if not r["identical_to_plain"]]
    ties = sum(r.get("near_ties") or 0 for r in greedy)
    if wrong:
        where = ", ".join(
            sorted({f"{NAMES.get(r['drafter'], r['drafter'])} on {suite_name(r['suite'])}" for r in wrong})
        )
        first = next((f" First: {note}." for r in wrong for note in r.get("differences") or []), "")
        return (
            f"Speculative text does not equal plain greedy text: {where} ({ties} near-ties in all).{first} "
            "Find the reason before trusting these numbers."
        )
    text = f"In all {len(greedy)} greedy measurements the text equals plain greedy decoding, token for token"
    if ties:
        return f"{text}, but for {ties} near-tie{'s' * (ties > 1)} (two logits closer than 0.01 % of the largest)."
    return text + "."


def step_cost(row: dict[str, Any]) -> float | None:
    """What one speculative step costs, in plain steps: acceptance length / speed-up, both of the timed answers."""
    if known(row.get("timed_tau")) and known(row.get("speedup")) and row["speedup"] > 0:
        return row["timed_tau"] / row["speedup"]
    return None


def limits(report: dict[str, Any]) -> str:
    """The first of these that holds: what mostly keeps the head from being faster."""
    group = main_comparison(comparisons(report["results"]))
    row = group["drafters"].get("head") if group else None
    if not row or not known(row["tau"]):
        return "Nothing was measured for the head, so what limits it is unknown."
    alpha, cost = row["alpha"] or [], step_cost(row)
    if cost and row["speedup"] < 1:
        share = f", {row['draft_share']:.0%} of it drafting" if known(row["draft_share"]) else ""
        return (
            f"The price of a step: it costs {cost:.2f} plain steps on this machine{share}, and the head settles "
            f"{row['timed_tau']:.2f} tokens in it; it takes a better head, or a machine that verifies several tokens "
            "at the price of one."
        )
    if alpha and alpha[0] < 0.5:
        return (
            f"The first guess: it is right in {alpha[0]:.0%} of the steps, and everything after it depends on it. "
            f"{_learning(report)}"
        )
    coverage = (report["data"].get("suite_coverage") or {}).get(group["suite"])
    if known(coverage) and coverage < 0.95:
        return (
            f"The draft vocabulary: {1 - coverage:.1%} of the target's tokens lie outside it and can never be drafted."
        )
    conditional = row.get("alpha_conditional") or []
    if len(conditional) > 1 and known(conditional[-1]) and conditional[-1] < 0.75 * conditional[0]:
        return (
            f"The later positions: a first guess is right in {conditional[0]:.0%} of the steps, a last one, after "
            f"right ones, in {conditional[-1]:.0%}. A deeper unroll or longer training helps there."
        )
    if known(row["draft_share"]) and row["draft_share"] > 0.3:
        return f"Drafting takes {row['draft_share']:.0%} of the time: a smaller K or draft vocabulary would help."
    return "Nothing sticks out: more data and longer training are the next lever."


def _learning(report: dict[str, Any]) -> str:
    """Whether more data or more training is the better bet, from accuracy on training rows and on validation rows."""
    seen, new = report["training"].get("accuracy") or [], report["training"].get("valid_alpha") or []
    if seen and new and known(seen[0]) and known(new[0]) and seen[0] > new[0] + 0.1:
        places = f"On the rows it trained on it is right in {seen[0]:.0%}, on new ones in {new[0]:.0%}"
        return f"{places}: more prompts are the lever."
    return "More data and longer training are the lever."


def next_steps(report: dict[str, Any], config: dict[str, Any]) -> list[dict[str, str]]:
    """[{why, command}]: commands that fit what was found. Paths are relative to where the run was started."""
    run, results = report["run"], report["results"]
    steps = _train_again(run, config) if known(report["training"]["steps"]) else []
    measure = f"headtrain eval head={run}/head recipe={run}/config.yaml"
    measured = {row["k"] for row in results if row["drafter"] == "head"}
    if measured and (other := [k for k in (1, 2, 3, 5, 7) if k not in measured]):
        command = f"{measure} k=[{','.join(map(str, other))}]"
        steps.append({"why": "Find the draft length that is fastest here", "command": command})
    if all(row["temperature"] == 0 for row in results):
        steps.append({"why": "See how it drafts when sampling", "command": f"{measure} temperature=[0.7,1.0]"})
    if not report["exports"]:
        steps.append({"why": "Make the folder vLLM loads", "command": f"headtrain export head={run}/head format=vllm"})
    group = main_comparison(comparisons(results))
    for item in report["exports"]:
        if item["engine"] == "vllm":
            target, place = servable_name(report["target"].get("model")), f"{run}/{item['path']}"
            command = serve_command("vllm", target, place, group["k"] if group else 3)
            steps.append({"why": "Serve it with vLLM", "command": command})
    return steps


def _train_again(run: str, config: dict[str, Any]) -> list[dict[str, str]]:
    """Longer training, and more prompts where the sources have a limit and a name that is the same everywhere."""
    steps, fit = [], f"headtrain fit recipe={run}/config.yaml run_dir={run}"
    for key in ("seconds", "steps", "epochs"):
        if value := config.get("train", {}).get(key):
            longer = 4 * value
            text = str(int(longer) if longer == int(longer) else longer)
            steps.append({"why": "Train four times as long", "command": f"{fit}-longer train.{key}={text}"})
            break
    sources = config.get("data", {}).get("prompts") or []
    if sources and all(str(s["source"]).startswith("package:") and s.get("limit") for s in sources):
        listed = ",".join(f'{{source:"{s["source"]}",limit:{4 * s["limit"]}}}' for s in sources)
        command = f"{fit}-more-data 'data.prompts=[{listed}]'"
        steps.append({"why": "Train on four times the prompts", "command": command})
    return steps
