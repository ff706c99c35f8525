"""The console's colours: those of the reports, chosen by the reader or by the reader's system."""

from __future__ import annotations

from serin.reports.svg import DAY, NIGHT


def stylesheet() -> str:
    """Returns the colours as variables. `data-theme` on the root element overrides the system's choice."""
    day, night = (
        "".join(f"--{name}:{code};" for name, code in each.items()) + f"color-scheme:{scheme};"
        for each, scheme in ((DAY, "light"), (NIGHT, "dark"))
    )
    return (
        f":root{{{day}}}\n"
        f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{night}}}}}\n"
        f":root[data-theme=dark]{{{night}}}\n"
    )
