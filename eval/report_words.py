"""The sentences of a report: what was trained, how well it drafts, what limits it, what to run next.

Everything here is a function of the report's numbers, so that a sentence cannot say more than was measured.
"""

from __future__ import annotations

import re
from typing import Any

from headtrain.config import BY_DEPTH, KINDS
from headtrain.engines import format_of, servable_name, serve_command, serves
from headtrain.eval.report_data import against, comparisons, known, main_comparison, pick

NAMES = {
    "head": "head", "ngram": "n-gram", "head+ngram": "head + n-gram", "head+ngram-tree": "head + n-gram in one tree",
    "ngram-map-k": "n-gram map", "ngram-map-k4v": "n-gram map, several continuations", "prompt_lookup": "prompt lookup",
    "suffix": "suffix tree", "layer_skip": "layer skipping", "draft_model": "draft model", "none": "plain decoding",
}  # fmt: skip
SUITES = {
    "heldout": "held-out prompts", "humaneval": "HumanEval", "mt_bench": "MT-Bench", "gsm8k": "GSM8K",
    "math500": "MATH-500", "alpaca": "Alpaca", "cnn_dm": "CNN/DM", "spec_bench": "Spec-Bench",
    "translation": "translation", "rag": "RAG", "code_edit": "code editing", "long_cot": "long chain-of-thought",
}  # fmt: skip
LOSSY = "Typical acceptance changes the output"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}
FOLDERS = ("eagle", "eagle3", "peagle")  # heads that engines load from a folder of their own
FREE = ("ngram", "ngram-map-k", "ngram-map-k4v", "prompt_lookup", "suffix")  # drafters that need no network


def suite_name(suite: str) -> str:
    """A suite as a reader knows it; `suite/part` is a part of one."""
    name, _, part = suite.partition("/")
    return SUITES.get(name, suite.rsplit("/", 1)[-1]) + (f", {part}" if part and name in SUITES else "")


def drafter_name(label: str) -> str:
    """A drafter as a reader knows it; `drafter: head id` where several heads were measured."""
    name, colon, head = label.partition(": ")
    return NAMES.get(name, name) + colon + head


def tree_words(tree: str) -> str:
    """`chain` as it is; other shapes with what they mean."""
    if found := re.fullmatch(r"(\d+)x(\d+)", tree):
        return f"dynamic tree {tree} (top {found[1]} of each node, the best {found[2]} nodes verified)"
    if found := re.fullmatch(r"iid-(\d+)x(\d+)", tree):
        return f"sampled tree {tree} ({found[1]} independent children of each node, {found[2]} nodes verified)"
    if found := re.fullmatch(r"static-(\d+)", tree):
        return f"static tree {tree} (the same {found[1]} nodes in every step)"
    return tree


