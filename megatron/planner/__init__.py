"""Plans a run before it starts: memory and time of its layers and stages, layout searches, sweeps,
--dry-run."""
