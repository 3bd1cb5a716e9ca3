"""Gradient synchronisation between replicas."""
