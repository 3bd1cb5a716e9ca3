"""Why: the pipeline is measured against every alternative that a user has, and its own promises are checked."""
