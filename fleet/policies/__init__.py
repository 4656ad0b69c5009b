"""Decisions of the fleet, as pure functions of rows and time."""
