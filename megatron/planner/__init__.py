"""Plans a run before it starts: memory and time of its layers and stages, searches, sweeps, --dry-run."""
