#!/usr/bin/env python
"""Runs `megatron.commands.sweep` of this checkout, installed or not."""

if __name__ == "__main__":  # processes that a tool starts import this file again
    from _command import run

    run(__file__)
