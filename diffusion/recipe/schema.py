"""What a recipe may say: one dataclass a section, one docstring line a field, units in the text.

YAML files are merged strictly into these classes (`load.py`); what no single field can know is checked in `rules.py`.
`python -m diffusion.check RECIPE` prints the resolved recipe with these docstrings as comments.

Durations and intervals are Composer time strings: `10000ba` batches, `3ep` epochs, `1000000sp` samples, `1800sec` seconds.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from omegaconf import MISSING


@dataclass
class Encoders:
    source: str = MISSING
    """Where VAE, text encoder and tokenizer come from: a local folder in the diffusers layout, or a Hub id."""
    revision: str | None = None
    """Commit of the Hub repository (40 hex digits); required for a Hub id, meaningless for a folder."""


@dataclass
class Schedule:
    kind: Literal['scaled_linear', 'linear', 'cosine'] = 'scaled_linear'
    """Shape of beta over the timesteps; `scaled_linear` is Stable Diffusion's (linear in the square root of beta)."""
    beta_start: float = 0.00085
    """First beta; ignored by `cosine`."""
    beta_end: float = 0.012
    """Last beta; ignored by `cosine`."""
    num_timesteps: int = 1000
    """Number of noise levels T; timesteps run from 0 to T-1."""
    zero_terminal_snr: bool = False
    """Rescale so that the last timestep is pure noise (arXiv 2305.08891); needs v or sample prediction."""


@dataclass
class Diffusion:
    prediction: Literal['epsilon', 'v_prediction', 'sample'] = 'epsilon'
    """What the network predicts: the noise, v = alpha*noise - sigma*latents (arXiv 2202.00512), or the clean latents."""
    schedule: Schedule = field(default_factory=Schedule)
    min_snr_gamma: float | None = None
    """Min-SNR loss weighting (arXiv 2303.09556), 5.0 in the paper; v prediction takes min(SNR + 1, gamma) / (SNR + 1). null: unweighted."""
    offset_noise: float = 0.0
    """Strength of noise added per image and channel, constant over the pixels; 0 switches it off."""


@dataclass
class Flow:
    mean: float = 0.0
    """Mean of the normal variable whose logistic function is the time: above 0 more samples are near pure noise (arXiv 2403.03206, section 3.1)."""
    std: float = 1.0
    """Standard deviation of that variable."""
    uniform_share: float = 0.1
    """Share of the samples (0..1) whose time is uniform instead: the density above almost leaves out both ends."""
    shift: float = 1.0
    """Moves all times towards noise, t' = shift t / (1 + (shift - 1) t), while training and sampling; sqrt of the growth in pixels, 1 at the base."""


@dataclass
class Model:
    network: str = MISSING
    """Name of a configuration in `diffusion/families/networks/`, which also names its family."""
    encoders: Encoders = field(default_factory=Encoders)
    timesteps: Literal['uniform', 'sobol'] = 'uniform'
    """`uniform`: each sample draws its own; `sobol`: each global batch is spread evenly over all of them, by a Sobol sequence."""
    diffusion: Diffusion | None = None
    """The objective of diffusion (DDPM); null where `flow` is the objective. Exactly one of the two is not null."""
    flow: Flow | None = None
    """The objective of rectified flow; null where `diffusion` is the objective."""


@dataclass
class Stream:
    remote: str | None = None
    """Folder of the MDS data set in object storage (`s3://`, `gs://`, `oci://`); null reads `local` alone."""
    local: str | None = None
    """Local folder: the data set itself, or the cache of `remote` (null: in `run_folder`/cache, one a machine)."""
    proportion: float | None = None
    """Share of this stream in an epoch (0..1); either all streams state it or none (then by size)."""


def present(streams: Mapping[str, Stream | None]) -> dict[str, Stream]:
    """The streams that a recipe has: without those of its base that it removed."""
    return {name: stream for name, stream in streams.items() if stream is not None}


