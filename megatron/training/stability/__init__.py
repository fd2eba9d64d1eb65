"""Bad data, spikes, skipped steps, and copies that must stay equal."""
