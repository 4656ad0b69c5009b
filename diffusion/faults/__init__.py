"""Reactions of a run to faults around it; docs/reliability.md is the contract."""
