"""The way from an MDS sample to a training batch (contracts/batch.py).

decode.py       bytes to an RGB image, or a reason
transforms.py   image bytes to a uint8 tensor of one size
shards.py       index.json, shards and captions of a dataset, outside of Streaming
sources.py      a recipe's streams and their aspect-ratio buckets, compared with the recipe
verified.py     streams of whole, right shards
strict.py       datasets whose epochs are complete, and leave nothing in shared memory
mds.py          the streaming datasets: images and latents; samples that cannot be decoded, counted
watched.py      a DataLoader that says what became of its processes
loader.py       a recipe's data section to a DataLoader; samples to a batch: tokens, caption dropout, flips; random data
keyed_random.py random numbers that depend on the sample alone
"""
