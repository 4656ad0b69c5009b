"""What rooms hand to one another: the batch, the manifest of a dataset, errors, exit codes."""
