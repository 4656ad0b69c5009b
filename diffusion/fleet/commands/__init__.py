"""One file a command of `python -m diffusion.fleet`: arguments in, text out."""
