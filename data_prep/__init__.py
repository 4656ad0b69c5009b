import diffusion  # noqa: F401  # before PyTorch: it sets how PyTorch's threads wait
