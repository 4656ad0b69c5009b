"""Composer callbacks: what a run measures, draws and writes while it trains."""
