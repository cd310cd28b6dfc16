"""report.html, section by section. One file without any outside request; plots are SVG from plots.py."""

from __future__ import annotations

from html import escape
from typing import Any

from headtrain.eval.acceptance import FORMULAS
from headtrain.eval.plots import Bar, Series, bar_plot, line_plot, share_plot
from headtrain.eval.report_html import (
    callout,
    colour,
    document,
    facts,
    figure,
    joined,
    legend,
    name_of,
    number,
    pair,
    section,
    table,
    tile,
    words,
)
from headtrain.eval.report_words import (
    comparisons,
    count,
    duration,
    known,
    main_comparison,
    model_name,
    step_cost,
    suite_name,
    title,
)

DEPTHS_SHOWN = 5
SETTINGS = ("k", "tree", "temperature", "top_p", "top_k", "dtype", "template", "max_new_tokens", "batch", "device")
SYMBOLS = {"tau": "τ", "alpha": "α_k", "alpha_conditional": "α_k, conditional"}


def page(report: dict[str, Any]) -> str:
    """The whole document."""
    summary, groups = report["summary"], comparisons(report["results"])
    body = [
        f'<p class="eyebrow">headtrain report · {escape(report["created"][:10])}</p><h1>{escape(title(report))}</h1>',
        f'<p class="lede">{escape(summary["headline"])}</p><p class="lede">{escape(summary["verdict"])}</p>',
        _tiles(report, groups),
        _acceptance(report, groups),
        _speed(groups),
        _next(summary),
        _training(report),
        _data(report),
        _definitions(report["results"]),
        _environment(report),
        "<footer>Made by headtrain. Nothing on this page is loaded from elsewhere.</footer>",
    ]
    return document(title(report), "\n".join(filter(None, body)))


