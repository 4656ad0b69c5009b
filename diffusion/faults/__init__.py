"""How a run reacts to faults around it; docs/reliability.md is the contract."""
