"""Description and measurement of this machine and its links, and how worker processes are started on it."""
