"""The demo: the whole path on shapes that the repository draws itself, in minutes on two CPU cores.

__main__.py     the stages, each a command a user would type
autoencoder.py  trains the small VAE and writes the demo's encoders
judge.py        do the pictures show the colours that the prompts name?
"""
