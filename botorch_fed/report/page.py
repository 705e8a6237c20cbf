r"""The page of a report: tables, charts as data, escaping, and the file around them.

Charts are Plotly figures as JSON, in which text of others is escaped twice: for Plotly, which reads
some tags in text, by `plain`; and for the page, by `embedded`. Two scripts stand in the page,
Plotly's and ``report.js``; the content security policy names their hashes and allows nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from botorch_fed.report.statistics import Estimate, brief, number, short, shown

NO_PLOTLY = 'needs plotly: pip install "botorch_fed[plot]".'
MOST_OPEN = 12  # rows of a table that is not folded


@dataclass(frozen=True)
class Chart:
    """A chart and its numbers.

    Attributes:
        key: Its name in the page.
        label: Its content in words, for readers who do not see it.
        caption: The text below it.
        views: Plotly figures by name; a select box shows one of several.
        numbers: A table with the numbers, as HTML; empty if another table of the section has them.
        choice: The label of the select box.
        height: In pixels.
    """

    key: str
    label: str
    caption: str
    views: Mapping[str, Mapping[str, Any]] = field(repr=False)
    numbers: str = field(default="", repr=False)
    choice: str = ""
    height: int = 360


@dataclass(frozen=True)
class Section:
    """A part of the page; without `parts` it is left out."""

    key: str
    title: str
    parts: Sequence[str | Chart]


# ------------------------------------------------------------------ escaping


def escaped(value: object) -> str:
    """Text for HTML."""
    return html.escape(_whole(value), quote=True)


def plain(value: object, most: int = 60) -> str:
    """Text of others in a chart: one short line, which Plotly shows as it is."""
    return html.escape(short(_whole(value), most), quote=False)


def _whole(value: object) -> str:
    """Text without halves of characters, which UTF-8 cannot hold."""
    return str(value).encode("utf-8", "replace").decode()


def embedded(document: object) -> str:
    """JSON that can stand in a script element: ASCII, without ``<``, ``>`` and ``&``."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# ------------------------------------------------------------------ parts


def data(value: float) -> str:
    """A rounded number, with all its digits as machine-readable value."""
    return f'<data value="{value!r}">{number(value)}</data>'


def cell(value: object, *, numeric: bool = False) -> str:
    """A cell of a table."""
    return f'<td class="num">{escaped(value)}</td>' if numeric else f"<td>{escaped(value)}</td>"


def value_cell(value: float | None) -> str:
    """A cell with a number, or with none."""
    return cell("–", numeric=True) if value is None else f'<td class="num">{data(value)}</td>'


def interval_cell(found: Estimate | None) -> str:
    """A cell: a mean, its 95 % interval and the number of values."""
    if found is None:
        return cell("–", numeric=True)
    ends = "" if found.half is None else f" [{brief(found.low)}, {brief(found.high)}]"
    small = f'<span class="n">{escaped(f"{ends} ({found.count})")}</span>'
    return f'<td class="num">{data(found.mean)}{small}</td>'


def parameter_cell(value: object) -> str:
    """A cell with the value of a parameter."""
    return cell(shown(value), numeric=not isinstance(value, str))


def cells(values: Iterable[object]) -> list[str]:
    """Cells of a row."""
    return [cell(value) for value in values]


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = ""
) -> str:
    """A table; the first cell of a row is its heading.

    Args:
        caption: Its title.
        head: The titles of its columns.
        rows: Cells.
        kind: A class of the style sheet: ``"cards"`` shows rows as cards on narrow screens,
            ``"trials"`` can be filtered and sorted.
    """
    heads = "".join(f'<th scope="col">{escaped(name)}</th>' for name in head)
    lines = []
    for row in rows:
        first = re.sub(r"^<td[^>]*>(.*)</td>$", r'<th scope="row">\1</th>', row[0], flags=re.DOTALL)
        rest = row[1:]
        if kind == "cards":
            named = zip(head[1:], rest, strict=True)
            rest = [one.replace("<td", f'<td data-of="{escaped(of)}"', 1) for of, one in named]
        lines.append(f"<tr>{first}{''.join(rest)}</tr>")
    body = "\n".join(lines)
    return scrolling(
        f"<table{_class(kind)}><caption>{escaped(caption)}.</caption><thead><tr>{heads}</tr>"
        f"</thead>\n<tbody>\n{body}\n</tbody></table>",
        caption,
    )


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def facts(caption: str, rows: Sequence[tuple[str, str]]) -> str:
    """A table of names and values."""
    body = "\n".join(
        f'<tr><th scope="row">{escaped(name)}</th><td>{escaped(value)}</td></tr>'
        for name, value in rows
    )
    return scrolling(
        f"<table><caption>{escaped(caption)}.</caption><tbody>\n{body}\n</tbody></table>", caption
    )


