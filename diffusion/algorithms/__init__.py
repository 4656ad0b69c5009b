"""Composer algorithms: they attach to the training loop by its events; the model does not know them."""
