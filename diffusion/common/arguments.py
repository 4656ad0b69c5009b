"""Argument types of commands that are not yet declared by diffusion.common.command_line."""

import argparse

from diffusion.common.command_line import CommandParser

__all__ = ['CommandParser']  # until every command is declared by diffusion.common.command_line


def positive_int(text: str) -> int:
    """Argparse type: a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def positive_float(text: str) -> float:
    """Argparse type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float('inf'):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value
