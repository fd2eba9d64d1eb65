"""Pipeline parallelism: the partition of the layers into stages, the schedules, and their simulation."""
