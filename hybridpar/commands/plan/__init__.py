"""The command `hybridpar plan`."""
