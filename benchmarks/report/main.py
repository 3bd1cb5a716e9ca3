"""Measures the report of a long run: seconds to make it, its size, and frame times while a reader zooms and points.

    python -m benchmarks.report.main --out benchmarks/report/results/page.csv

The run is written by this script: its figures are random, its files are those of a run. The page is opened in Chromium
without a window; the mouse is moved by the browser's own input events. A frame is what lies between two calls of
`requestAnimationFrame`, and the work of a frame the time in which its callbacks ran. Needs playwright and a browser.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rig.records import write_dicts
from hybridpar.config import TrainConfig
from hybridpar.observe.metrics import METRICS_FILE, STEP_COLUMNS
from hybridpar.run.directory import RunPlace, claim_place

_FRAMES = """
() => {
  window.frames_ = [];
  window.work_ = [];
  const original = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (callback) => original((now) => {
    const start = performance.now();
    callback(now);
    window.work_.push(performance.now() - start);
  });
  let last = null;
  const tick = (now) => {
    if (last !== null) window.frames_.push(now - last);
    last = now;
    original(tick);
  };
  original(tick);
}
"""


def write_run(directory: Path, steps: int, seed: int = 0) -> None:
    """Write the files of a run of so many steps, which never was."""
    claim_place(RunPlace(directory), TrainConfig(data="digits", run_dir=directory), "resnet18", {})
    random = np.random.default_rng(seed)
    at = np.arange(1, steps + 1)
    columns = dict.fromkeys(STEP_COLUMNS, np.full(steps, np.nan)) | {
        "step": at,
        "epoch": (at - 1) // 1000,
        "loss": 2.3 * np.exp(-at / steps * 4) + 0.2 + 0.1 * random.standard_normal(steps),
        "lr": 0.01 * (1 + np.cos(np.pi * at / steps)),
        "images_per_second": np.full(steps, 512.0),
        "step_ms": 110 + random.exponential(10, steps),
        "compute_ms": np.full(steps, 95.0),
        "exposed_sync_ms": 10 + random.random(steps),
        "data_ms": np.full(steps, 0.5),
        "bytes_sent": np.full(steps, 1_550_936),
        "grad_norm": 10 + random.standard_normal(steps),
        "residual_norm": np.where(at % 50 == 1, 14 + random.standard_normal(steps), np.nan),
    }
    columns["skipped"] = at % 9973 == 0
    with open(directory / METRICS_FILE, "w", encoding="utf-8") as file:
        for row in range(steps):
            values = {name: values[row].item() for name, values in columns.items()}
            file.write(json.dumps({name: None if one != one else one for name, one in values.items()}) + "\n")
            if at[row] % 1000 == 0:
                epoch = {
                    "event": "epoch",
                    "epoch": row // 1000,
                    "step": row + 1,
                    "test_accuracy": 0.9,
                    "test_loss": 0.5,
                }
                file.write(json.dumps(epoch | {"train_loss": values["loss"], "seconds": 110.0}) + "\n")


def frame_times(page: Path, browser: Any, moves: int = 120) -> dict[str, Any]:
    """Frame times in milliseconds while the page is at rest, pointed at, and zoomed in and out.

    Args:
        page: The page.
        browser: Of playwright.
        moves: How often the mouse is moved, and its wheel turned.
    """
    found: dict[str, Any] = {}
    window = browser.new_page(viewport={"width": 1280, "height": 900})
    window.goto(page.absolute().as_uri())
    window.evaluate(_FRAMES)
    box = window.locator(".chart.loss .plot").bounding_box()
    for what in ("rest", "point", "zoom"):
        window.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        window.wait_for_timeout(300)
        window.evaluate("() => { frames_.length = 0; work_.length = 0; }")
        if what == "rest":
            window.wait_for_timeout(1000)
        for number in range(moves if what != "rest" else 0):
            if what == "point":
                window.mouse.move(box["x"] + 80 + 8 * number, box["y"] + 80)
            else:
                window.keyboard.down("Control")
                window.mouse.wheel(0, -100 if number % 60 < 30 else 100)
                window.keyboard.up("Control")
        frames, work = window.evaluate("() => [frames_, work_]")
        found[what] = {"frames": len(frames)}
        for name, times in (("frame", frames), ("work", work or [0.0])):
            found[what][f"{name}_median_ms"] = round(float(np.median(times)), 2)
            found[what][f"{name}_p95_ms"] = round(float(np.percentile(times, 95)), 2)
    window.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run, page = Path(folder, "run"), Path(folder, "report.html")
        write_run(run, options.steps)
        seconds, processor = [], []
        for _ in range(options.repeats):
            start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-m", "hybridpar", "report", str(run), "-o", str(page)], check=True)
            seconds.append(time.perf_counter() - start)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            processor.append(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime)
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        result = {
            "steps": options.steps,
            "load_per_core": round(os.getloadavg()[0] / (os.cpu_count() or 1), 2),
            "seconds": round(float(np.median(seconds)), 2),
            "seconds_most": round(max(seconds), 2),
            "processor_seconds": round(float(np.median(processor)), 2),
            "page_bytes": page.stat().st_size,
            **{
                f"{what}_{name}": value
                for what, times in frame_times(page, browser).items()
                for name, value in times.items()
            },
            "browser": browser.version,
        }
        browser.close()
    write_dicts(options.out, [{"figure": figure, "value": value} for figure, value in result.items()])
    print(options.out.read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()
