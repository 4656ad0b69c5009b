"""What the benchmarks of training measure, each in a file of the command's name: apart from the command, which answers --help without torch."""
