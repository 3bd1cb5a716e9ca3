"""Why: gradient synchronisation between replicas."""
