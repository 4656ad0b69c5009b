"""Checkpoints that are there whole or not at all: writing, uploading, keeping and choosing them."""
