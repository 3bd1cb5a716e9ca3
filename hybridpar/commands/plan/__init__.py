"""Why: `hybridpar plan`."""
