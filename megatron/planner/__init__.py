"""The plan of a run: memory, FLOPs and time of each layer, pipeline stages, the report of a dry run."""
