"""Saves: the files of each rank, in the background or not, their publication and their deletion."""
