#!/usr/bin/env python
"""Runs `megatron.commands.generate` of this checkout, installed or not."""

if __name__ == "__main__":  # processes that a tool starts import this file again
    import runpy
    from pathlib import Path

    runpy.run_path(str(Path(__file__).with_name("_command.py")))["run"](__file__)
