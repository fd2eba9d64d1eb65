"""Determines the run of a checkpoint and of a --save folder: run ids, lineage, owner, start of a run."""
