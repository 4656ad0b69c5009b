"""Monitoring: what a run measures, logs and shows."""
