"""Throughput sweeps: what a sweep file says, its points, how each is started, measured and written down."""
