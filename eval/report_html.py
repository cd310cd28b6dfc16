"""Building blocks of the report page: every text that comes from a run is escaped here or where it is put in."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib import resources
from typing import Any

from headtrain.eval.report_data import known, labels

COLOURS = {"head": "c-head", "ngram": "c-ngram", "head+ngram": "c-both", "none": "c-plain"}
MORE_COLOURS = 6  # c-1 … in the style
Palette = dict[str, str]  # label of a drafter -> colour class


def document(title: str, body: str) -> str:
    """The page: its style stands inside, so it needs nothing else."""
    css = resources.files("headtrain.eval").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{css}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def number(value: Any, digits: int = 2, after: str = "") -> str:
    """A number as the page shows it; a dash for what was not measured."""
    return f"{value:,.{digits}f}{after}" if known(value) else "–"


def palette(results: list[dict[str, Any]]) -> Palette:
    """Each drafter's colour, the same on the whole page."""
    others = sorted(set(labels(results).values()) - COLOURS.keys())
    return COLOURS | {name: f"c-{i % MORE_COLOURS + 1}" for i, name in enumerate(others)}


def words(name: str) -> str:
    return name.replace("_", " ")


def joined(*parts: Any) -> str | None:
    """The parts there are, with commas; None when there is none."""
    return ", ".join(str(part) for part in parts if part) or None


def section(title: str, *parts: str, lead: str = "") -> str:
    lead = f'<p class="lead">{lead}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{''.join(parts)}</section>"


def details(summary: str, *parts: str) -> str:
    """Parts that stay folded until asked for; nothing where there are none."""
    shown = "".join(parts)
    return f"<details><summary>{escape(summary)}</summary>{shown}</details>" if shown else ""


def callout(text: str, bad: bool = False) -> str:
    return f'<div class="callout{" bad" if bad else ""}"><p>{escape(text)}</p></div>'


def table(header: Iterable[str], rows: Iterable[Iterable[str]], caption: str = "", css: str = "") -> str:
    """A table of ready-made cells: inner HTML, or a whole <td …>."""
    cells = [f'<th scope="col">{cell}</th>' for cell in header]
    head = f"<thead><tr>{''.join(cells)}</tr></thead>" if any(header) else ""
    body = "".join(
        "<tr>" + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    top = f"<caption>{caption}</caption>" if caption else ""
    return f'<div class="scroll"><table class="{css}">{top}{head}<tbody>{body}</tbody></table></div>'


def figure(heading: str, plot: str, caption: str, key: str = "") -> str:
    """A plot with its words; nothing at all where there was nothing to plot."""
    if not plot:
        return ""
    return f"<figure><h3>{escape(heading)}</h3>{key}{plot}<figcaption>{caption}</figcaption></figure>"


def pair(*figures: str) -> str:
    shown = "".join(figures)
    return f'<div class="pair">{shown}</div>' if shown else ""


def legend(entries: Iterable[tuple[str, str]], thin: bool = False) -> str:
    """(name, colour class) of what a plot shows; `thin` for lines."""
    mark = ' class="thin"' if thin else ""
    items = "".join(f'<li class="{css}"><i{mark}></i>{escape(name)}</li>' for name, css in entries)
    return f'<ul class="key">{items}</ul>'


def facts(rows: Iterable[tuple[str, str | None]]) -> str:
    """Names and values; rows without a value are left out."""
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in rows if value)
    return f"<dl>{items}</dl>" if items else ""


def tile(css: str, name: str, value: str, note: str) -> str:
    return (
        f'<div class="tile {css}"><div class="name">{escape(name)}</div><div class="figure">{escape(value)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
    )
