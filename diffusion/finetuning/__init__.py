"""Preparation of training: streams of photos and of drawn images become datasets of latents in the run folder."""
