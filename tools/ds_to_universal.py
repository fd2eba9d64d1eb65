#!/usr/bin/env python
"""Runs `megatron.commands.ds_to_universal` of this checkout, installed or not."""

if __name__ == "__main__":
    from _checkout import run

    run(__file__)
