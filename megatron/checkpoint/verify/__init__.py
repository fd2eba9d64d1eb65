"""Verification of a loaded checkpoint: digests of every parameter and moment, and a canary loss."""
