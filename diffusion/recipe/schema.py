"""Schema of recipes: one dataclass a section, one `key(...)` a field with its default, meaning, unit, range and whether a resume may change it.

YAML files are merged strictly into these classes (`load.py`); what relates several keys is checked in `rules.py`.
`python -m diffusion.check RECIPE` prints the resolved recipe with the texts as comments.

Durations and intervals are Composer time strings: `10000ba` batches, `3ep` epochs, `1000000sp` samples, `1800sec` seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from diffusion.common.command_line import LARGEST_SEED
from diffusion.recipe.keys import MISSING, Duration, fields_after, key
from diffusion.recipe.techniques import Methods, Optimizer

Named = TypeVar('Named')

LARGEST_COUNT = 10**9
LARGEST_SIGMA_REL = 0.28  # a plain mean of the whole run has 0.289


@dataclass
class EncoderSource:
    source: str = key(MISSING, remedy='name a local folder in the diffusers layout, or a Hub id with its revision')
    """Origin of VAE, text encoder and tokenizer: a local folder in the diffusers layout, or a Hub id."""
    revision: str | None = key(None, 'Commit of the Hub repository (40 hex digits); required for a Hub id, meaningless for a folder.')


@dataclass
class Schedule:
    kind: Literal['scaled_linear', 'linear', 'cosine'] = key('scaled_linear')
    """Shape of beta over the timesteps; `scaled_linear` is Stable Diffusion's (linear in the square root of beta)."""
    beta_start: float = key(0.00085, 'First beta; ignored by `cosine`.')
    beta_end: float = key(0.012, 'Last beta; ignored by `cosine`.')
    num_timesteps: int = key(1000, 'Number of noise levels T; timesteps run from 0 to T-1.', low=2, high=100_000)
    zero_terminal_snr: bool = key(False)
    """Rescale so that the last timestep is pure noise (arXiv 2305.08891); needs v_prediction or sample prediction."""


@dataclass
class DiffusionSettings:
    prediction: Literal['epsilon', 'v_prediction', 'sample'] = key('epsilon')
    """Prediction of the network: the noise, v = alpha*noise - sigma*latents (arXiv 2202.00512), or the clean latents."""
    schedule: Schedule = key(Schedule)
    min_snr_gamma: float | None = key(None, low=1e-12, remedy='write null for no weighting')
    """Min-SNR loss weighting (arXiv 2303.09556), 5.0 in the paper; v_prediction takes min(SNR + 1, gamma) / (SNR + 1). null: unweighted."""
    offset_noise: float = key(0.0, 'Strength of noise added per image and channel, constant over the pixels; 0 switches it off.', low=0)


@dataclass
class FlowSettings:
    mean: float = key(0.0, low=-10, high=10)
    """Mean of the normal variable whose logistic function is the time: above 0 more samples are near pure noise (arXiv 2403.03206, section 3.1)."""
    std: float = key(1.0, 'Standard deviation of that variable.', low=1e-3, high=10)
    uniform_share: float = key(0.1, low=0, high=1)
    """Share of the samples (0..1) whose time is uniform instead, before `shift`: the density above almost leaves out both ends."""
    shift: float = key(1.0, low=1e-2, high=100)
    """Moves all times towards noise, t' = shift t / (1 + (shift - 1) t), in training and sampling; sqrt of the growth in pixels, 1 at the base.
    It moves those of uniform_share too, which Photoroom/PRX leaves unshifted."""


@dataclass
class Model:
    network: str = key(MISSING, 'Name of a configuration in `diffusion/families/networks/`, which also names its family.')
    encoders: EncoderSource = key(EncoderSource)
    timesteps: Literal['uniform', 'sobol'] = key('uniform')
    """`uniform`: each sample draws its own; `sobol`: each global batch is spread evenly over all of them, by a Sobol sequence."""
    diffusion: DiffusionSettings | None = key(None)
    """The objective of diffusion (DDPM); null where `flow` is the objective. Exactly one of the two is not null."""
    flow: FlowSettings | None = key(None, 'The objective of rectified flow; null where `diffusion` is the objective.')


