"""The report page: one HTML file that loads nothing else, with tables as HTML and figures drawn by plotly.js.

Its content security policy names the hash of its script. What stands in a run cannot run or reach a network.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from hybridpar.errors import UsageError
from hybridpar.observe.files import replace_file

_WRITER = "hybridpar report"

#: Nothing of a run is sent to a server: plotly.js has a button for that.
_CONFIG = '{"responsive": true, "displaylogo": false, "showSendToCloud": false, "plotlyServerURL": ""}'

_STYLE = """
body { margin: 0 auto; padding: 1rem; max-width: 1200px; font: 15px/1.5 system-ui, sans-serif; }
h1, td { overflow-wrap: anywhere; } pre { overflow-x: auto; }
table { border-collapse: collapse; margin: 0.75rem 0; } caption { text-align: left; font-weight: 600; }
caption, summary { white-space: nowrap; }
th, td { padding: 0.2rem 1rem 0.2rem 0; border-bottom: 1px solid #d5d9df; text-align: left; vertical-align: top; }
strong { display: block; padding: 0.5rem; border-left: 3px solid #d55e00; font-weight: 400; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="{writer}">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-{digest}';
 style-src 'unsafe-inline'; img-src data: blob:">
<link rel="icon" href="data:,">
<title>{title} - hybridpar</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<noscript>The figures need JavaScript; all of it is in this file.</noscript>
{body}
<script>{script}</script>
</body>
</html>
"""


def element(tag: str, text: str) -> str:
    """A heading, a paragraph or lines as they stand in a terminal."""
    return f"<{tag}>{html.escape(text)}</{tag}>"


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), *, caption: str = "", folded: bool = False) -> str:
    """A table; a folded one shows its caption until it is opened."""
    lines = ["".join(element("th", cell) for cell in head)]
    lines += ["".join(element("td", cell) for cell in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    if folded:
        return f"<details>{element('summary', caption)}<table>{body}</table></details>"
    return f"<table>{element('caption', caption)}{body}</table>"


def write_page(path: Path, title: str, parts: Iterable[str | Figure]) -> None:
    """Write a page of HTML and figures as a whole or not at all."""
    body: list[str] = []
    script = [get_plotlyjs()]
    for number, part in enumerate(parts):
        body.append(part if isinstance(part, str) else f'<div id="part-{number}"></div>')
        if isinstance(part, Figure):
            # Its JSON has no "<", so nothing in it ends the script.
            script.append(f'Plotly.newPlot("part-{number}", {{"config": {_CONFIG}, ...{part.to_json()}}});')
    scripts = "\n".join(script)
    digest = base64.b64encode(hashlib.sha256(scripts.encode()).digest()).decode()
    texts = {"writer": _WRITER, "digest": digest, "title": html.escape(title), "style": _STYLE}
    page = _PAGE.format(**texts, body="\n".join(body), script=scripts)
    replace_file(path, [page.encode(errors="replace")])


def check_page_file(path: Path) -> None:
    """Refuse to write a page over anything but an earlier one."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.absolute().parent}", fix=f"Run: mkdir -p {path.absolute().parent}")
    try:
        with open(path, "rb") as file:
            if f'content="{_WRITER}"'.encode() in file.read(500):
                return
        what = "is there already, and is no report"
    except FileNotFoundError:
        return
    except OSError as error:
        what = f"cannot be replaced: {error.strerror}"
    raise UsageError(f"{path} {what}", "Only an earlier report is replaced.", "Name another file with -o.")
