"""Fixtures of the tests of the pages."""

from support.launch import launch

__all__ = ["launch"]
