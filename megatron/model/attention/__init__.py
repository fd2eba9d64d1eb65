"""Attention: which implementation computes it, and the implementations; parts of its layers."""
