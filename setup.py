"""Builds in a folder of its own: setuptools would ship modules that an earlier build left in `build/`."""

from tempfile import TemporaryDirectory

from setuptools import setup

with TemporaryDirectory() as folder:
    setup(options={"build": {"build_base": folder}})