@dataclass(unsafe_hash=True)  # what is counted of a network is kept by its adapter
class Adapter:
    kind: Literal['lora'] = key('lora')
    """Low-rank adaptation (arXiv 2106.09685): a layer W computes W + (alpha / rank) B A; W is frozen, A and B are trained."""
    rank: int = key(8, 'Rows of A; a layer of `in` x `out` gains rank x (in + out) weights.', low=1, high=1024)
    alpha: float = key(8.0, 'Strength of the adapter; equal to `rank` is the only value that all readers of its file agree on.', low=1e-3, high=1e4)
    targets: Literal['attention', 'attention+ff'] = key('attention')
    """The network's layers: projections of its attention, or also its feed-forward layers and the projections around its blocks."""
    text_encoders: bool = key(False, "Adapters on the text encoders' attention too.")
    text_lr: float | None = key(None, 'Peak learning rate of those, such as 5.0e-6; null where there are none.', low=0, high=1)
    text_weight_decay: float | None = key(None, 'Their weight decay; null takes that of the optimizer.', low=0, high=1)


@dataclass
class Photos:
    folder: str = key(MISSING, 'Folder of images on this machine, each perhaps with its caption in a .txt file of its name.', may_change=True)
    caption: str | None = key(None, 'Caption of all that have none of their own, such as `a photo of sks dog`.')
    loss_outside: float | None = key(None, low=0, high=0.99)
    """Factor of the loss outside a photo's mask: `NAME.mask.png`, white on what is to be learned, or else its alpha channel; null: no masks."""


@dataclass
class Drawn:
    prompts: list[str] = key(list, 'Prompts in turn, which become the captions; varied ones keep more of what the model could draw before.')
    num_images: int = key(100, 'Images in all.', low=1, high=LARGEST_COUNT)
    seed: int = key(0, 'Image i starts from the noise of seed + i.', low=0, high=LARGEST_SEED)
    guidance: float = key(7.5, 'Classifier-free guidance scale; 1 is none.', low=1, high=1000)
    steps: int = key(50, 'Sampling steps.', low=1, high=1000)
    cache: str = key('runs/drawn', 'Folder or URL where runs with equal settings and an equal base find them drawn already.', may_change=True)


@dataclass
class Stream:
    remote: str | None = key(None, may_change=True)
    """Folder of the MDS dataset in object storage (`s3://`, `gs://`, `oci://`); null reads `local` alone."""
    local: str | None = key(None, may_change=True)
    """Local folder: the dataset itself, or the cache of `remote` (null: in `run_folder`/cache, one a machine)."""
    proportion: float | None = key(None, low=0, high=1)
    """Share of this stream in an epoch (0..1); either all streams state it or none (then by size)."""
    loss_weight: float = key(1.0, 'Factor of the loss of its samples.', low=0, high=1e6)
    photos: Photos | None = key(None, 'Instead of an MDS dataset: a folder of images, which the run converts and encodes itself.')
    drawn: Drawn | None = key(None, 'Instead of an MDS dataset: images that the model draws before it is trained (prior preservation).')


def present(named: Mapping[str, Named | None]) -> dict[str, Named]:
    """Return the streams, or prompts, that a recipe has: without those of its base that it removed."""
    return {name: value for name, value in named.items() if value is not None}


def streams_of(recipe: Any) -> dict[str, Stream]:
    """Return the streams of a recipe, for training and for evaluation, by their keys: `data.streams.NAME`."""
    sections = {'data.streams': recipe.data.streams, 'eval.streams': recipe.eval.streams}
    return {f'{section}.{name}': stream for section, streams in sections.items() for name, stream in present(streams).items()}


