#!/usr/bin/env python
"""Runs `megatron.commands.merge_datasets` of this checkout, installed or not."""

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from megatron.commands.merge_datasets import main

    sys.exit(main())
