"""Which run a checkpoint and a --save folder belong to: run ids, lineage, owner, where a run starts."""
