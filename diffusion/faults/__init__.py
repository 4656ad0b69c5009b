"""What a run does when something goes wrong around it; docs/reliability.md is the contract."""
