"""From an MDS sample to a training batch.

batch.py       the contract: what a batch holds, shapes and dtypes
manifest.py    the contract with data_prep: what an MDS dataset says about itself
transforms.py  image bytes to a uint8 tensor of one size
buckets.py     aspect-ratio buckets: streams of one size each, in whole batches
mds.py         the streaming datasets: images and latents
synthetic.py   random latents, no data needed
verified.py    streams of whole, right shards
strict.py      datasets whose epochs are complete
bad_samples.py samples that cannot be decoded, counted
leftovers.py   what killed runs leave in shared memory
watched.py     a DataLoader that says what became of its processes
collate.py     samples to a batch: tokens, caption dropout, flips
loader.py      a recipe's data section to a DataLoader
"""
