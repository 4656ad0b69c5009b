"""A recipe becomes a Composer Trainer."""
