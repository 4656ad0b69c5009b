"""Packaging and the one place where dependency bounds live.

The set that these bounds resolve to is checked by `pip check` in `make install`. Upper bounds that look odd:
mosaicml 0.32 pins torch < 2.7.1 and pillow < 12; streaming 0.13 pins transformers < 5, hence diffusers < 0.40
(the next one needs huggingface-hub >= 1); Composer's WandBLogger calls `wandb.run.get_url()`, gone in wandb 0.29.
"""

from setuptools import find_packages, setup

CORE = [
    'mosaicml>=0.32.1,<0.33',
    'mosaicml-streaming>=0.13.0,<0.14',
    'torch>=2.6,<2.7.1',
    'diffusers>=0.39,<0.40',
    'transformers>=4.57,<5',
    'accelerate>=1.0,<2',
    'safetensors>=0.5,<0.9',
    'omegaconf>=2.4,<2.5',
    'wandb>=0.19,<0.29',
    'numpy>=2.0,<2.2',
    'scipy>=1.13,<2',
    'pillow>=10.3,<12',
    'pyarrow>=18,<27',
    'boto3>=1.36,<2',  # the clients of gs:// and oci:// come with mosaicml-streaming
    'matplotlib>=3.8,<4',
    'torchmetrics>=1.4,<1.7.5',
    'tqdm>=4.66,<5',
    'pyyaml>=6,<7',
]

# Optional parts of data_prep. img2dataset moves slowly and brings OpenCV, so it is no one's burden who has pictures already.
DATA_EXTRAS = {
    'download': ['img2dataset>=1.47,<1.48'],
    'near-duplicates': ['ImageHash>=4.3.2,<5'],
}

EXTRAS = {
    **DATA_EXTRAS,
    # What a developer of this repository needs and a user does not.
    'dev': [
        *(requirement for extra in DATA_EXTRAS.values() for requirement in extra),
        'moto[server]>=5.1,<6',  # an S3 server on loopback
        'torchvision>=0.21,<0.22.1',  # a test compares our resizing with it
        'pytest>=8.3,<10',
        'pytest-timeout>=2.3,<3',
        'pytest-xdist>=3.6,<4',
        'ruff>=0.14,<0.15',
        'mypy>=1.18,<3',
        'types-PyYAML',
        'pre-commit>=4,<5',
    ],
}

setup(
    name='diffusion',
    version='0.1.0',
    description='Pre-train Stable Diffusion on your own data with Composer and Streaming',
    license='Apache-2.0',
    python_requires='>=3.11,<3.13',
    packages=find_packages(include=['diffusion*', 'data_prep*', 'benchmarks*']),
    package_data={'diffusion': ['models/unets/*.json', 'planning/counts.json'], 'benchmarks': ['prices.yaml', 'assumptions.yaml', 'sweeps/*.yaml']},
    install_requires=CORE,
    extras_require=EXTRAS,
)
