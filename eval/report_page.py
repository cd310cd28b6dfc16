"""report.html: its beginning, what was measured of acceptance, and the order of its sections.

One file without any outside request; plots are SVG from plots.py.
"""

from __future__ import annotations

from html import escape
from typing import Any

from headtrain.eval.plots import Bar, Series, bar_plot, line_plot
from headtrain.eval.report_data import (
    by_domain,
    by_temperature,
    comparisons,
    drafted,
    first_of_each_suite,
    known,
    labels,
    main_comparison,
    pick,
)
from headtrain.eval.report_html import (
    Palette,
    callout,
    details,
    document,
    figure,
    legend,
    number,
    pair,
    palette,
    section,
    table,
    tile,
)
from headtrain.eval.report_made import data, training
from headtrain.eval.report_notes import definitions, environment
from headtrain.eval.report_speed import costs, following, serving, speed
from headtrain.eval.report_words import drafter_name, heat_words, setting_words, suite_name, title


def page(report: dict[str, Any]) -> str:
    """The whole document."""
    summary, groups, colours = report["summary"], comparisons(report["results"]), palette(report["results"])
    body = [
        f'<p class="eyebrow">headtrain report · {escape(report["created"][:10])}</p><h1>{escape(title(report))}</h1>',
        f'<p class="lede">{escape(summary["headline"])}</p><p class="lede">{escape(summary["verdict"])}</p>',
        _tiles(report, groups, colours),
        _acceptance(report, groups, colours),
        speed(report, groups, colours),
        costs(report, groups, colours),
        following(summary),
        serving(summary),
        training(report),
        data(report),
        definitions(report),
        environment(report),
        "<footer>Made by headtrain. Nothing on this page is loaded from elsewhere.</footer>",
    ]
    return document(title(report), "\n".join(filter(None, body)))


def _tiles(report: dict[str, Any], groups: list[dict[str, Any]], colours: Palette) -> str:
    group = main_comparison(groups)
    if group is None:
        return ""
    place, shown = suite_name(group["suite"]), [pick(group, name) for name in ("head", "ngram", "head+ngram")]
    place += ", typical acceptance (lossy)" * (group["rule"] == "typical")
    names = labels(report["results"])
    tiles = [
        tile(
            colours[name := names[row["drafter"], row["head"]]], f"{drafter_name(name)}: τ", number(row["tau"]),
            f"tokens per target pass, {place}",
        )
        for row in shown if row and known(row["tau"])
    ]  # fmt: skip
    timed = {name: row["speedup"] for name, row in group["drafters"].items() if known(row["speedup"])}
    if timed:
        best = max(timed, key=timed.get)
        note = f"{drafter_name(best)}, {place}"
        tiles.append(tile("", "speed-up of the fastest", number(timed[best], 2, "×"), note))
    checked = [r["identical_to_plain"] for r in report["results"] if r.get("identical_to_plain") is not None]
    if checked:
        same = "identical" if all(checked) else "differs"
        tiles.append(tile("", "greedy text vs plain", same, f"{len(checked)} measurements checked"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


# ------------------------------------------------------------------------------------------------- acceptance


def _acceptance(report: dict[str, Any], groups: list[dict[str, Any]], colours: Palette) -> str:
    lead = (
        "τ is the number of tokens that one pass of the target settles: the drafts it agrees with, and one of its own. "
        "α<sub>k</sub> is the share of steps in which the k-th draft was accepted. The n-gram lookup needs no "
        "training: it copies what followed these words earlier in the text; so a head has to beat it to earn its cost."
    )
    shown = first_of_each_suite(groups)
    others = [group for group in groups if not any(group is one for one in shown)]
    parts = [_acceptance_table(group, colours) + _acceptance_plots(group, colours) for group in shown]
    parts.append(details(f"{len(others)} more settings", *(_acceptance_table(group, colours) for group in others)))
    main = main_comparison(groups)
    if main:
        parts.insert(0, _domains(groups, main, colours))
        parts.append(_temperatures(groups, main, colours))
    return section("How well it drafts", *parts, callout(report["summary"]["identity"]), lead=lead)


def _domains(groups: list[dict[str, Any]], main: dict[str, Any], colours: Palette) -> str:
    suites = by_domain(groups, main)
    if len(suites) < 2:
        return ""
    named = {suite_name(suite): drafters for suite, drafters in suites.items()}
    return _tau_table(f"τ by domain, {setting_words(main)}", named, colours)


def _temperatures(groups: list[dict[str, Any]], main: dict[str, Any], colours: Palette) -> str:
    heats = by_temperature(groups, main)
    if len(heats) < 2:
        return ""
    named = {heat_words(heat): drafters for heat, drafters in heats.items()}
    return _tau_table(f"τ by temperature on {suite_name(main['suite'])}", named, colours)


def _tau_table(caption: str, columns: dict[str, dict[str, dict[str, Any]]], colours: Palette) -> str:
    """Drafters downwards, one τ for each column."""
    names = list(dict.fromkeys(name for drafters in columns.values() for name in drafters if name != "none"))
    rows = [
        [_name_cell(name, colours), *(number(drafters.get(name, {}).get("tau")) for drafters in columns.values())]
        for name in names
    ]
    return table(["", *map(escape, columns)], rows, escape(caption))


def _name_cell(name: str, colours: Palette) -> str:
    return f'<td class="name {colours[name]}"><i></i>{escape(drafter_name(name))}</td>'


def _acceptance_plots(group: dict[str, Any], colours: Palette) -> str:
    rows, where = drafted(group), suite_name(group["suite"])
    bars = [
        Bar(drafter_name(n), colours[n], r["tau"], r["tau_ci"], f"{drafter_name(n)}: τ {_with_interval(r)}")
        for n, r in rows.items()
    ]
    lines = [Series(drafter_name(n), colours[n], list(enumerate(r["alpha"] or [], 1))) for n, r in rows.items()]
    plot = line_plot(lines, "draft position k", "α_k", x_ticks=range(1, group["k"] + 1), show="{:.0%}".format)
    key = legend([(drafter_name(name), colours[name]) for name in rows], thin=True)
    depths = [
        Series(drafter_name(n), colours[n], [(d["to"] or 2 * d["from"], d["tau"]) for d in r["depths"]])
        for n, r in rows.items()
    ]
    deep = line_plot(
        depths, "tokens already emitted, fewer than", "τ", y_low=1.0, show="{:.2f}".format, x_log=True
    )
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
            key,
        ),
        figure(
            f"τ by output depth on {where}",
            deep if max((len(r["depths"]) for r in rows.values()), default=0) > 1 else "",
            "Steps by how much of the answer stood before them; a fall means that the head tires in long answers.",
            key,
        ),
    )