@dataclass
class RayEncoders:
    address: str | None = key(None, may_change=True)
    """`host:port` of a Ray cluster's head, `auto`: the one that runs here, `local`: one of this run's own; null: RAY_ADDRESS, else `local`."""
    actors: int = key(1, 'Encoders, each with a VAE of its own.', low=1, high=10000, may_change=True)
    cpus: int = key(1, 'CPU cores of one encoder, and the threads that it decodes with.', low=1, high=1024, may_change=True)
    gpus: float = key(1.0, 'GPUs of one encoder, such as 0.5; 0 encodes on its cores.', low=0, high=1, may_change=True)
    resource: str | None = key(None, may_change=True)
    """Custom resource of which each encoder takes 1, such as `A10G`: it keeps them on the machines that offer it."""
    ahead: int = key(4, 'Batches of each GPU that are on their way at once.', low=1, high=1000, may_change=True)
    send: Literal['pixels', 'bytes'] = key('pixels', may_change=True)
    """`pixels`: loader processes decode and resize; `bytes`: the stored JPEG travels, a sixth of the traffic, and the encoders do that."""
    moments: Literal['float32', 'float16'] = key('float32')
    """Numbers in which the encoded images travel back: float32 equals `data.kind: images` to the bit, float16 what data_prep.encode stores."""
    patience_sec: int = key(120, low=1, high=86400, may_change=True)
    """Longest wait for one micro-batch before its encoder is replaced and another one gets it."""


@dataclass
class OnlineEncoders:
    ray: RayEncoders = key(RayEncoders)


@dataclass
class CommonData:
    """Streams and how they are read, in every recipe."""

    streams: dict[str, Stream | None] = key(dict, "The training data by name, instead of the base's; null leaves a stream out.", whole=True)
    flip: bool = key(False, 'Mirror half of the images (keyed by seed, epoch and sample); only for `kind: images`.')
    workers: int = key(8, 'Loader processes per GPU; 0 loads in the training process.', low=0, high=256, may_change=True)
    shuffle: bool = key(True, 'Shuffle again each epoch, from `seed`.')
    shuffle_block_size: int = key(262144, low=1, high=LARGEST_COUNT)
    """Samples shuffled together; fixed, so that the order does not depend on the number of nodes."""
    canonical_nodes: int = key(64, low=1, high=2**16)
    """Parts that an epoch is dealt out in, or their largest divisor that divides the batch; any number of nodes sees the same batches, and one
    that divides it reads each shard on one node only."""
    predownload: int = key(8192, 'Samples that each worker downloads ahead.', low=1, high=LARGEST_COUNT, may_change=True)
    cache_limit: str | None = key(None, 'Disk for the local cache, per node, such as `2tb`; null keeps every shard.', may_change=True)
    verify: Literal['hash', 'size'] = key('hash', may_change=True)
    """Check of a shard that the cache holds at the start, before it is used: by its hash, or only by its size. Downloads are always hashed."""
    timeout_sec: int = key(600, low=1, high=86400, may_change=True)
    """Longest wait for a batch before the run stops with an error: a hung loader process, storage that does not answer."""
    max_bad_samples: int = key(0, low=0, high=LARGEST_COUNT, may_change=True)
    """Samples that cannot be decoded and may be replaced by others, in the whole run; each is counted and logged. One more stops the run."""
    synthetic_samples: int = key(65536, 'Samples in an epoch of synthetic data.', low=1, high=2**40)


@fields_after()
@dataclass
class Data(CommonData):
    kind: Literal['latents', 'images', 'synthetic'] = key(MISSING)
    """Content of the MDS dataset (its manifest must agree); `synthetic` makes random latents and needs no data."""
    resolution: int = key(MISSING, low=8, high=4096)
    """Side of the square training image, in pixels; with `aspect_buckets`, of the square that no bucket's area exceeds."""
    aspect_buckets: bool = key(False)
    """Train on rectangles: the streams are datasets of aspect-ratio buckets, and every batch is of one bucket of one stream."""
    encoders: OnlineEncoders | None = key(None)
    """With `kind: images`: other machines encode the images, a few batches ahead; null: each GPU encodes its own in its step."""
    caption_dropout: float = key(0.1, low=0, high=1 - 1e-9)
    """Share of captions (0..1) replaced by the empty one, drawn again each epoch; classifier-free guidance needs it."""


