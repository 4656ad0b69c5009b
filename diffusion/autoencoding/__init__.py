"""Training of autoencoders: AutoencoderKL against pixels, a perceptual distance and a discriminator, up to its export with measured latents.

networks/         arguments of AutoencoderKL by name
networks.py       the networks, and an easier start for them
discriminator.py  PatchGAN
losses.py         each loss, the adaptive weight, and a loss whose gradient is known already
model.py          the ComposerModel
metrics.py        PSNR and SSIM of held-out images
callbacks.py      when the discriminator begins, what the losses were, grids of reconstructions
builder.py        a recipe becomes a Trainer
latents.py        the latents of a trained autoencoder: measured, and brought to unit variance
exporting.py      its folder
counting.py       FLOP of a step
planning.py       all that a plan counts
"""
