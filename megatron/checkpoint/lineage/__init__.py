"""Determines which run a checkpoint and a --save folder belong to: run ids, lineage, owner, start of a
run."""