def tiles(rows: Sequence[tuple[str, str, str]]) -> str:
    """Names, values and remarks, side by side."""
    body = "".join(
        f'<div><dt>{escaped(name)}</dt><dd>{escaped(value)}<span class="n">{escaped(more)}</span>'
        "</dd></div>"
        for name, value, more in rows
    )
    return f'<dl class="tiles">{body}</dl>'


def scrolling(content: str, label: str) -> str:
    """A wide part, which scrolls by itself."""
    label = escaped(label)
    return f'<div class="wide" role="region" tabindex="0" aria-label="{label}">{content}</div>'


def folded(name: str, content: str, rows: int) -> str:
    """A long table is folded."""
    if rows <= MOST_OPEN:
        return content
    return f"<details><summary>{escaped(name)}</summary>{content}</details>"


def details(name: str, content: str) -> str:
    """A part that is folded."""
    return f"<details><summary>{escaped(name)}</summary>{content}</details>"


def paragraph(words: str) -> str:
    """A paragraph."""
    return f"<p>{escaped(words)}</p>"


def banner(kind: str, head: str, words: str) -> str:
    """A paragraph that stands out: ``"good"``, ``"warn"`` or ``"bad"``."""
    return f'<p class="banner {kind}"><strong>{escaped(head)}</strong> {escaped(words)}</p>'


def _figure(chart: Chart) -> str:
    key = chart.key
    pick = ""
    if len(chart.views) > 1:
        options = "".join(
            f'<option value="{i}">{escaped(name)}</option>' for i, name in enumerate(chart.views)
        )
        pick = (
            f'<p class="pick"><label for="{key}-pick">{escaped(chart.choice)}</label> '
            f'<select id="{key}-pick">{options}</select></p>'
        )
    folded_numbers = details("Numbers of this chart", chart.numbers) if chart.numbers else ""
    return (
        f'<figure id="{key}-figure">{pick}<div class="wide">'
        f'<div class="chart" id="{key}-chart" role="img" aria-label="{escaped(chart.label)}" '
        f'style="height:{chart.height}px"></div></div>'
        f"<figcaption>{escaped(chart.caption)}</figcaption>{folded_numbers}</figure>"
    )


# ------------------------------------------------------------------ the file


def main_part(sections: Sequence[Section]) -> str:
    """The sections as HTML."""
    return "\n".join(
        f'<section id="{s.key}" aria-labelledby="{s.key}-head">\n'
        f'<h2 id="{s.key}-head">{escaped(s.title)}</h2>\n'
        + "\n".join(_figure(part) if isinstance(part, Chart) else part for part in s.parts)
        + "\n</section>"
        for s in sections
    )


def chart_data(sections: Sequence[Section]) -> dict[str, Any]:
    """The charts of the sections for ``report.js``."""
    return {
        part.key: list(part.views.values())
        for section in sections
        for part in section.parts
        if isinstance(part, Chart)
    }


def links(sections: Sequence[Section]) -> str:
    """Links to the sections."""
    return "".join(f'<li><a href="#{s.key}">{escaped(s.title)}</a></li>' for s in sections)


def page(
    heading: str, sections: Sequence[Section], *, live: Mapping[str, Any] | None = None
) -> str:
    """The whole file.

    Args:
        heading: The title.
        sections: The sections.
        live: Of a page that asks its server for news: ``every``, in milliseconds, and the ``stamp``
            of its content.
    """
    scripts = (plotly_script(), _asset("report.js"))
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        f"img-src data: blob:; base-uri 'none'; form-action 'none'"
        + ("; connect-src 'self'" if live else "")
    )
    settings = {"charts": chart_data(sections), "live": live}
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{escaped(heading)}</title>
<style>{_asset("report.css")}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the result</a>
<header>
<h1>{escaped(heading)}</h1>
<p id="state" role="status"></p>
<nav aria-label="Sections"><ul id="sections">{links(sections)}</ul></nav>
<noscript><p>Charts need JavaScript. Their numbers are in the tables.</p></noscript>
</header>
<main id="main">
{main_part(sections)}
</main>
<script type="application/json" id="data">{embedded(settings)}</script>
<script>{scripts[0]}</script>
<script>{scripts[1]}</script>
</body>
</html>
"""


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@cache
def plotly_script() -> str:
    """Plotly's JavaScript, in one piece, which no ``</script`` ends."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(f"write_report {NO_PLOTLY}") from error
    script = str(get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(r"</(script)", r"<\\/\1", script, flags=re.IGNORECASE)
