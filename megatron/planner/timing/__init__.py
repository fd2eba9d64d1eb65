"""Time of a step: recorded work and communication of the stages, rates of kernels, network and schedule."""