def _drafted(group: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The drafters of a comparison without plain decoding."""
    return {name: row for name, row in group["drafters"].items() if name != "none"}


def _setting(group: dict[str, Any]) -> str:
    heat = "greedy" if group["temperature"] == 0 else f"temperature {group['temperature']:g}"
    return f"K = {group['k']}, {group['tree']}, {heat}"


def _where(group: dict[str, Any], groups: list[dict[str, Any]]) -> str:
    """The suite, and the setting where the suite was measured in several."""
    alone = sum(other["suite"] == group["suite"] for other in groups) == 1
    return suite_name(group["suite"]) + ("" if alone else f" ({_setting(group)})")


def _tiles(report: dict[str, Any], groups: list[dict[str, Any]]) -> str:
    group = main_comparison(groups)
    if group is None:
        return ""
    rows, place = _drafted(group), suite_name(group["suite"])
    shown = [name for name in ("head", "ngram", "head+ngram") if name in rows and known(rows[name]["tau"])]
    tiles = [
        tile(colour(name), f"{name_of(name)}: τ", number(rows[name]["tau"]), f"tokens per target pass, {place}")
        for name in shown
    ]
    timed = {name: row["speedup"] for name, row in rows.items() if known(row["speedup"])}
    if timed:
        best = max(timed, key=timed.get)
        tiles.append(tile("", "fastest against plain", number(timed[best], 2, "×"), f"{name_of(best)}, {place}"))
    checked = [r["identical_to_plain"] for r in report["results"] if r.get("identical_to_plain") is not None]
    if checked:
        same = "identical" if all(checked) else "differs"
        tiles.append(tile("", "greedy text vs plain", same, f"{len(checked)} measurements checked"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


# ------------------------------------------------------------------------------------------------- acceptance


def _acceptance(report: dict[str, Any], groups: list[dict[str, Any]]) -> str:
    lead = (
        "τ is the number of tokens that one pass of the target settles: the drafts it agrees with, and one of its own. "
        "α<sub>k</sub> is the share of steps in which the k-th draft was accepted. The n-gram lookup needs no "
        "training: it copies what followed these words earlier in the text; so a head has to beat it to earn its cost."
    )
    parts = [_acceptance_table(group) + _acceptance_plots(group, groups) for group in groups]
    return section("How well it drafts", *parts, callout(report["summary"]["identity"]), lead=lead)


def _acceptance_plots(group: dict[str, Any], groups: list[dict[str, Any]]) -> str:
    rows, where = _drafted(group), _where(group, groups)
    bars = [
        Bar(name_of(n), colour(n), r["tau"], r["tau_ci"], f"{name_of(n)}: τ {_with_interval(r)}")
        for n, r in rows.items()
    ]
    lines = [Series(name_of(n), colour(n), list(enumerate(r["alpha"] or [], 1))) for n, r in rows.items()]
    plot = line_plot(lines, "draft position k", "α_k", x_ticks=range(1, group["k"] + 1), show="{:.0%}".format)
    return pair(
        figure(
            f"τ on {where}",
            bar_plot(bars, mark=1.0),
            "Whiskers: 95 % intervals over prompts. Dotted: plain decoding, 1.00.",
        ),
        figure(
            f"Accepted drafts by position on {where}",
            plot,
            "Unconditional: position k counts only where all before it were right.",
            legend([(name_of(name), colour(name)) for name in rows], thin=True),
        ),
    )


def _with_interval(row: dict[str, Any], mark: str = "{:.2f}–{:.2f}", before: str = " (", after: str = ")") -> str:
    ends = row["tau_ci"]
    measured = ends and all(map(known, ends))
    return number(row["tau"]) + (before + mark.format(*ends) + after if measured else "")


def _acceptance_table(group: dict[str, Any]) -> str:
    rows, k = group["drafters"], group["k"]
    best = max((row["tau"] for row in rows.values() if known(row["tau"])), default=None)
    fastest = max((row["speedup"] for row in _drafted(group).values() if known(row["speedup"])), default=None)
    lines = []
    for name, row in rows.items():
        plain = name == "none"
        alpha = [] if plain else (row["alpha"] or [])
        tau = number(row["tau"]) if plain else _with_interval(row, before="<small>", after="</small>")
        speed = 1.0 if plain and known(row["tokens_per_s"]) else row["speedup"]
        lines.append([
            f'<td class="name {colour(name)}"><i></i>{escape(name_of(name))}</td>',
            _best(tau, row["tau"] == best),
            *(number(alpha[n] if n < len(alpha) else None) for n in range(k)),
            number(row["tokens_per_s"], 1),
            _best(number(speed, 2, "×"), not plain and known(speed) and speed == fastest),
        ])  # fmt: skip
    prompts = max((row["prompts"] or 0 for row in rows.values()), default=0)
    steps = max((row["steps"] or 0 for row in _drafted(group).values()), default=0)
    facts = f"{prompts:,} prompts, up to {steps:,} steps, {_setting(group)}"
    caption = f"{escape(suite_name(group['suite']))} <span>· {escape(facts)}</span>"
    header = ["", "τ <small>95 %</small>", *(f"α<sub>{n}</sub>" for n in range(1, k + 1)), "tokens/s", "speed-up"]
    return table(header, lines, caption)


def _best(cell: str, is_best: bool) -> str:
    return f'<td class="best">{cell}</td>' if is_best else cell


# ------------------------------------------------------------------------------------------------------ speed


def _speed(groups: list[dict[str, Any]]) -> str:
    groups = [group for group in groups if any(known(row["tokens_per_s"]) for row in group["drafters"].values())]
    if not groups:
        return ""
    rows = [row for group in groups for row in _drafted(group).values()]
    workers = max((row["concurrent_workers"] or 1 for row in rows), default=1)
    batches = ", ".join(map(str, sorted({row["timed_batch"] for row in rows if row["timed_batch"]})))
    lead = f"Each prompt was answered by plain decoding and by every drafter in turn, at batch {escape(batches)}. "
    if workers > 1:
        lead += f"Measurements ran {workers} at a time, so a speed is that of one of {workers} busy workers."
    return section("How fast it is", _cost(groups), *(_speed_plots(group, groups) for group in groups), lead=lead)


def _speed_plots(group: dict[str, Any], groups: list[dict[str, Any]]) -> str:
    where = _where(group, groups)
    bars = [
        Bar(name_of(n), colour(n), r["tokens_per_s"], note=f"{name_of(n)}: {number(r['tokens_per_s'], 1)} tokens/s")
        for n, r in group["drafters"].items()
    ]
    shares = [
        (name_of(name), _shares(row["draft_share"], row["verify_share"]))
        for name, row in _drafted(group).items()
        if known(row["draft_share"]) and known(row["verify_share"])
    ]
    key = legend([("drafting", "c-head"), ("verifying", "c-both"), ("the rest", "c-plain")])
    return pair(
        figure(f"Tokens per second on {where}", bar_plot(bars, show=lambda v: f"{v:.1f}"), "Prefill included."),
        figure(
            f"Where the time goes on {where}",
            share_plot(shares),
            "The rest: the prompt’s prefill and bookkeeping.",
            key,
        ),
    )


def _shares(draft: float, verify: float) -> list[tuple[str, str, float]]:
    rest = max(0.0, 1 - draft - verify)
    return [("drafting", "c-head", draft), ("verifying", "c-both", verify), ("the rest", "c-plain", rest)]


def _cost(groups: list[dict[str, Any]]) -> str:
    """What one step costs in plain steps: the number that turns acceptance into speed."""
    group = main_comparison(groups)
    row = group["drafters"].get("head") if group else None
    cost = step_cost(row) if row else None
    if cost is None:
        return ""
    return (
        f"<p>Speed-up = τ / the cost of a step. On {escape(suite_name(group['suite']))} a step with the head costs "
        f"{cost:.2f} plain steps, since it drafts {group['k']} tokens and verifies {group['k'] + 1} positions at once: "
        f"drafting that settles fewer than {cost:.2f} tokens per step loses time on this machine.</p>"
    )


def _next(summary: dict[str, Any]) -> str:
    items = "".join(
        f"<li><b>{escape(step['why'])}</b><pre>{escape(step['command'])}</pre></li>" for step in summary["next"]
    )
    return section(
        "What limits it, and what to run next",
        callout(summary["limits"]),
        f'<ol class="next">{items}</ol>' if items else "",
    )


# ------------------------------------------------------------------------------------------- training and data


def _training(report: dict[str, Any]) -> str:
    facts_of, curves = report["training"], report["training"]["curves"]
    if not facts_of["best"] and not any(curves.values()):
        return ""
    loss, tau = Series("loss", "c-head", curves.get("loss", [])), Series("simulated τ", "c-both", curves.get("tau", []))
    figures = [
        figure("Loss", line_plot([loss], "step", "loss", y_low=None, dots=False), "Weighted sum over the draft steps."),
        _by_depth(
            "Right guesses on training rows",
            curves.get("accuracy", []),
            "Share of slots where the head’s choice is the target’s, by draft step. This is not acceptance yet.",
        ),
        _by_depth(
            "Accepted drafts on new rows",
            curves.get("alpha", []),
            "α<sub>k</sub> of simulated greedy chains on rows kept from training.",
        ),
        figure(
            "τ on new rows",
            line_plot([tau], "step", "τ", y_low=1.0, show="{:.2f}".format),
            "From the same chains; the checkpoint where it is highest becomes the head.",
        ),
    ]
    return section("How it was trained", facts(_training_facts(report)), pair(*figures))


def _training_facts(report: dict[str, Any]) -> list[tuple[str, str | None]]:
    t, head = report["training"], report["heads"][0]
    taps, best = head.get("taps"), t["best"] or {}
    length = joined(
        f"{t['steps']:,} steps" if known(t["steps"]) else None,
        f"into epoch {t['epochs'] + 1}" if known(t["epochs"]) else None,
        f"{count(t['tokens'])} tokens" if known(t["tokens"]) else None,
        duration(t["seconds"]) if known(t["seconds"]) else None,
        f"{t['skipped']} steps skipped (not finite)" if t["skipped"] else None,
    )
    sizes = known(head.get("draft_vocab_size")) and known(head.get("vocab_size"))
    return [
        ("taps", f"{', '.join(map(str, taps))} of {report['target']['layers']} blocks" if taps else None),
        ("unroll", f"{head['unroll']} draft steps" if head.get("unroll") else None),
        ("draft vocabulary", f"{head['draft_vocab_size']:,} of {head['vocab_size']:,} tokens" if sizes else None),
        ("length", length),
        ("optimizer", joined(t["optimizer"], f"lr {t['lr']:g}" if known(t["lr"]) else None, t["schedule"])),
        ("objective", joined(t["objective"], t["precision"])),
        ("chosen checkpoint", f"step {best['step']:,}, τ {number(best.get('tau'))} on new rows" if best else None),
    ]


def _by_depth(heading: str, curve: list, caption: str) -> str:
    curve = [(step, values) for step, values in curve if values]
    depths = min(DEPTHS_SHOWN, max((len(values) for _, values in curve), default=0))
    series = [
        Series(
            f"position {d + 1}", f"depth-{d + 1}", [(s, values[d] if d < len(values) else None) for s, values in curve]
        )
        for d in range(depths)
    ]
    plot = line_plot(series, "step", "share", show="{:.0%}".format, dots=len(curve) < 30)
    return figure(heading, plot, caption, legend([(s.name, s.css) for s in series], thin=True))


def _data(report: dict[str, Any]) -> str:
    data, left = report["data"], report["left_out_of_evaluation"]
    parts = []
    if not data["on_policy"]:
        parts.append(callout(
            "Off-policy: these are the data set’s answers, not the target’s own, which costs acceptance.", bad=True
        ))  # fmt: skip
    parts.append(facts([("sources", joined(*(str(source).rsplit("/", 1)[-1] for source in data["sources"])))]))
    for suite, share in data["suite_coverage"].items():
        parts.append(
            f"<p>The draft vocabulary holds {share:.1%} of the target’s own answer tokens on "
            f"{escape(suite_name(suite))}; no head with it can reach a higher α<sub>1</sub>.</p>"
        )
    tables = [_counts(stage, m["counts"] or {}, m["left_out"] or {}) for stage, m in data["stages"].items()]
    if left:
        tables.append(_counts("evaluation", {}, left))
    parts.append(pair(*tables))
    return section("What it was trained on", *parts) if any(parts) else ""


def _counts(stage: str, counts: dict[str, Any], left_out: dict[str, int]) -> str:
    rows = [(words(name), f"{value:,}" if isinstance(value, int) else number(value)) for name, value in counts.items()]
    rows += [(f"left out: {words(reason)}", f"{n:,}") for reason, n in left_out.items()]
    cells = [(escape(name), value) for name, value in rows]
    return f"<figure><h3>{escape(stage)}</h3>{table((), cells, css='reasons')}</figure>"


# ------------------------------------------------------------------------------------------------ small print


def _definitions(results: list[dict[str, Any]]) -> str:
    rows = [(SYMBOLS.get(name, words(name)), formula) for name, formula in FORMULAS.items()]
    rows += [
        ("tokens/s", "answer tokens / wall time, prefill included; plain: the same prompts in the same run, no drafts"),
        ("speed-up", "tokens/s / plain tokens/s"),
        (
            "identical",
            "token for token; where two logits are closer than 1e-4 of the largest, a near-tie is counted instead",
        ),
    ]
    drafted = [row for row in results if row["drafter"] != "none"]
    values = {key: sorted({str(row[key]) for row in drafted if row.get(key) is not None}) for key in SETTINGS}
    rows.append(
        ("measured with", "; ".join(f"{words(key)} {', '.join(found)}" for key, found in values.items() if found))
    )
    return section(
        "How each number is defined",
        facts(rows),
        f"<details><summary>Every measurement</summary>{_measurements(results)}"
        '<p class="soft">The counts of every single step are in report.json.</p></details>',
    )


def _measurements(results: list[dict[str, Any]]) -> str:
    header = (
        "suite",
        "drafter",
        "kind",
        "batch",
        "T",
        "K",
        "prompts",
        "steps",
        "accepted",
        "τ",
        "tokens/s",
        "plain",
        "speed-up",
    )
    rows = []
    for r in results:
        named = [suite_name(r["suite"]), name_of(r["drafter"]), str(r.get("kind") or "–"), str(r.get("batch") or "–")]
        rows.append([
            *map(escape, named), f"{r['temperature']:g}", str(r["k"]), number(r.get("prompts"), 0),
            number(r["steps"], 0), number(r.get("accepted"), 0), number(r["tau"]), number(r.get("tokens_per_s"), 1),
            number(r.get("plain_tokens_per_s"), 1), number(r.get("speedup"), 2, "×"),
        ])  # fmt: skip
    return table(header, rows)


def _environment(report: dict[str, Any]) -> str:
    e, head, target = report["environment"], report["heads"][0], report["target"]
    libraries = ("headtrain", "python", "torch", "transformers", "deepspeed")
    rows = [
        ("target", joined(model_name(target["model"]), target["revision"], target["family"])),
        ("head", f"{head['path']}/model.safetensors, {head['bytes'] / 1e6:.1f} MB, sha256 {head['sha256']}"),
        ("exports", joined(*(item["path"] for item in report["exports"]))),
        ("machine", joined(*e["gpus"], e["cpu"], f"{e['cores']} cores")),
        ("software", joined(*(f"{name} {e[name]}" for name in libraries if e.get(name)))),
    ]
    notes = "".join(f"<li>{escape(text)}</li>" for text in report["warnings"])
    return section("Files and machine", facts(rows), f'<ul class="warnings">{notes}</ul>' if notes else "")
