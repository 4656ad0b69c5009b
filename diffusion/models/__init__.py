"""The model in pure PyTorch, with one thin ComposerModel around it.

schedule.py        how much noise each timestep has
objective.py       noising, targets, weights: where the training loss is computed
keyed_random.py    noise and timesteps as a function of (seed, epoch, sample, occurrence)
unet.py            U-Nets by name, configurations in unets/
encoders.py        frozen VAE, text encoder and tokenizer; the one place where latents are scaled
sampling.py        classifier-free-guidance DDIM
stable_diffusion.py  the ComposerModel
stand_in.py        randomly initialised encoders for machines without the real ones: their sizes, and the command
random_encoders.py   the same, built
pipeline.py        images of an exported model
"""
