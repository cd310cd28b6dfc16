"""The report page's sections on time: measured speed, the cost model, what limits the head, how to serve it."""

from __future__ import annotations

from html import escape
from typing import Any

from headtrain.eval.plots import Bar, Series, bar_plot, line_plot, share_plot
from headtrain.eval.report_data import drafted, first_of_each_suite, known, labels, main_comparison, pick
from headtrain.eval.report_html import Palette, callout, details, figure, legend, number, pair, section, table
from headtrain.eval.report_words import drafter_name, heat_words, step_cost, suite_name, tree_words, whose


def speed(report: dict[str, Any], groups: list[dict[str, Any]], colours: Palette) -> str:
    """Tokens per second and where the time goes, in each suite's main setting."""
    timed = [group for group in groups if any(known(row["tokens_per_s"]) for row in group["drafters"].values())]
    if not timed:
        return ""
    rows = [row for group in timed for row in drafted(group).values()]
    workers = max((row["concurrent_workers"] or 1 for row in rows), default=1)
    lead = _how_timed([row for row in rows if known(row["tokens_per_s"])])
    if workers > 1:
        lead += f"Measurements ran {workers} at a time, so a speed is that of one of {workers} busy workers."
    plots = [_speed_plots(group, colours) for group in first_of_each_suite(timed)]
    return section("How fast it is", _step_price(report, groups), *plots, lead=lead)


def _how_timed(rows: list[dict[str, Any]]) -> str:
    """Which speeds were timed in turn, and which are only those of the batched measurement of acceptance."""
    batches: dict[bool, set[str]] = {True: set(), False: set()}
    for row in rows:
        batches[row["timed_kind"] == "speed"].add(str(row["timed_batch"] or "–"))
    turn, apart = (escape(", ".join(sorted(batches[how], key=lambda text: (len(text), text)))) for how in (True, False))
    lead = f"Each prompt was answered by plain decoding and by every drafter in turn, at batch {turn}. " if turn else ""
    if apart:
        lead += f"{'Other speeds' if turn else 'Speeds'} are those of measuring acceptance, at batch {apart}: plain "
        lead += "decoding and the drafters ran one after the other, so a busy machine may have favoured one of them. "
    return lead


