"""What the fleet decides, as pure functions of rows and time: the service and the simulator call the same ones."""
