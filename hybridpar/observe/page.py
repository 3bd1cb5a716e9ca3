"""The report page: one HTML file with data, script (`page.js`) and style (`page.css`) in it, which loads nothing else.

What the page shows comes as plain data, made by `hybridpar.run.page_data`; the script turns it into a document. Its
content security policy names the hashes of script and style, so nothing that stands in the data can run or reach a
network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridpar.errors import UsageError
from hybridpar.observe.files import replace_file
from hybridpar.observe.timeline import Timeline, describe_action, length_ms
from hybridpar.observe.timeline_picture import KIND_NAMES, Box, line_label, panel_title, picture_lines
from hybridpar.schedule.actions import COMPUTE

_WRITER = "hybridpar report"

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="{writer}">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>This page needs JavaScript; all of it is in this file.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page_html(data: Mapping[str, Any]) -> str:
    """The page."""
    script, style = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    sources = {"default-src": "'none'", "img-src": "data:", "script-src": _hash(script), "style-src": _hash(style)}
    return _PAGE.format(
        writer=_WRITER,
        policy="; ".join(f"{name} {source}" for name, source in sources.items()),
        title=html.escape(data["title"]),
        style=style,
        data=page_json(data).replace("<", "\\u003c"),  # in JSON only within texts; ends no script element
        script=script,
    )


def page_json(data: Mapping[str, Any]) -> str:
    """The data of the page as JSON."""
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:  # sums of what stands in a damaged file
        return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return 0.0 if isinstance(data, float) and not math.isfinite(data) else data


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write_page(path: Path, data: Mapping[str, Any]) -> None:
    """Write the page as a whole or not at all."""
    replace_file(path, [page_html(data).encode()])


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


def lanes_block(timeline: Timeline) -> dict[str, Any]:
    """A step of a timeline as a picture of the page: the rows that `draw_timeline` draws."""
    step, panels, used = timeline.typical_step(), [], set()
    for predicted in (True, False):
        if not (rows := timeline.at(step, predicted=predicted)):
            continue
        lines = list(picture_lines(rows, timeline.layout))
        boxes = [box for line in lines for box in line.boxes]
        used |= {box.action.kind for box in boxes}
        panels.append(
            {
                "title": panel_title(
                    timeline, rows, lines, "predicted" if predicted else f"measured, step {step}", "ms"
                ),
                "length": round(length_ms(rows), 4),
                "computed": max((box.end for box in boxes if box.action.kind in COMPUTE), default=0.0),
                "rows": [
                    {
                        "name": line_label(lines, number),
                        "top": round(line.bottom, 3),
                        "height": line.height,
                        "compute": line.queue == "compute",
                        "boxes": [_plain_box(box) for box in line.boxes],
                    }
                    for number, line in enumerate(lines)
                ],
            }
        )
    kinds = [[kind.value, name] for kind, name in KIND_NAMES if kind in used]
    return {"type": "lanes", "panels": panels, "kinds": kinds}


def _plain_box(box: Box) -> list[Any]:
    action, times = box.action, (box.start, box.joined, box.end)
    index = action.index if action.kind in COMPUTE else None
    return [*(round(time, 4) for time in times), action.kind.value, describe_action(action), index]
