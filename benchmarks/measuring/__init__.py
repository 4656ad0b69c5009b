"""Measurements of the training benchmarks, each in a file of the command's name: apart from the command, which answers --help without torch."""
