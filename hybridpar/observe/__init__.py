"""What a training run shows while it trains, and the files that it leaves behind.

The trainer emits the records of `records.py`; everything here only reads them. No module imports torch, and plotly
is imported where a page is drawn.
"""
