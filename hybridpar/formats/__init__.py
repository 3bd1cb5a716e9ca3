"""Files and messages that may be damaged or hostile, read in bounded time and memory and without running code."""
