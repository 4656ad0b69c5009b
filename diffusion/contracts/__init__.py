"""Contracts between rooms: the batch, the dataset manifest, errors, exit codes."""
