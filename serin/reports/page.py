"""The frame of an HTML page, and its tables and meters: one file with its style, for light and dark mode, without
script, font or network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from serin.reports.charts import palette, percent

_STYLE = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:28px 24px 60px;background:var(--page);color:var(--ink);
  font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:24px;margin:0 0 4px}
h2{font-size:17px;margin:34px 0 6px}
h3{font-size:14px;margin:0 0 6px;display:flex;justify-content:space-between;gap:8px;overflow-wrap:anywhere}
h3 small,.note,header p,section p{color:var(--dim);font-weight:400}
header p{margin:6px 0}
.target,.lead{font-size:15px}
code{background:var(--soft);padding:1px 6px;border-radius:4px;color:var(--ink)}
.figures{display:flex;flex-wrap:wrap;gap:10px;margin:14px 0}
.figures div{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:8px 16px;
  min-width:104px}
.figures b{display:block;font-size:19px}
.figures b small{font-size:12px;color:var(--dim);font-weight:400}
.figures span{color:var(--dim);font-size:12px}
table{border-collapse:collapse;width:100%;background:var(--card);border:1px solid var(--edge);
  border-radius:8px;overflow:hidden}
th{text-align:left;color:var(--dim);font-weight:500;font-size:12px}
th,td{padding:6px 12px;border-bottom:1px solid var(--edge);vertical-align:top}
tr:last-child td{border-bottom:0}
.n{font-variant-numeric:tabular-nums;white-space:nowrap}
a{color:inherit}
.meter{display:inline-block;width:90px;height:8px;background:var(--soft);border-radius:4px;margin-right:8px;
  overflow:hidden}
.meter i{display:block;height:100%;background:var(--bar)}
.meter.told i{background:var(--line)}
main{display:grid;grid-template-columns:repeat(auto-fill,minmax(340px,1fr));gap:14px}
section{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:12px 14px 8px}
section p{margin:4px 0 2px;font-size:12px}
svg{width:100%;height:auto;display:block}
.key{color:var(--line)}
.bad,.good{font-weight:bold}
.bad{color:var(--alarm)}
.good{color:var(--good)}
.warnings{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 28px;
  margin:14px 0}
"""


def html_page(title: str, body: str) -> str:
    """Returns a page. `body`: HTML below the title's heading, in which all foreign text is escaped."""
    name = escape(title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{palette()}{_STYLE}</style></head>'
        f"<body><h1>{name}</h1>{body}</body></html>\n"
    )


def table(titles: Sequence[str], rows: Iterable[str]) -> str:
    """Returns a table. `rows`: the cells of each, as HTML."""
    head = "".join(f"<th>{title}</th>" for title in titles)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def figures(boxes: Sequence[tuple[str, str]]) -> str:
    """Returns boxes with a name and a figure each; the figures are HTML."""
    cells = "".join(f"<div><b>{value}</b><span>{escape(name)}</span></div>" for name, value in boxes)
    return f'<div class="figures">{cells}</div>'


def meter(share: float, kind: str) -> str:
    """Returns a bar with the share in words. `kind`: its class in the style."""
    bar = f'<i style="width:{100 * min(share, 1):.1f}%"></i>'
    return f'<span class="meter {kind}">{bar}</span>{escape(percent(share))}'
