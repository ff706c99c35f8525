"""How the data report looks, by day and by night."""

from __future__ import annotations

STYLE = """
:root{--ink:#1d2733;--dim:#66727f;--page:#f6f7f9;--card:#fff;--edge:#e3e7ec;--bar:#a9c1dd;--line:#c8501e;
  --soft:#eef1f5}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaef;--dim:#97a3b0;--page:#14181d;--card:#1c2229;
  --edge:#2d353f;--bar:#47658a;--line:#f08a54;--soft:#252c35}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:28px 24px 60px;background:var(--page);color:var(--ink);
  font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:24px;margin:0 0 4px}
h2{font-size:17px;margin:34px 0 6px}
h3{font-size:14px;margin:0 0 6px;display:flex;justify-content:space-between;gap:8px;overflow-wrap:anywhere}
h3 small,.note,header p,section p{color:var(--dim);font-weight:400}
header p{margin:6px 0}
.target{font-size:15px}
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
th,td{padding:6px 12px;border-bottom:1px solid var(--edge)}
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
.bar{fill:var(--bar)}
.line{fill:none;stroke:var(--line);stroke-width:1.6}
.dot{fill:var(--line)}
.mean{stroke:var(--line);stroke-width:1;stroke-dasharray:3 4;opacity:.55}
text{font-size:10.5px;fill:var(--dim)}
.label{fill:var(--ink);font-size:11px}
.scale{fill:var(--line)}
.scale.down{opacity:.72}
.key{color:var(--line)}
.warnings{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 28px;
  margin:14px 0}
"""