@dataclass
class BatchSizes:
    global_size: int = key(MISSING, 'Samples in one optimizer step, over all GPUs.', low=1, high=LARGEST_COUNT)
    micro_size: int | Literal['auto'] = key(MISSING, low=1, high=LARGEST_COUNT, may_change=True)
    """Samples in one forward and backward pass of one GPU; `auto` tries at the start which is the largest that fits, and stays there."""


@dataclass
class Ema:
    half_life: Duration | None = key(None, units=('ba',), low=1)
    """Batches (`6931ba`) after which half of the average is newer, at most 5 % of the batches so far; 6931ba: smoothing 0.9999. null: none."""
    sigma_rel: list[float] = key(list, low=0.01, high=LARGEST_SIGMA_REL)
    """Instead: widths of power-function averages as shares of the run (EDM2, arXiv 2312.02696), such as [0.05, 0.10]. The first is what is
    evaluated; from two, diffusion.export makes those of other widths afterwards. []: none."""
    start: Duration = key('0ba', units=('ba',), remedy='write batches, such as 10000ba (to have no average: ema.half_life=null)')
    """Batches (`10000ba`) after which averaging starts; nothing is allocated before. To have no average, set half_life to null."""
    interval: Duration = key('1ba', 'Batches between updates; the decay accounts for it.', units=('ba',), low=1)
    offload: bool = key(False, may_change=True)
    """Keep the average in the host's memory; saves 4 bytes a parameter on the GPU, and an update takes as long as copying the weights."""


@dataclass
class Train:
    duration: Duration = key(MISSING, units=('ba', 'ep'), low=1, may_change=True)  # unless the learning rate falls towards its end (load.py)
    """Length of the run in batches or epochs; a finished run can be made longer if `decay` is constant."""
    precision: Literal['amp_bf16', 'bf16', 'fp32'] = key('amp_bf16')
    """`amp_bf16`: fp32 weights, converted for each operation (autocast); `bf16`: fp32 master weights and a bf16 copy a step, norms in bf16 too."""
    compile: Literal['network', 'blocks'] | None = key(None, may_change=True)
    """`torch.compile` the whole `network`, or its `blocks` one by one (sooner done, and what sharding needs); null compiles nothing."""
    attention: Literal['auto', 'cudnn', 'flash', 'efficient', 'math'] = key('auto', may_change=True)
    """Kernel of scaled-dot-product attention; `auto` leaves it to PyTorch. Those in use are in environment.json."""
    cudnn_benchmark: bool = key(False, may_change=True)
    """Let cuDNN time its algorithms for each convolution in the first steps and keep the fastest. A resumed process may keep others, whose sums
    are rounded in another order: with it a resume is no longer equal to the bit. GPUs only."""
    checkpoint_activations: bool = key(False, may_change=True)
    """Compute each block's activations again in the backward pass: a third more arithmetic, a fraction of the memory."""
    sharding: Literal['ddp', 'zero2', 'hsdp'] = key('ddp', may_change=True)
    """`ddp`: all GPUs hold everything; `zero2`: gradients, master weights, Adam and EMA divided among them; `hsdp`: divided within each node."""
    vae_precision: Literal['bf16', 'fp32'] = key('bf16')
    """Arithmetic of the VAE with `data.kind: images`; fp32 is what data_prep.encode stores, and several times slower."""
    cpu_threads: int | None = key(None, low=1, high=1024, may_change=True)
    """Threads of PyTorch's CPU arithmetic where OMP_NUM_THREADS is not set; null leaves its own choice."""