@dataclass
class Data:
    kind: Literal['latents', 'images', 'synthetic'] = MISSING
    """What the MDS data set holds (its manifest must agree); `synthetic` makes random latents and needs no data."""
    resolution: int = MISSING
    """Side of the square training image, in pixels; with `aspect_buckets`, of the square that no bucket's area exceeds."""
    aspect_buckets: bool = False
    """Train on rectangles: the streams are data sets of aspect-ratio buckets, and every batch is of one bucket of one stream."""
    streams: dict[str, Stream | None] = field(default_factory=dict)
    """The training data by name; null removes a stream that `base` named."""
    flip: bool = False
    """Mirror half of the images (keyed by seed, epoch and sample); only for `kind: images`."""
    caption_dropout: float = 0.1
    """Share of captions (0..1) replaced by the empty one, drawn anew each epoch; classifier-free guidance needs it."""
    workers: int = 8
    """Loader processes per GPU; 0 loads in the training process."""
    shuffle: bool = True
    """Shuffle anew each epoch, from `seed`."""
    shuffle_block_size: int = 262144
    """Samples shuffled together; fixed, so that the order does not depend on the number of nodes."""
    canonical_nodes: int = 64
    """Parts that an epoch is dealt out in, or their largest divisor that divides the batch; any number of nodes sees the same batches, and one that
    divides it reads each shard on one node only."""
    predownload: int = 8192
    """Samples that each worker downloads ahead."""
    cache_limit: str | None = None
    """Disk for the local cache, per node, such as `2tb`; null keeps every shard."""
    verify: Literal['hash', 'size'] = 'hash'
    """What is compared of a shard that the cache holds at the start, before it is used: its hash, or only its size. Downloads are always hashed."""
    timeout_sec: int = 600
    """Longest wait for a batch before the run stops with an error: a hung loader process, storage that does not answer."""
    max_bad_samples: int = 0
    """Samples that cannot be decoded and may be replaced by others, in the whole run; each is counted and logged. One more stops the run."""
    synthetic_samples: int = 65536
    """Samples in an epoch of synthetic data."""


@dataclass
class Batch:
    global_size: int = MISSING
    """Samples in one optimizer step, over all GPUs."""
    micro_size: int | str = MISSING
    """Samples in one forward and backward pass of one GPU; `auto` tries at the start which is the largest that fits, and stays there."""


@dataclass
class Optimizer:
    lr: float = 1e-4
    """Peak learning rate of AdamW, of the last batch of `warmup`."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's momentum coefficients."""
    eps: float = 1e-8
    """AdamW's denominator term."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; null does not clip."""
    warmup: str = '10000ba'
    """Batches of linear warm-up: the first has the rate lr / warmup, the last has `lr`; 0ba begins with `lr`."""
    decay: Literal['constant', 'cosine', 'cooldown'] = 'constant'
    """After the warm-up: stay at `lr`; follow a cosine to 0 at the end of the run; or stay, and fall to 0 in the last fifth (arXiv 2405.18392)."""


@dataclass
class Ema:
    half_life: str | None = None
    """Batches (`6931ba`) after which half of the average is newer, at most 5 % of the batches so far; 6931ba: smoothing 0.9999. null: none."""
    start: str = '0ba'
    """Batches (`10000ba`) after which averaging starts; nothing is allocated before. To have no average, set half_life to null."""
    interval: str = '1ba'
    """Update every so many batches; the decay accounts for it."""
    offload: bool = False
    """Keep the average in the host's memory; saves 4 bytes a parameter on the GPU, and an update takes as long as copying the weights."""


@dataclass
class Train:
    duration: str = MISSING
    """Length of the run in batches or epochs; a finished run can be made longer if `decay` is constant."""
    precision: Literal['amp_bf16', 'bf16', 'fp32'] = 'amp_bf16'
    """`amp_bf16`: fp32 weights, converted for each operation (autocast); `bf16`: fp32 master weights and a bf16 copy a step, norms in bf16 too."""
    compile: Literal['network', 'blocks'] | None = None
    """`torch.compile` the whole `network`, or its `blocks` one by one (sooner done, and what sharding needs); null compiles nothing."""
    attention: Literal['auto', 'cudnn', 'flash', 'efficient', 'math'] = 'auto'
    """Kernel of scaled-dot-product attention; `auto` leaves it to PyTorch. Those in use are in environment.json."""
    cudnn_benchmark: bool = False
    """Let cuDNN time its algorithms for each convolution in the first steps and keep the fastest. A resumed process may keep others, whose sums are
    rounded in another order: with it a resume is no longer equal to the bit. GPUs only."""
    checkpoint_activations: bool = False
    """Compute each block's activations again in the backward pass: a third more arithmetic, a fraction of the memory."""
    sharding: Literal['ddp', 'zero2', 'hsdp'] = 'ddp'
    """`ddp`: all GPUs hold everything; `zero2`: gradients, master weights, Adam and EMA divided among them; `hsdp`: divided within each node."""
    vae_precision: Literal['bf16', 'fp32'] = 'bf16'
    """Arithmetic of the VAE with `data.kind: images`; fp32 is what data_prep.encode stores, and several times slower."""
    cpu_threads: int | None = None
    """Threads of PyTorch's CPU arithmetic (OMP_NUM_THREADS); null leaves its own choice."""


