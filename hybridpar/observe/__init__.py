"""What a training run shows while it trains, and the files that it leaves behind.

The trainer emits the records of `records.py`; everything here only reads them. Importing this package imports neither
torch nor matplotlib.
"""

from hybridpar.observe.live import open_progress
from hybridpar.observe.metrics import MetricsTable, MetricsWriter, read_metrics
from hybridpar.observe.plots import draw_loss, draw_staleness
from hybridpar.observe.progress import PlainProgress, Progress
from hybridpar.observe.records import EpochRecord, RunInfo, StepRecord
from hybridpar.observe.report import print_report
from hybridpar.observe.summary import summarize, summary_schema, validate_summary, write_summary
from hybridpar.observe.timeline import Timeline, TimelineRow
from hybridpar.observe.timeline_file import read_timeline, write_timeline
from hybridpar.observe.timeline_text import print_timeline

__all__ = [
    "EpochRecord",
    "MetricsTable",
    "MetricsWriter",
    "PlainProgress",
    "Progress",
    "RunInfo",
    "StepRecord",
    "Timeline",
    "TimelineRow",
    "draw_loss",
    "draw_staleness",
    "open_progress",
    "print_report",
    "print_timeline",
    "read_metrics",
    "read_timeline",
    "summarize",
    "summary_schema",
    "validate_summary",
    "write_summary",
    "write_timeline",
]