@dataclass
class EarlyStop:
    metric: str | None = key(None, may_change=True)
    """Score that ends the run when it no longer improves, as the log names it: kid@random-conv, composition, or right_everything of shapes."""
    patience: int = key(5, 'Scores in a row, none better than the best before, that end the run.', low=1, high=10_000, may_change=True)


@dataclass
class EvalSamples:
    every: Duration | None = key(None, units=('ba',), low=1, may_change=True)
    """Interval of scores of drawn images, also those of the untrained model; null draws none."""
    count: int = key(256, 'Images drawn for each score, at least 16; compare scores of equal counts only.', low=4, high=100_000)  # rules.py
    prompts: list[str] = key(list)
    """The prompts, each drawn several times if `count` is larger; empty: captions of `count` evenly spaced samples of `eval.streams`."""
    metrics: list[str] = key(list)
    """Scores to compute, such as [clip, cmmd, kid], the names of diffusion.evaluate; METRIC@NETWORK takes the features of another network:
    kid@random-conv needs no weights, and is no published KID."""
    weights: str | None = key(None, may_change=True)
    """Folder with the weights of the feature networks; null: the local caches alone. Nothing is downloaded (docs/evaluation.md)."""
    guidance: float = key(3.0, 'Classifier-free guidance scale; 1 is none.', low=1, high=1000)
    steps: int = key(25, 'Sampling steps.', low=1, high=1000)
    seed: int = key(0, low=0, high=LARGEST_SEED)
    """With the number of the sample or prompt it keys the starting noise; the figures do not depend on the number of GPUs."""
    stop: EarlyStop = key(EarlyStop)


@dataclass
class CommonEval:
    every: Duration | None = key(None, 'Interval of evaluations; null evaluates never.', units=('ba', 'ep'), low=1, may_change=True)
    streams: dict[str, Stream | None] = key(dict, may_change=True, whole=True)
    """The evaluation data by name, instead of the base's; same kind and resolution as the training data."""
    batches: int | None = key(None, low=1, high=LARGEST_COUNT, may_change=True)
    """Batches of micro_size x GPUs per evaluation; null takes all of the data."""


@dataclass
class Eval(CommonEval):
    timesteps: int = key(10, low=1, high=1000, may_change=True)
    """Evenly spaced timesteps, one loss for each next to the mean; sample `id` is judged at the (id mod timesteps)-th."""
    samples: EvalSamples = key(EvalSamples)  # all that a score depends on stays: one curve is drawn over the scores of a run (load.py)


@dataclass
class Checkpoint:
    folder: str = key('${run_folder}/checkpoints', 'Local folder or object-store URL.')
    every: Duration = key('1800sec', units=('ba', 'sec'), low=1)
    """Interval in seconds or batches (an end-of-epoch checkpoint would replay its epoch)."""
    keep: int = key(3, 'Newest checkpoints kept, on a local disk and in object storage alike; -1 keeps all.', low=-1, high=LARGEST_COUNT)
    keep_every: Duration | None = key(None, units=('ba',), low=1)
    """Also keep for good the first checkpoint after every multiple of this, such as `50000ba`; null keeps none of the old ones."""
    allowed_misses: int = key(2, low=0, high=1000)
    """Checkpoints in a row that may fail to be written or uploaded (disk full, storage down) before the run stops."""


@dataclass
class Faults:
    non_finite: Literal['stop', 'skip', 'rollback'] = key('stop')
    """Response to NaN or infinite loss or gradients: end the run, leave the batch out, or go back a checkpoint and leave out the data since."""
    max_skipped: int = key(3, 'With `skip`: batches in a row that may be left out before the run stops.', low=1, high=1000)
    stall_sec: int = key(1800, low=1, high=7 * 86400)
    """Longest time without a finished step (or evaluation batch) before all stacks are written to `run_folder`/stalls and the run stops."""
    gpu_hours_between_failures: float = key(50000.0, low=1e-3, high=1e9)
    """Assumed, to propose an interval between checkpoints; Llama 3 had one in 50,700 GPU-hours, spot machines have one in tens."""


