"""What `python -m benchmarks.report` writes: rows of measurements, tables, figures, and pages as Markdown and HTML."""
