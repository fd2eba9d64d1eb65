"""What a checkpoint proves when it is loaded: digests of every parameter and moment, and a loss."""
