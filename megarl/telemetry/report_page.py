"""One HTML file that needs nothing else: charts, tables, plotly's javascript, and no other word to any network."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from megarl.telemetry.report_answers import Answer
from megarl.telemetry.report_charts import Chart

PLOTLY = "package_data/plotly.min.js"


Section = tuple[str, str]  # a heading and HTML


def page(title: str, subtitle: str, answers: Sequence[Answer], sections: Sequence[Section], charts: Sequence[Chart]) -> str:
    """`charts` are all that stand in the sections; `title` and `subtitle` are text.

    Raises ValueError where plotly is not installed.
    """
    figures = json.dumps([chart.figure for chart in charts], allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = [_plotly_javascript(), _own("page.js")]
    body = "".join(f"<section><h2>{escape(heading)}</h2>{html}</section>" for heading, html in sections if html)
    cards = "".join(_card(answer) for answer in answers)
    # No script but these two may run, and nothing may be fetched, whatever stands in a completion.
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_own("page.css")}</style></head>'
        f'<body><main><header><h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p></header>'
        f'<div class="answers">{cards}</div>{body}</main>'
        f'<script type="application/json" id="figures">{figures}</script>'
        + "".join(f"<script>{text}</script>" for text in scripts)
        + "</body></html>\n"
    )


def coded(text: str) -> str:
    """Text with `code` in backticks, as HTML."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def plots(charts: Iterable[Chart]) -> str:
    """Charts as cards, those that are not wide side by side; nothing where there are none."""
    cards = "".join(
        f'<div class="card{" wide" if chart.wide else ""}"><h3>{escape(chart.title)}</h3>'
        + (f'<p class="soft">{coded(chart.note)}</p>' if chart.note else "")
        + f'<div class="plot" id="{escape(chart.name)}" style="height:{chart.height}px"></div></div>'
        for chart in charts
    )
    return f'<div class="plots">{cards}</div>' if cards else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), note: str = "") -> str:
    """Cells are HTML already; columns in `numbers` stand right. Nothing where there are no rows."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = (' class="number"' if at in numbers else "" for at in range(len(row)))
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    if not lines:
        return ""
    head = f"<thead><tr>{cells('th', heads)}</tr></thead>" if heads else ""
    said = f'<p class="soft">{coded(note)}</p>' if note else ""
    return f'<div class="card">{said}<div class="scroll"><table>{head}<tbody>{lines}</tbody></table></div></div>'


def _card(answer: Answer) -> str:
    says = "".join(f"<p>{coded(sentence)}</p>" for sentence in answer.says)
    return (
        f'<div class="card answer {answer.tone}"><h2>{escape(answer.question)}</h2>'
        f'<div class="verdict">{escape(answer.verdict)}</div>{says}</div>'
    )


def _own(name: str) -> str:
    return importlib.resources.files("megarl.telemetry").joinpath(name).read_text(encoding="utf-8")


def _plotly_javascript() -> str:
    try:
        found = importlib.resources.files("plotly").joinpath(PLOTLY)
    except ModuleNotFoundError:
        raise ValueError(
            "the page needs plotly, which is not installed: it is in megarl's extras cpu and gpu, or pip install plotly"
        ) from None
    return found.read_text(encoding="utf-8").replace("</script", "<\\/script")


def write(path: Path, html: str) -> Path:
    """The whole page or none of it, so that a browser that reloads it never shows half of one."""
    beside = path.with_name(path.name + ".partial")
    beside.write_text(html, encoding="utf-8")
    beside.replace(path)
    return path
