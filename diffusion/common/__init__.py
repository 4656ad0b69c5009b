"""Tools that every room may use: storage, atomic files, locks, distributed helpers, tables, pages. Nothing here knows recipes or models."""
