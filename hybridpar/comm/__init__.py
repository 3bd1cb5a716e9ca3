"""Process groups, collectives and transports between workers."""