def heat_words(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def setting_words(group: dict[str, Any]) -> str:
    """K, tree, temperature and rule of a comparison."""
    rules = {"exact": "", "typical": ", typical acceptance (lossy)", "block": ", block verification"}
    depth = "K" if group["tree"] == "chain" else "depth K"
    heat = heat_words(group["temperature"])
    return f"{depth} = {group['k']}, {tree_words(group['tree'])}, {heat}{rules[group['rule']]}"


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
    """How well the head drafts, beside the best drafter that costs nothing."""
    groups = comparisons(report["results"])
    group = main_comparison(groups)
    head = pick(group, "head") if group else None
    if head is None or not known(head["tau"]):
        return "The head has not been measured yet, so nothing can be said about how well it drafts."
    text = f"On {suite_name(group['suite'])} {whose(report, head)} settles {head['tau']:.2f} tokens per target pass"
    text += " (plain decoding: 1.00)" + f" with a {tree_words(group['tree'])}" * (group["tree"] != "chain")
    free = _free(groups, group)
    standing = against(head, free) if free else None
    name = f"free {drafter_name(free['drafter'])}{' lookup' * (free['drafter'] == 'ngram')}" if free else ""
    if standing == "above":
        text += f", more than the {name}'s {free['tau']:.2f}."
    elif standing == "below":
        text += f". The {name} settles {free['tau']:.2f}: on its own, this head is not worth serving here."
    elif standing == "level":
        text += f", level with the {name}'s {free['tau']:.2f} (the difference is within the noise)."
    else:
        text += ". No n-gram lookup was measured beside it, so whether it beats the free drafter is unknown."
    text += f" {LOSSY}: these are no numbers of lossless decoding." if group["rule"] == "typical" else ""
    return text + _together(group, head) + _pace(group["drafters"])


def whose(report: dict[str, Any], row: dict[str, Any]) -> str:
    """The head of a result in words: by its id where the report has several."""
    return f"head {row['head']}" if len(report["heads"]) > 1 else "the head"


def head_facts(report: dict[str, Any], row: dict[str, Any] | None) -> dict[str, Any]:
    """What the report says of the head of a result."""
    return next((head for head in report["heads"] if row and head["id"] == row["head"]), report["heads"][0])


def _free(groups: list[dict[str, Any]], like: dict[str, Any]) -> dict[str, Any] | None:
    """The best free drafter on the same prompts with the same K, which only ever drafts chains; lossy beside lossy."""
    same = [g for g in groups if all(g[key] == like[key] for key in ("suite", "temperature", "k"))]
    same = [g for g in same if (g["rule"] == "typical") == (like["rule"] == "typical")]
    rows = [row for group in same for row in group["drafters"].values() if row["drafter"] in FREE and known(row["tau"])]
    return max(rows, key=lambda row: row["tau"], default=None)


def _together(group: dict[str, Any], head: dict[str, Any]) -> str:
    both, singles = pick(group, "head+ngram", head["head"]), [head, pick(group, "ngram")]
    if not both or not known(both["tau"]):
        return ""
    singles = [row for row in singles if row and known(row["tau"])]
    if len(singles) < 2:
        return f" With the n-gram's help it settles {both['tau']:.2f}."
    word = {
        "above": "more than either alone",
        "below": "less than the better of the two alone",
        "level": "about as much as the better of the two alone",
    }[against(both, max(singles, key=lambda row: row["tau"])) or "level"]
    return f" Together they settle {both['tau']:.2f}, {word}."


def _pace(rows: dict[str, dict[str, Any]]) -> str:
    timed = {name: row for name, row in rows.items() if name != "none" and known(row["speedup"])}
    if not timed:
        return " Speed was not measured."
    name = max(timed, key=lambda n: timed[n]["speedup"])
    best, batch = timed[name]["speedup"], timed[name].get("timed_batch")
    where = "on this machine" + (f" at batch {batch}" if batch and batch > 1 else "")
    who = drafter_name(name)
    if best < 0.98:
        return f" None of it pays {where}: the fastest ({who}) runs at {best:.2f}× plain speed."
    if best < 1.02:
        return f" {where.capitalize()} the fastest ({who}) runs no faster than plain decoding ({best:.2f}×)."
    text = f" {where.capitalize()} the fastest is {who}, at {best:.2f}× plain speed"
    if name != "head" and "head" in timed:
        text += f"; the head alone reaches {timed['head']['speedup']:.2f}×"
    return text + "."


def series_of(report: dict[str, Any], group: dict[str, Any], drafter: str, head: str | None) -> dict[str, Any] | None:
    """The cost model's predictions for a drafter in the setting of a comparison."""
    keys = ("suite", "temperature", "tree", "rule")
    for one in (report.get("cost") or {}).get("series", []):
        if all(one[key] == group[key] for key in keys) and (one["drafter"], one["head"]) == (drafter, head):
            return one
    return None


def forecast(report: dict[str, Any]) -> str:
    """What the cost model says of the head, and how well it fits what was timed; empty without one."""
    cost, group = report.get("cost"), main_comparison(comparisons(report["results"]))
    head = pick(group, "head") if group else None
    one = series_of(report, group, "head", head["head"]) if head else None
    if one is None:
        return ""
    first, stop = one["best"][0], one["stops_paying"]
    text = f"Prefill aside, {whose(report, head)} is predicted to be fastest at K = {first['k']} at batch "
    text += f"{first['batch']}, {first['speedup']:.2f}× plain speed; "
    if stop is None:
        text += f"at every batch up to {one['best'][-1]['batch']} the head still pays."
    else:
        text += "drafting does not pay at any batch." if stop == 1 else f"from batch {stop} on drafting does not pay."
    if known(one["oracle_k"]):
        text += f" Drafting just what is accepted, were it known, would give {one['oracle_k']:.2f}×."
    checks = [check for series in cost["series"] for check in series["checks"] if check["kind"] == "speed"]
    errors = [abs(check["error"]) for check in checks]
    if errors:
        text += f" Over {len(errors)} timed settings prediction and measurement differ by at most {max(errors):.0%}."
    return text


def identity(report: dict[str, Any]) -> str:
    """Whether greedy speculative text equals plain greedy text."""
    greedy = [r for r in report["results"] if r["drafter"] != "none" and r.get("identical_to_plain") is not None]
    if any(r.get("rule") == "typical" for r in report["results"] if r["drafter"] != "none"):
        lossy = f"{LOSSY}: its text is not that of plain decoding, and is not compared with it. "
        exact = [r for r in report["results"] if r.get("rule") != "typical"]
        return lossy + (identity(report | {"results": exact}) if greedy else "")
    if not greedy:
        return "Whether speculative text equals plain text was not checked in this run."
    wrong = [r for r in greedy if not r["identical_to_plain"]]
    ties = sum(r.get("near_ties") or 0 for r in greedy)
    if wrong:
        where = ", ".join(
            sorted({f"{drafter_name(r['drafter'])} on {suite_name(r['suite'])}" for r in wrong})
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
    row = pick(group, "head") if group else None
    if not row or not known(row["tau"]):
        return "Nothing was measured for the head, so what limits it is unknown."
    about = f"About {whose(report, row)}: " if len(report["heads"]) > 1 else ""
    found = _price(row) or _acceptance_limit(report, group, row) or _time_limit(report, group, row)
    return about + (found or "Nothing sticks out: more data and longer training are the next lever.")


def _price(row: dict[str, Any]) -> str:
    cost = step_cost(row)
    if cost is None or row["speedup"] >= 1:
        return ""
    share = f", {row['draft_share']:.0%} of it drafting" if known(row["draft_share"]) else ""
    return (
        f"The price of a step: it costs {cost:.2f} plain steps on this machine{share}, and the head settles "
        f"{row['timed_tau']:.2f} tokens in it; it takes a better head, or a machine that verifies several tokens "
        "at the price of one."
    )


def _acceptance_limit(report: dict[str, Any], group: dict[str, Any], row: dict[str, Any]) -> str:
    alpha, conditional = row["alpha"] or [], row.get("alpha_conditional") or []
    if alpha and known(alpha[0]) and alpha[0] < 0.5:
        return (
            f"The first guess: it is right in {alpha[0]:.0%} of the steps, and everything after it depends on it. "
            f"{_learning(report)}"
        )
    coverage = (head_facts(report, row).get("suite_coverage") or {}).get(group["suite"])
    if known(coverage) and coverage < 0.95:
        return (
            f"The draft vocabulary: {1 - coverage:.1%} of the target's tokens lie outside it and can never be drafted."
        )
    if len(conditional) > 1 and known(conditional[-1]) and conditional[-1] < 0.75 * conditional[0]:
        return (
            f"The later positions: a first guess is right in {conditional[0]:.0%} of the steps, a last one, after "
            f"right ones, in {conditional[-1]:.0%}. A deeper unroll or longer training helps there."
        )
    return ""


def _time_limit(report: dict[str, Any], group: dict[str, Any], row: dict[str, Any]) -> str:
    """Where the time of a head that guesses well goes, if one part of it takes more than its due."""
    draft, verify, prefill = (row.get(f"{name}_share") for name in ("draft", "verify", "prefill"))
    if known(draft) and draft > 0.3:
        return f"Drafting takes {draft:.0%} of the time: a smaller K or draft vocabulary would help."
    if known(prefill) and prefill > 0.3:
        return f"Reading the prompts takes {prefill:.0%} of the time, and no drafter shortens that."
    if all(map(known, (draft, verify, prefill))) and (rest := 1 - draft - verify - prefill) > 0.2:
        return f"Bookkeeping between the steps takes {rest:.0%} of the time; a larger target would hide it."
    wide = [v["forwards"] for v in (report.get("cost") or {}).get("verify", [])
            if v["batch"] == row["timed_batch"] and v["tokens"] >= group["k"] + 1]  # fmt: skip
    if wide and group["tree"] == "chain" and wide[0] > 1.5:
        return (
            f"Verification: a forward of {group['k'] + 1} positions costs {wide[0]:.2f} plain ones on this machine; "
            "a smaller K, or a machine with more arithmetic to spare, would help."
        )
    return ""


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
    group = main_comparison(comparisons(results))
    head = head_facts(report, pick(group, "head") if group else None)
    place, of = f"head={run}/{head['path']}", f" (head {head['id']})" * (len(report["heads"]) > 1)
    measure = f"headtrain eval {place} recipe={run}/config.yaml"
    measured = {row["k"] for row in results if row["drafter"] == "head" and row["head"] in (None, head["id"])}
    most = head["unroll"] if head["type"] in BY_DEPTH else 7
    if measured and (other := [k for k in (1, 2, 3, 5, 7) if k not in measured and k <= most]):
        command = f"{measure} k=[{','.join(map(str, other))}]"
        steps.append({"why": f"Find the draft length that is fastest here{of}", "command": command})
    if all(row["temperature"] == 0 for row in results):
        steps.append({"why": f"See how it drafts when sampling{of}", "command": f"{measure} temperature=[0.7,1.0]"})
    if not report["exports"] and head["type"] in FOLDERS:
        steps.append({"why": f"Make the folder vLLM loads{of}", "command": f"headtrain export {place} format=vllm"})
    return steps


def engine_flags(report: dict[str, Any]) -> list[dict[str, Any]]:
    """[{engine, k, note, command}]: how to serve the head with the K that was best here; command None where it cannot.

    The K is the cost model's at batch 1, else the fastest timed, else the one with the largest τ, of lossless chains
    (vLLM and TensorRT-LLM draft chains; for SGLang the head's best tree follows where it was faster than its chain).
    """
    groups = [group for group in comparisons(report["results"]) if group["rule"] != "typical"]
    chain = main_comparison([group for group in groups if group["tree"] == "chain"])
    head = pick(chain, "head") if chain else None
    if head is None:
        return []
    facts = head_facts(report, head)
    if facts["type"] not in FOLDERS:
        return []
    one = series_of(report, chain, "head", head["head"])
    k = one["best"][0]["k"] if one else chain["k"]
    how = "predicted fastest here at batch 1" if one else _how_fast(head)
    places = {item["engine"]: item["path"] for item in report["exports"]} if len(report["heads"]) == 1 else {}
    fixed = {"taps": facts.get("taps"), "layers": report["target"].get("layers")}

    def entry(engine: str, k: int, note: str, **tree: int) -> dict[str, Any]:
        if engine != "vllm" and facts.get("norm_before_residual"):
            note, command = "it does not read norm_before_residual=true, with which the head was trained", None
        else:
            format, made = format_of(engine), facts["path"]
            if format in places:
                made = places[format]
            elif facts["type"] != "eagle3":
                note += f", after headtrain export head={report['run']}/{made} format={format}"
                made = f"export/{format}"
            place, target = f"{report['run']}/{made}", servable_name(report["target"].get("model"))
            command = serve_command(engine, target, place, k, head_type=facts["type"], **tree, **fixed)
        return {"engine": ENGINES[engine], "k": k, "note": note, "command": command}

    out = [entry(engine, k, f"K = {k}, {how}") for engine in ENGINES if serves(engine, facts["type"])]
    tree = main_comparison([group for group in groups if re.fullmatch(r"\d+x\d+", group["tree"])
                            and all(group[key] == chain[key] for key in ("suite", "temperature"))])  # fmt: skip
    row = pick(tree, "head", head["head"]) if tree else None
    if row and serves("sglang", facts["type"]) and _faster(row, head):
        note = f"a tree of depth {tree['k']}, faster here than its chain of K = {chain['k']}"
        width, nodes = map(int, tree["tree"].split("x"))
        out.append(entry("sglang", tree["k"], note, width=width, nodes=nodes))
    return out


def _how_fast(row: dict[str, Any]) -> str:
    """In what sense a measured K is the best, for a note beside it."""
    if not known(row["speedup"]):
        return "of the largest τ here"
    apart = "" if row["timed_kind"] == "speed" else ", where drafters ran one after the other, not in turn"
    return f"the fastest measured here at batch {row['timed_batch'] or '–'}{apart}"


def _faster(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether a speed-up is larger than another that was timed in the same way."""
    same = all(ours[key] == theirs[key] for key in ("timed_kind", "timed_batch"))
    return same and known(ours["speedup"]) and known(theirs["speedup"]) and ours["speedup"] > theirs["speedup"]


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
