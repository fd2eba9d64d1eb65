"""Training with DeepSpeed: its configuration, the pipeline engine of a run, and workarounds for its
defects."""
