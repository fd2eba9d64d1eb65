"""Checkpoint formats: one `StateReader` per format, and the file formats that they use."""
