"""What every room may use: storage, atomic files and locks, ranks, tables, pages. Knows nothing of recipes or models."""
