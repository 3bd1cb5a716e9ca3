"""Compressed gradient exchange: its accuracy, and its time on real links."""
