"""Text-to-image diffusion models, trained. The distribution is called text-to-image-recipes: `diffusion` on the package index is a stranger's."""

__version__ = '0.1.0'
