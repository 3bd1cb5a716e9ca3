"""What a training run shows while it trains, and the files that it leaves behind.

The trainer emits the records of `records.py`; everything here only reads them. Importing this package imports neither
torch nor matplotlib; the names below load their module when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridpar.formats.lazy_names import lazy_names

if TYPE_CHECKING:
    from hybridpar.observe.live import open_progress as open_progress
    from hybridpar.observe.metrics import MetricsTable as MetricsTable
    from hybridpar.observe.metrics import MetricsWriter as MetricsWriter
    from hybridpar.observe.metrics import read_metrics as read_metrics
    from hybridpar.observe.plots import draw_loss as draw_loss
    from hybridpar.observe.plots import draw_staleness as draw_staleness
    from hybridpar.observe.progress import PlainProgress as PlainProgress
    from hybridpar.observe.progress import Progress as Progress
    from hybridpar.observe.records import EpochRecord as EpochRecord
    from hybridpar.observe.records import RunInfo as RunInfo
    from hybridpar.observe.records import StepRecord as StepRecord
    from hybridpar.observe.report import print_report as print_report
    from hybridpar.observe.summary import summarize as summarize
    from hybridpar.observe.summary import validate_summary as validate_summary
    from hybridpar.observe.summary import write_summary as write_summary
    from hybridpar.observe.timeline import Timeline as Timeline
    from hybridpar.observe.timeline import TimelineRow as TimelineRow
    from hybridpar.observe.timeline_file import read_timeline as read_timeline
    from hybridpar.observe.timeline_file import write_timeline as write_timeline
    from hybridpar.observe.timeline_text import print_timeline as print_timeline

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
