#!/usr/bin/env python
"""Runs `megatron.commands.job_report` of this checkout, installed or not."""

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from megatron.commands.job_report import main

    sys.exit(main())
