"""Formats that `convert` can read, a file each; formats.py lists them."""

from data_prep.sources.base import Part, Row, Source

__all__ = ['Part', 'Row', 'Source']
