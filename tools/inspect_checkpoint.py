#!/usr/bin/env python
"""Runs `megatron.commands.inspect_checkpoint` of this checkout, installed or not."""

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from megatron.commands.inspect_checkpoint import main

    sys.exit(main())
