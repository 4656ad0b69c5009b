"""Scores of a model: features of images by published networks, and distances between them."""
