"""The loop of a machine that may vanish: ask for a job, keep its lease, hand over what it made."""
