"""What the fleet decides, as pure functions of rows and time."""
