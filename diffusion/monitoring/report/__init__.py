"""What `python -m diffusion.report` shows of a run, or of several."""
