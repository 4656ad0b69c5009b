"""Reports of `python -m benchmarks.report`: rows of measurements, tables, figures, and pages as Markdown and HTML."""