def _with_interval(row: dict[str, Any], mark: str = "{:.2f}–{:.2f}", before: str = " (", after: str = ")") -> str:
    ends = row["tau_ci"]
    measured = ends and all(map(known, ends))
    return number(row["tau"]) + (before + mark.format(*ends) + after if measured else "")


def _acceptance_table(group: dict[str, Any], colours: Palette) -> str:
    rows, k = group["drafters"], group["k"]
    best = max((row["tau"] for row in rows.values() if known(row["tau"])), default=None)
    fastest = max((row["speedup"] for row in drafted(group).values() if known(row["speedup"])), default=None)
    lines = []
    for name, row in rows.items():
        plain = name == "none"
        alpha = [] if plain else (row["alpha"] or [])
        tau = number(row["tau"]) if plain else _with_interval(row, before="<small>", after="</small>")
        speedup = 1.0 if plain and known(row["tokens_per_s"]) else row["speedup"]
        lines.append([
            _name_cell(name, colours),
            _best(tau, row["tau"] == best),
            *(number(alpha[n] if n < len(alpha) else None) for n in range(k)),
            number(row["tokens_per_s"], 1),
            _best(number(speedup, 2, "×"), not plain and known(speedup) and speedup == fastest),
        ])  # fmt: skip
    prompts = max((row["prompts"] or 0 for row in rows.values()), default=0)
    steps = max((row["steps"] or 0 for row in drafted(group).values()), default=0)
    facts = f"{prompts:,} prompts, up to {steps:,} steps, {setting_words(group)}"
    caption = f"{escape(suite_name(group['suite']))} <span>· {escape(facts)}</span>"
    header = ["", "τ <small>95 %</small>", *(f"α<sub>{n}</sub>" for n in range(1, k + 1)), "tokens/s", "speed-up"]
    return table(header, lines, caption)


def _best(cell: str, is_best: bool) -> str:
    return f'<td class="best">{cell}</td>' if is_best else cell