def _speed_plots(group: dict[str, Any], colours: Palette) -> str:
    where = suite_name(group["suite"])
    bars = [
        Bar(drafter_name(n), colours[n], r["tokens_per_s"],
            note=f"{drafter_name(n)}: {number(r['tokens_per_s'], 1)} tokens/s")
        for n, r in group["drafters"].items()
    ]  # fmt: skip
    shares = [
        (drafter_name(name), _shares(row["draft_share"], row["verify_share"]))
        for name, row in drafted(group).items()
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


def _step_price(report: dict[str, Any], groups: list[dict[str, Any]]) -> str:
    """What one step costs in plain steps: the number that turns acceptance into speed."""
    group = main_comparison(groups)
    row = pick(group, "head") if group else None
    cost = step_cost(row) if row else None
    if cost is None:
        return ""
    does = f"drafts {group['k']} tokens and verifies {group['k'] + 1} positions at once"
    if group["tree"] != "chain":
        does = f"drafts and verifies a {escape(tree_words(group['tree']))}"
    return (
        f"<p>Speed-up = τ / the cost of a step. On {escape(suite_name(group['suite']))} a step with "
        f"{escape(whose(report, row))} costs {cost:.2f} plain steps, since it {does}: drafting that settles fewer than "
        f"{cost:.2f} tokens per step loses time on this machine.</p>"
    )


# ------------------------------------------------------------------------------------------------- cost model


def costs(report: dict[str, Any], groups: list[dict[str, Any]], colours: Palette) -> str:
    """Predicted beside measured speed-ups, over K and over the batch; the bounds; what a forward costs."""
    cost = report.get("cost")
    main = main_comparison(groups)
    if not cost or not cost["series"] or main is None:
        return ""
    names = labels(report["results"])
    shown = [one for one in cost["series"] if all(one[key] == main[key] for key in ("suite", "temperature", "rule"))]
    others = [one for one in cost["series"] if not any(one is other for other in shown)]
    where = f"{suite_name(main['suite'])}, {heat_words(main['temperature'])}"
    lead = (
        "From measured times of forwards and of drafting, and from how many drafts were accepted in each step, follows "
        "the speed-up of every K and batch. Here prefill is left out on both sides."
    )
    forecast, timed = report["summary"].get("forecast"), max(v["batch"] for v in cost["verify"])
    return section(
        "What drafting costs, and where it pays",
        f"<p>{escape(forecast)}</p>" if forecast else "",
        pair(_over_k(shown, names, colours, where), _over_batch(shown, names, colours, where, timed)),
        _series_table(shown, names, colours, f"Best K <span>· {escape(where)}</span>"),
        _bounds(cost["combined"]),
        details("Other suites and settings", _series_table(others, names, colours, "Best K", full=True)),
        details("Predicted and measured, setting by setting", _checks_table(cost["series"], names)),
        details("What a forward costs", _forwards(cost["verify"])),
        lead=lead,
    )


def _label(one: dict[str, Any], names: dict[tuple, str]) -> str:
    return names[one["drafter"], one["head"]]


def _chains(shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in shown if one["tree"] == "chain"]


def _over_k(shown: list[dict[str, Any]], names: dict[tuple, str], colours: Palette, where: str) -> str:
    lines = []
    for one in _chains(shown):
        name = _label(one, names)
        batch = one["best"][0]["batch"]
        predicted = [(p["k"], p["speedup"]) for p in one["predictions"] if p["batch"] == batch]
        measured = [(c["k"], c["measured"]) for c in one["checks"] if c["kind"] == "speed" and c["batch"] == batch]
        lines.append(Series(f"{drafter_name(name)}, predicted", colours[name], predicted, dashed=True, dots=False))
        lines.append(Series(f"{drafter_name(name)}, measured", colours[name], measured))
    ks = sorted({x for line in lines for x, _ in line.points})
    plot = line_plot(lines, "K", "speed-up", show="{:.2f}×".format, x_ticks=ks, mark=1.0)
    return figure(
        f"Speed-up by K on {where}",
        plot,
        "Chains at batch 1. Dashed: predicted from the steps at the largest K; dots: measured. Dotted: plain decoding.",
        _key(_chains(shown), names, colours),
    )


def _over_batch(shown: list[dict[str, Any]], names: dict[tuple, str], colours: Palette, where: str, timed: int) -> str:
    lines = []
    for one in _chains(shown):
        name, batches = _label(one, names), sorted({check["batch"] for check in one["checks"]})
        fastest = [(b, max(c["measured"] for c in one["checks"] if c["batch"] == b)) for b in batches]
        predicted = [(p["batch"], p["speedup"]) for p in one["best"]]
        lines.append(Series(f"{drafter_name(name)}, predicted", colours[name], predicted, dashed=True, dots=False))
        lines.append(Series(f"{drafter_name(name)}, measured", colours[name], fastest))
    ticks = sorted({p["batch"] for one in shown for p in one["best"]})
    plot = line_plot(
        lines, "requests decoded together", "speed-up", show="{:.2f}×".format, x_ticks=ticks, x_log=True, mark=1.0
    )
    return figure(
        f"Speed-up by batch on {where}",
        plot,
        "Chains, each batch with its best K. Dashed: predicted; dots: the fastest measured. Forwards were timed up to "
        f"batch {timed}; beyond it their times are taken to grow in a straight line.",
        _key(_chains(shown), names, colours),
    )


def _key(shown: list[dict[str, Any]], names: dict[tuple, str], colours: Palette) -> str:
    return legend([(drafter_name(_label(one, names)), colours[_label(one, names)]) for one in shown], thin=True)


def _series_table(
    series: list[dict[str, Any]], names: dict[tuple, str], colours: Palette, caption: str, full: bool = False
) -> str:
    """The best K of each series; `full`: with its suite and temperature, where these differ."""
    rows = []
    for one in series:
        name, first = _label(one, names), one["best"][0]
        by_k = {c["k"]: c for c in one["checks"] if c["kind"] == "speed" and c["batch"] == first["batch"]}
        many = next(p for p in one["best"] if p["batch"] == 32)
        shape = [drafter_name(name)] + [one["tree"]] * (one["tree"] != "chain")
        shape += [suite_name(one["suite"]), heat_words(one["temperature"])] * full
        rows.append([
            f'<td class="name {colours[name]}"><i></i>{escape(", ".join(shape))}</td>', str(first["k"]),
            number(first["speedup"], 2, "×"), number(by_k.get(first["k"], {}).get("measured"), 2, "×"),
            f"{first['verify_share']:.0%}", str(many["k"]), number(many["speedup"], 2, "×"),
            number(one["stops_paying"], 0), number(one["oracle_k"], 2, "×"),
        ])  # fmt: skip
    header = (
        "", "best K", "predicted", "measured", "verifying", "best K at 32", "predicted at 32", "stops paying at",
        "oracle K",
    )  # fmt: skip
    return table(header, rows, caption) if rows else ""


def _bounds(combined: list[dict[str, Any]]) -> str:
    return "".join(
        f"<p>On {escape(suite_name(one['suite']))} the best drafter and K at every step "
        f"({escape(', '.join(map(drafter_name, one['drafters'])))}), were they known, would give "
        f"{number(one['speedup'])}× (the oracle bound).</p>"
        for one in combined
    )


def _checks_table(series: list[dict[str, Any]], names: dict[tuple, str]) -> str:
    rows = [
        [
            escape(drafter_name(_label(one, names))), escape(suite_name(one["suite"])), escape(one["tree"]),
            f"{one['temperature']:g}", str(check["k"]), str(check["batch"]), escape(str(check["kind"])),
            number(check["predicted"], 2, "×"), number(check["measured"], 2, "×"), f"{check['error']:+.0%}",
            number(check["predicted_tau"]), number(check["measured_tau"]),
        ]
        for one in series for check in one["checks"]
    ]  # fmt: skip
    header = (
        "", "suite", "tree", "T", "K", "batch", "kind", "predicted", "measured", "error", "predicted τ", "measured τ"
    )
    return table(header, rows) if rows else ""


def _forwards(verify: list[dict[str, Any]]) -> str:
    batches = sorted({v["batch"] for v in verify})
    found = {(v["batch"], v["tokens"]): v["forwards"] for v in verify}
    sizes = sorted({v["tokens"] for v in verify})
    rows = [[f"{n} position{'s' * (n > 1)}", *(number(found.get((b, n)), 2, "×") for b in batches)] for n in sizes]
    return table(["", *(f"batch {b}" for b in batches)], rows, "A forward in plain forwards of the same batch")


# ------------------------------------------------------------------------------------------------ what to do


def following(summary: dict[str, Any]) -> str:
    """What limits the head, and the commands that would tell or help."""
    items = "".join(
        f"<li><b>{escape(step['why'])}</b><pre>{escape(step['command'])}</pre></li>" for step in summary["next"]
    )
    return section(
        "What limits it, and what to run next",
        callout(summary["limits"]),
        f'<ol class="next">{items}</ol>' if items else "",
    )


def serving(summary: dict[str, Any]) -> str:
    """Engines' flags, ready to copy."""
    items = "".join(
        f"<li><b>{escape(one['engine'])}</b> <span class=\"soft\">{escape(one['note'])}</span>"
        + (f"<pre>{escape(one['command'])}</pre>" if one["command"] else "") + "</li>"
        for one in summary["engines"]
    )  # fmt: skip
    lead = "The best K depends on the machine and the load: measure again where it is served."
    return section("How to serve it", f'<ol class="next">{items}</ol>', lead=lead) if items else ""
