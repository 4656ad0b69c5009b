"""What rooms hand to one another: the batch, the dataset manifest, errors, exit codes."""
