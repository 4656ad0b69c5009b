"""Pages of `python -m diffusion.report`: one run, or a comparison of several."""
