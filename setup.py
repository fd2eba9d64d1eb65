"""For tools that call setup.py. The metadata stands in pyproject.toml."""

from setuptools import setup

setup()
