"""The report page's sections on how the head was made: training and data."""

from __future__ import annotations

from html import escape
from typing import Any

from headtrain.eval.plots import Series, line_plot
from headtrain.eval.report_data import known
from headtrain.eval.report_html import callout, facts, figure, joined, legend, number, pair, section, table, words
from headtrain.eval.report_words import count, duration, suite_name

DEPTHS_SHOWN = 5


def training(report: dict[str, Any]) -> str:
    """Curves and settings; nothing where this run did not train the head."""
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


def data(report: dict[str, Any]) -> str:
    """Sources, counts and what was left out, and what the draft vocabulary can reach."""
    facts_of, left = report["data"], report["left_out_of_evaluation"]
    parts = []
    if not facts_of["on_policy"]:
        parts.append(callout(
            "Off-policy: these are the data set’s answers, not the target’s own, which costs acceptance.", bad=True
        ))  # fmt: skip
    parts.append(facts([("sources", joined(*(str(source).rsplit("/", 1)[-1] for source in facts_of["sources"])))]))
    several = len(report["heads"]) > 1
    for head, suite, share in [(h, *one) for h in report["heads"] for one in h["suite_coverage"].items()]:
        whose = f" of head {escape(head['id'])}" if several else ""
        parts.append(
            f"<p>The draft vocabulary{whose} holds {share:.1%} of the target’s own answer tokens on "
            f"{escape(suite_name(suite))}; no head with it can reach a higher α<sub>1</sub>.</p>"
        )
    tables = [_counts(stage, m["counts"] or {}, m["left_out"] or {}) for stage, m in facts_of["stages"].items()]
    if left:
        tables.append(_counts("evaluation", {}, left))
    parts.append(pair(*tables))
    return section("What it was trained on", *parts) if any(parts) else ""


def _counts(stage: str, counts: dict[str, Any], left_out: dict[str, int]) -> str:
    rows = [(words(name), f"{value:,}" if isinstance(value, int) else number(value)) for name, value in counts.items()]
    rows += [(f"left out: {words(reason)}", f"{n:,}") for reason, n in left_out.items()]
    cells = [(escape(name), value) for name, value in rows]
    return f"<figure><h3>{escape(stage)}</h3>{table((), cells, css='reasons')}</figure>"


