"""Follow a run's checkpoints from another process and show what they draw."""
