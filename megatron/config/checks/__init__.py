"""Checks of settings against each other. A contradiction is a ConfigError, raised before the run starts."""
