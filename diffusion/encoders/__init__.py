"""Frozen networks: the VAE with its scale, the text encoders with their tokenizers."""
