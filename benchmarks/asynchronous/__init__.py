"""Why: what is gained where workers do not wait for each other in every step, or not for everything."""
