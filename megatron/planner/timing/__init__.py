"""Time of a step by formula: work and communication of a stage, network, and the schedule around them."""
