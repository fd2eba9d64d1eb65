"""DeepSpeed: what it is told, and what is done where it does otherwise than promised here."""
