"""What `hybridpar train` adds to a trainer: run directory, display, reports."""
