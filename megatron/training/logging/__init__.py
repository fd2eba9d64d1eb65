"""Console lines, TensorBoard and Weights & Biases curves, memory and moments tables."""
