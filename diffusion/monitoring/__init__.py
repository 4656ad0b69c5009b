"""What a run measures and shows."""
