"""Checkpoint formats: a `StateReader` for each format, and the file formats that the readers use."""
