"""Pipeline parallelism: the partition of the layers into stages, and the cost of a schedule."""
