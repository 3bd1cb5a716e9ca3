"""Why: what is known of this machine and its links: description, measurements, processes."""
