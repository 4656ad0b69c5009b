"""Text-to-image diffusion models, trained. The distribution is called text-to-image-recipes: `diffusion` on the package index is a stranger's."""

import os

__version__ = '0.1.0'

# Read when PyTorch is imported, which every entry point does after this package. Threads that wait for one another by spinning take the cores from
# the very threads that they wait for, where other processes use them too: training on a CPU was many times slower (docs/performance.md).
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
