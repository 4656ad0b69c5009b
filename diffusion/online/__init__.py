"""Encoding while training on other machines: Ray actors turn a loader's images into moments a few batches ahead (`data.encoders` of a recipe)."""
