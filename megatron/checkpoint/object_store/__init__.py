"""Checkpoints in an object store such as S3, where no rename exists."""