@dataclass
class Eval:
    every: str | None = None
    """Interval of evaluations; null evaluates never."""
    streams: dict[str, Stream | None] = field(default_factory=dict)
    """The evaluation data by name, same kind and resolution as the training data."""
    batches: int | None = None
    """Batches of micro_size x GPUs per evaluation; null takes all of the data."""
    timesteps: int = 10
    """Evenly spaced timesteps, one loss for each beside the mean; sample `id` is judged at the (id mod timesteps)-th."""


@dataclass
class Checkpoint:
    folder: str = '${run_folder}/checkpoints'
    """Local folder or object-store URL."""
    every: str = '1800sec'
    """Interval in seconds or batches (an end-of-epoch checkpoint would replay its epoch)."""
    keep: int = 3
    """Newest checkpoints kept, on a local disk and in object storage alike; -1 keeps all."""
    keep_every: str | None = None
    """Also keep for good the first checkpoint of every so many batches, such as `50000ba`; null keeps none of the old ones."""
    allowed_misses: int = 2
    """Checkpoints in a row that may fail to be written or uploaded (disk full, storage down) before the run stops."""


@dataclass
class Faults:
    non_finite: Literal['stop', 'skip', 'rollback'] = 'stop'
    """When loss or gradients are NaN or infinite: end the run, leave the batch out, or go back a checkpoint and leave out the data since."""
    max_skipped: int = 3
    """With `skip`: batches in a row that may be left out before the run stops."""
    stall_sec: int = 1800
    """Longest time without a finished step (or evaluation batch) before all stacks are written to `run_folder`/stalls and the run stops."""
    gpu_hours_between_failures: float = 50000.0
    """Assumed, to propose an interval between checkpoints; Llama 3 had one in 50,700 GPU-hours, spot machines have one in tens."""


@dataclass
class Samples:
    every: str | None = None
    """Interval of sample grids, which also show the untrained model; null draws none."""
    prompts: dict[str, str] = field(default_factory=dict)
    """The prompts by name, in the order of the grid."""
    guidance: float = 7.5
    """Classifier-free guidance scale; 1 is none."""
    steps: int = 50
    """DDIM steps."""
    seed: int = 0
    """Seed of the fixed starting noise."""


@dataclass
class Log:
    every: int = 10
    """Batches between two records of `log.jsonl` and the other loggers, and between lines where there is no terminal."""
    to: list[str] = field(default_factory=list)
    """Where metrics and sample grids go besides log.jsonl: any of wandb, tensorboard, mlflow, comet and neptune, such as [wandb, tensorboard].
    Where W&B does not answer within 60 s (or WANDB_INIT_TIMEOUT) the run logs offline and says how to upload that; without credentials it does not
    start."""
    project: str | None = None
    """Project of those loggers (MLflow: experiment); tensorboard has none. WANDB_MODE=offline and MLFLOW_TRACKING_URI are honoured."""
    samples: Samples = field(default_factory=Samples)


@dataclass
class Cost:
    gpu: str | None = None
    """What is paid for, such as `a100-40gb`; without a number below its price is the first in diffusion/cost/prices.yaml."""
    price_per_gpu_hour: float | None = None
    """Dollars for one GPU (or machine, without a GPU) and hour; null takes the price of `gpu`, and reports no money if that is null too."""


@dataclass
class Recipe:
    name: str = MISSING
    """Name of the run, its folder and its W&B run: letters, digits and . _ - alone."""
    seed: int = 17
    """The one seed: initial weights, sample order, noise, timesteps, dropout."""
    run_folder: str = 'runs/${name}'
    """Everything the run writes: recipe.yaml, log.jsonl, samples, checkpoints."""
    load_path: str | None = None
    """First weights: a run folder or .pt file (its weights as trained), a diffusers folder, or OWNER/NAME@COMMIT on the Hub; null: random."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    optimizer: Optimizer = field(default_factory=Optimizer)
    ema: Ema = field(default_factory=Ema)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    faults: Faults = field(default_factory=Faults)
    log: Log = field(default_factory=Log)
    cost: Cost = field(default_factory=Cost)


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a section, by field name (Python keeps them only in the source)."""
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for statement, after in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[statement.target.id] = ' '.join(str(after.value.value).split())  # type: ignore[union-attr]
    return docs


SECTIONS: tuple[type, ...] = (
    Encoders,
    Schedule,
    Diffusion,
    Flow,
    Model,
    Stream,
    Data,
    Batch,
    Optimizer,
    Ema,
    Train,
    Eval,
    Checkpoint,
    Faults,
    Samples,
    Log,
    Cost,
    Recipe,
)
