"""Why: every row of a result says where it was measured."""

from __future__ import annotations

import datetime
import os
import platform

import torch

from hybridpar.partition.profile_cache import device_name


def setting() -> dict[str, object]:
    """Columns that every result ends with."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": f"{os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
