"""One attempt at a job on this machine, with or without a queue: inputs, training, checkpoints handed over, export, result."""
