"""Training of autoencoders: AutoencoderKL against pixels, a perceptual distance and a discriminator, up to its export with measured latents."""
