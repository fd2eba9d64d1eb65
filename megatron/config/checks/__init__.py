"""Checks of one setting against another; a mistake is a ConfigError before anything has started."""
