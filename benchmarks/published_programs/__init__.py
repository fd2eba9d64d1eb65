"""The frameworks ("programs") of published measurements, and the predicted time and memory of their runs.

shapes         a model, a layout, and a program: what the program fuses, overlaps and keeps
layer_passes   a pass of a micro-batch through a layer, as a list of kernels and collectives
steps          the predicted time of a step
memory         the predicted memory of a GPU
classes        the programs, with the constants that describe them
rows           published measurements of a CSV file as runs of these programs
fitting        the search for the constants
report         errors by program and GPU
"""
