"""What a run prints and writes about itself: iteration lines, curves, memory, moments."""
