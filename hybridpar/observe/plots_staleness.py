"""Why: a mean staleness hides what hurts, the few gradients that are very old; `staleness.png` shows all of them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path

from hybridpar.observe.files import replace_file

#: Name of the file in the run directory.
STALENESS_PICTURE = "staleness.png"

_BARS, _EXPECTED = "#0072B2", "#D55E00"


def draw_staleness(
    run_dir: Path, counts: Mapping[int, int], expected: float | None = None, say: Callable[[str], object] = print
) -> Path | None:
    """Draw `staleness.png`: how many gradients arrived at which age.

    Args:
        run_dir: Directory of the run.
        counts: Gradients by staleness, in updates of the server.
        expected: Mean staleness of equally fast workers, drawn as a line; None for none.
        say: Takes the one line that tells why there is no picture.

    Returns:
        The picture's path, or None where matplotlib is not installed or there are no gradients.

    Raises:
        RunDirectoryError: The picture cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        say(f"{STALENESS_PICTURE} needs matplotlib: pip install 'hybridpar[plots]'")
        return None
    total = sum(counts.values())
    if not total:
        say(f"{STALENESS_PICTURE} was not drawn: no gradient arrived")
        return None
    mean = sum(age * count for age, count in counts.items()) / total
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"font.size": 13})
        figure = Figure(figsize=(9, 4.5), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        ages = sorted(counts)
        axes.bar(ages, [100 * counts[age] / total for age in ages], width=0.9, color=_BARS)
        axes.set_title(
            f"staleness of {total:,} gradients, mean {mean:.2f}, largest {ages[-1]}", fontsize=14, loc="left"
        )
        axes.set_xlabel("updates between the weights of a gradient and its arrival")
        axes.set_ylabel("% of gradients")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if expected is not None:
            axes.axvline(expected, color=_EXPECTED, linewidth=2, linestyle="--", label=f"equal workers: {expected:.2f}")
            axes.legend(frameon=False, loc="upper right")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    path = Path(run_dir) / STALENESS_PICTURE
    replace_file(path, [buffer.getvalue()])
    return path