@dataclass
class Samples:
    every: Duration | None = key(None, 'Interval of sample grids, which also show the untrained model; null draws none.', units=('ba',), low=1)
    prompts: dict[str, str | None] = key(dict, whole=True)
    """The prompts by name, in the order of the grid, instead of the base's; null leaves one out."""
    guidance: float = key(7.5, 'Classifier-free guidance scale; 1 is none.', low=1, high=1000)
    steps: int = key(50, 'Sampling steps.', low=1, high=1000)
    seed: int = key(0, 'Seed of the fixed starting noise.', low=0, high=LARGEST_SEED)


@dataclass
class CommonLog:
    every: int = key(10, low=1, high=LARGEST_COUNT)
    """Batches between two records of `log.jsonl` and the other loggers, and between lines where there is no terminal."""
    to: list[str] = key(list)
    """Targets of metrics and sample grids besides log.jsonl: any of wandb, tensorboard, mlflow and comet, such as [wandb, tensorboard]. Where W&B
    does not answer within 60 s (or WANDB_INIT_TIMEOUT) the run logs offline and says how to upload that; without credentials it does not start."""
    project: str | None = key(None)
    """Project of those loggers (MLflow: experiment); tensorboard has none. WANDB_MODE=offline and MLFLOW_TRACKING_URI are honoured."""


@dataclass
class Log(CommonLog):
    samples: Samples = key(Samples)


@dataclass
class Cost:
    gpu: str | None = key(None, 'Priced hardware, such as `a100-40gb`; without a number below its price is the first in diffusion/cost/prices.yaml.')
    price_per_gpu_hour: float | None = key(None, low=0, high=1e6)
    """Dollars for one GPU (or machine, without a GPU) and hour; null takes the price of `gpu`, and reports no money if that is null too."""
    price_per_encoder_hour: float | None = key(None, low=0, high=1e6, may_change=True)
    """Dollars for one encoder of `data.encoders` and hour; null takes the price of the GPU that its `resource` names, times its `gpus`."""


@dataclass
class CommonRecipe:
    """Keys of every recipe, whatever it trains."""

    name: str = key(MISSING, 'Name of the run, its folder and its W&B run: letters, digits and . _ - alone.', may_change=True)
    seed: int = key(17, 'The one seed: initial weights, sample order, noise, timesteps, dropout.', low=0, high=LARGEST_SEED)
    run_folder: str = key('runs/${name}', 'Everything the run writes: recipe.yaml, log.jsonl, samples, checkpoints.', may_change=True)
    load_path: str | None = key(
        None, may_change=True, remedy='name the checkpoint of the phase before (or load_path=null to start from random weights)'
    )
    """First weights: a run folder or .pt file (its weights as trained), a diffusers folder, or OWNER/NAME@COMMIT on the Hub; null: random, or
    with an adapter the network of model.encoders.source."""
    batch: BatchSizes = key(BatchSizes)
    optimizer: Optimizer = key(Optimizer)
    ema: Ema = key(Ema)
    train: Train = key(Train)
    eval: CommonEval = key(CommonEval)
    checkpoint: Checkpoint = key(Checkpoint, may_change=True)
    faults: Faults = key(Faults, may_change=True)
    log: CommonLog = key(CommonLog, may_change=True)
    cost: Cost = key(Cost, may_change=True)


@fields_after('load_path')
@dataclass
class Recipe(CommonRecipe):
    """Trains a text-to-image network, or an adapter of one."""

    model: Model = key(Model)
    adapter: Adapter | None = key(None, 'Train an adapter of a frozen network instead of the network; null trains the network.')
    methods: Methods = key(Methods)
    data: Data = key(Data)
    eval: Eval = key(Eval)
    log: Log = key(Log, may_change=True)

    @property
    def trained_network(self) -> str:
        """Name of the configuration of what is trained."""
        return self.model.network
