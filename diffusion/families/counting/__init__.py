"""FLOP and activations of networks, counted without weights and without a GPU."""
