"""Why: what `hybridpar train` adds to a trainer: run directory, display, reports."""
