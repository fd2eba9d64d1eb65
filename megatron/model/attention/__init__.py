"""Attention: its implementations, the choice among them, and the parts of attention layers."""
