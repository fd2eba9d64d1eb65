"""Saves: how each rank's files are written (in the background or not), published and deleted."""
