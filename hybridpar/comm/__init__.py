"""Why: process groups, collectives and transports between workers."""
