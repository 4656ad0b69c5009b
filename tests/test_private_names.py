"""What the product uses of other packages without their promise: each name, where and for what. An upgrade that removes one fails here, by name.

Listed are names with a leading underscore, all of `streaming.base` (undocumented, whatever its names), and what classes of Composer's Trainer and of
Streaming have in common with ours: a method that we override there would silently never be called again once it has another name.
"""

import ast
import builtins
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from functools import cache

import pytest

from tests.conftest import REPOSITORY

# file of the product, owner, names, purpose
USED = [
    # Composer
    ('diffusion/checkpoints/completeness.py', 'composer.utils.checkpoint', '_torch_load_with_validation', 'replaced: it unpickles every checkpoint'),
    ('diffusion/checkpoints/completeness.py', 'composer.core.State', '_dataset_state_dict', 'what a checkpoint must hold of the datasets'),
    ('diffusion/training/trainer.py', 'composer.Trainer', '_iter_dataloader', 'overridden: no look at the device before each batch'),
    ('diffusion/training/trainer.py', 'composer.Trainer', '_train_batch', 'overridden: failpoint, batches left out, the loss stays on the device'),
    ('diffusion/training/trainer.py', 'composer.Trainer', '_train_microbatches', 'overridden: micro-batches count by their samples, gradients are sent once'),
    ('diffusion/training/trainer.py', 'composer.Trainer', '_train_microbatch _original_model', 'the forward and backward pass of one, and the model as it was given'),
    ('diffusion/training/trainer.py', 'composer.Trainer', '_use_closures', 'overridden: a closure fetches the loss before the step'),
    ('diffusion/training/trainer.py', 'composer.Trainer', '_accumulate_time_across_ranks', 'overridden: ranks agree on the host, on signals too'),
    ('diffusion/training/trainer.py', 'composer.Trainer', '_run_evaluators', 'overridden: none within the grace period'),
    ('diffusion/training/trainer.py', 'composer.Trainer', '_rng_state', 'restored where a streaming dataset resumes'),
    ('diffusion/training/trainer.py', 'composer.core.Engine', '_debug_log', 'replaced: it formats 170 texts a step that nobody reads'),
    ('diffusion/monitoring/loggers.py', 'composer.loggers.WandBLogger', '_enabled _init_kwargs _set_is_in_atexit', "init() is ours: Composer's asks offline runs for an address"),
    ('diffusion/monitoring/loggers.py', 'composer.loggers.TensorboardLogger', '_flush', 'overridden: it begins a new file each time'),
    # Streaming: shared memory and its numbers
    ('diffusion/datasets/strict.py', 'streaming.base.dataset', 'get_shm_prefix gettempdir', 'replaced while a dataset is made: its number, and where its locks lie'),
    ('diffusion/datasets/strict.py', 'streaming.base.constant', 'LOCALS SHM_TO_CLEAN', 'names of its segments'),
    ('diffusion/datasets/strict.py', 'streaming.base.shared', 'SharedMemory prefix._get_path prefix._pack_locals', 'the first segment, as Streaming makes it'),
    ('diffusion/datasets/strict.py', 'streaming.base.shared', 'SharedArray _get_path', 'a segment of ours beside them'),
    ('diffusion/datasets/strict.py', 'streaming.StreamingDataset', '_shm_prefix_int _cache_filelock_path', "the dataset's number and its lock"),
    # Streaming: epochs
    ('diffusion/datasets/strict.py', 'streaming.StreamingDataset', '_unique_rank_world _unique_worker_world', 'ranks of a run, and processes of a rank'),
    ('diffusion/datasets/strict.py', 'streaming.StreamingDataset', '_parallel_rank_world _parallel_worker_world', 'the same, which its plan of an epoch reads'),
    ('diffusion/datasets/strict.py', 'streaming.StreamingDataset', '_get_work _resume_incr_epoch', 'the samples of this process, and where the epoch begins'),
    ('diffusion/datasets/strict.py', 'streaming.StreamingDataset', 'length initial_physical_nodes', 'set: whole batches, and an order for any number of nodes'),
    ('diffusion/datasets/strict.py', 'streaming.StreamingDataset', 'load_state_dict state_dict', 'overridden: an epoch that is over is not served again'),
    ('diffusion/datasets/strict.py', 'streaming.StreamingDataset', 'resample_streams', 'overridden: which occurrence of a sample it is'),
    ('diffusion/datasets/strict.py', 'streaming.StreamingDataset', 'get_item', 'overridden: patience with evictions'),
    ('diffusion/datasets/mds.py', 'streaming.StreamingDataset', 'get_item', 'overridden: a sample becomes what training reads'),
    # Streaming: shards and their cache
    ('diffusion/datasets/strict.py', 'streaming.StreamingDataset', 'prepare_shard', 'overridden: errors arrive, none waits for ever'),
    ('diffusion/datasets/strict.py', 'streaming.StreamingDataset', '_shard_states _shard_access_times cache_usage _evict_coldest_shard', "the cache's books, kept as Streaming keeps them"),
    ('diffusion/datasets/strict.py', 'streaming.base.dataset', '_ShardState.REMOTE _ShardState.PREPARING _ShardState.LOCAL', 'their entries'),
    ('diffusion/datasets/open_shards.py', 'streaming.base.format.mds', 'MDSReader encodings._get_coder', 'a type; how a column is decoded, asked once a shard'),
    ('diffusion/datasets/strict.py', 'streaming.base', 'constant.TICK format.mds.MDSReader', 'a pause, and a type'),
    ('diffusion/datasets/verified.py', 'streaming.Stream', 'get_shards get_index_size set_up_local prepare_shard', 'overridden: a trusted index, compared shards, counted waits'),
    ('diffusion/datasets/verified.py', 'streaming.Stream', 'remote _downloader', 'set: none where the cache is the dataset; fetches a file, without retries'),
    ('diffusion/datasets/verified.py', 'streaming.base.format', 'FileInfo Reader mds.MDSReader get_index_basename', 'shards as an index names them'),
    ('diffusion/datasets/verified.py', 'streaming.base.hashing', 'get_hash', 'the hash that the writer took'),
    ('diffusion/datasets/shards.py', 'streaming.base.format.mds.reader', 'MDSReader.from_json', 'samples of one shard, for audit and encode'),
    ('data_prep/auditing/samples.py', 'streaming.base.format.mds.encodings', 'is_mds_encoding_safe', 'columns whose reading would run code'),
    # torch
    ('diffusion/datasets/watched.py', 'torch.utils.data.DataLoader', '_iterator', 'whether loader processes run already'),
    ('diffusion/datasets/watched.py', 'torch.utils.data.dataloader._MultiProcessingDataLoaderIter', '_worker_pids_set _worker_result_queue _workers', 'killed, without a second error'),
    ('diffusion/datasets/watched.py', 'torch.utils.data._utils.signal_handling', '_remove_worker_pids', 'the same'),
    ('diffusion/datasets/watched.py', 'multiprocessing.queues.Queue', '_writer', 'closed, or half a message would be waited for'),
    ('diffusion/training/trainer.py', 'torch.distributed.distributed_c10d', '_set_pg_timeout', "of the mesh's groups"),
    ('diffusion/training/machine.py', 'torch._dynamo', 'config.accumulated_recompile_limit config.optimize_ddp config.recompile_limit exc.TorchDynamoException', 'limits, and whose error it is'),
    ('benchmarks/timing.py', 'torch._dynamo', 'reset', 'each measurement compiles'),
    ('diffusion/training/ema.py', 'torch', '_foreach_lerp_', 'all tensors in one kernel'),
    ('diffusion/training/muon.py', 'torch', '_foreach_add _foreach_add_ _foreach_div_ _foreach_mul_', 'the same'),
    ('diffusion/families/registry.py', 'torch', '_fused_sdp_choice', 'the backend that attention would take'),
    ('diffusion/cost/hardware.py', 'torch._C', '_cuda_getArchFlags', 'what it was built for, without a GPU'),
    ('diffusion/families/unet.py', 'torch.nn.Conv2d', '_conv_forward', 'overridden: weights in channels_last'),
    ('diffusion/families/adapters.py', 'torch.nn.Module', '_parameters', 'replaced in place'),
    ('diffusion/families/counting/tracing.py', 'torch.nn.Module', '_parameters', 'replaced in place'),
    ('diffusion/families/counting/tracing.py', 'torch', '_subclasses.fake_tensor.FakeTensorMode utils._pytree.tree_map_only', 'a step without memory'),
    ('diffusion/families/counting/tracing.py', 'torch', 'utils._python_dispatch.TorchDispatchMode utils._pytree.tree_leaves UntypedStorage._cdata', 'its live tensors'),
    ('diffusion/autoencoding/planning.py', 'torch._subclasses.fake_tensor', 'FakeTensorMode', 'the same of an autoencoder'),
    # others
    ('diffusion/checkpoints/reading.py', 'numpy._core.multiarray', '_reconstruct', 'allowed in checkpoints: random states'),
    ('diffusion/checkpoints/exporting.py', 'diffusers.training_utils', '_collate_lora_metadata', "an adapter's alpha"),
    ('diffusion/families/unet.py', 'diffusers.Transformer2DModel', '_get_output_for_continuous_inputs', 'overridden: no copy'),
    ('diffusion/families/pipeline.py', 'diffusers.DiffusionPipeline', '_optional_components', 'parts that a pipeline may lack'),
    ('diffusion/families/unet.py', 'diffusers.DDIMScheduler', '_compatibles', 'schedulers that the family may name'),
    ('diffusion/serving/server.py', 'gradio.Blocks', '_queue', 'whether it is alive'),
    ('diffusion/common/ray_cluster.py', 'ray._private.services', 'canonicalize_bootstrap_address_or_die', 'the address, without a wait'),
    ('diffusion/common/ray_cluster.py', 'ray._private.authentication', 'authentication_token_setup', 'its logger: it advises against authentication'),
    ('diffusion/common/object_storage.py', 'google.auth', '_exponential_backoff', "draws from Python's generator: given one of its own"),
]  # fmt: skip
OURS = ('diffusion', 'data_prep', 'fleet', 'benchmarks', 'train')
NAMED_TUPLE = ('_replace', '_asdict', '_fields')  # public in spite of their underscore
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def is_private(name: str) -> bool:
    """Whether a dotted name needs a row: a part of it begins with an underscore, or Streaming documents nothing of it."""
    parts = [part for part in name.split('.') if part.startswith('_') and not part.endswith('__') and part != '_' and part not in NAMED_TUPLE]
    return bool(parts) or name.startswith('streaming.base')


def has(owner: object, name: str) -> bool:
    """Whether a class, or its instances by an assignment to `self`, has an attribute."""
    return hasattr(owner, name) or any(
        re.search(rf'\bself\.{name}\b[^=\n]*=|^    {name}:', source(base), re.MULTILINE) for base in getattr(owner, '__mro__', ())
    )


@cache
def source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # not written in Python
        return ''


def exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        owner, _, attribute = name.rpartition('.')
        return '.' in owner and exists(owner) and has(pkgutil.resolve_name(owner), attribute)
    return True


def defined(node: ast.AST) -> set[str]:
    """Names that a module or class gives a meaning: functions, classes, variables, attributes of self."""
    nodes = list(ast.walk(node))
    return (
        {one.name for one in nodes if isinstance(one, DEFINITION)}
        | {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        | stored(node)
    )


def stored(node: ast.AST) -> set[str]:
    return {
        one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == 'self'
    }


class Scan:
    """The private names in modules of ours, by file: whole dotted names where the source has them, else a dot and the attribute."""

    def __init__(self, sources: dict[str, str]):
        self.trees = {file: ast.parse(source) for file, source in sources.items()}
        self.imports = {file: dict(self._imports(tree)) for file, tree in self.trees.items()}
        self.classes = {
            f'{file.removesuffix(".py").replace("/", ".")}.{node.name}': (file, node)
            for file, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }

    @staticmethod
    def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
        """What names mean: the dotted names of what was imported."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from ((one.asname or one.name.partition('.')[0], one.name if one.asname else one.name.partition('.')[0]) for one in node.names)
                yield from ((f'import {one.name}', one.name) for one in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((one.asname or one.name, f'{node.module}.{one.name}') for one in node.names)

    def meaning(self, file: str, expression: ast.AST) -> str:
        """The dotted name of what an expression is; '' for what is not imported or defined in the file."""
        first, _, rest = ast.unparse(expression).partition('.')
        local = f'{file.removesuffix(".py").replace("/", ".")}.{first}'
        found = local if local in self.classes else self.imports[file].get(first, f'builtins.{first}' if hasattr(builtins, first) else '')
        return f'{found}.{rest}' if found and rest else found

    def bases(self, name: str) -> Iterator[str]:
        """The dotted names of a class's bases, and of theirs."""
        file, node = self.classes[name]
        for base in (self.meaning(file, getattr(one, 'value', one) if isinstance(one, ast.Subscript) else one) for one in node.bases):
            yield base
            base = next((known for known in self.classes if known.rpartition('.')[2] == base.rpartition('.')[2] and base.startswith(OURS)), base)
            if base in self.classes:
                yield from self.bases(base)

    def found(self) -> set[tuple[str, str]]:
        inherited, found = set(), set()  # attributes of self that are ours
        for name, (file, node) in self.classes.items():
            bases = list(self.bases(name))
            own = defined(node).union(*(defined(self.classes[base][1]) for base in bases if base in self.classes))
            members = {one.name for one in ast.walk(node) if isinstance(one, ast.FunctionDef)} | stored(node)
            for base in bases:
                if base.partition('.')[0] not in (*OURS, *sys.stdlib_module_names):  # '' of one that is made at run time: all may be its
                    listed = base == 'composer.Trainer' or base.startswith('streaming.')
                    candidates = {one for one in members if is_private(one) or (listed and not one.startswith('__'))}
                    found |= {(file, f'.{one}') for one in candidates if not base or has(pkgutil.resolve_name(base), one)}
            inherited |= {
                id(one)
                for one in ast.walk(node)
                if isinstance(one, ast.Attribute) and ast.unparse(one.value) in ('self', 'cls', 'super()') and one.attr in own
            }
        for file, tree in self.trees.items():
            known = defined(tree)
            names = set(self.imports[file].values())
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute):
                    meaning = self.meaning(file, node)
                    if re.fullmatch(r'[\w.]+', meaning):
                        names.add(meaning)
                    elif is_private(node.attr) and node.attr not in known and id(node) not in inherited:
                        found.add((file, f'.{node.attr}'))
                elif isinstance(node, ast.Constant) and re.fullmatch(r'[a-z]\w*(\.\w+)*\._\w+(\.\w+)*', str(node.value)):
                    names.add(node.value)
            private = {name for name in names if is_private(name) and name.partition('.')[0] not in (*OURS, *sys.stdlib_module_names)}
            found |= {(file, name) for name in private if not any(other.startswith(f'{name}.') for other in private)}
        return found


def product() -> dict[str, str]:
    paths = [REPOSITORY / 'train.py', *(path for folder in OURS for path in (REPOSITORY / folder).rglob('*.py'))]
    return {str(path.relative_to(REPOSITORY)): path.read_text() for path in paths}


@pytest.fixture(scope='module')
def found() -> set[tuple[str, str]]:
    return Scan(product()).found()


def test_every_private_name_that_we_use_is_listed_and_no_other(found):
    rows = {(file, f'{owner}.{name}') for file, owner, names, _ in USED for name in names.split()}
    listed = {(file, name if (file, name) in found else f'.{name.rpartition(".")[2]}') for file, name in rows}
    assert sorted(found - listed) == []  # used: give it a row, with its purpose, or do without it
    assert sorted(listed - found) == []  # used no more: its row can go


def test_each_is_there():
    assert [name for _, owner, names, _ in USED for name in (f'{owner}.{one}' for one in names.split()) if not exists(name)] == []
    for gone in (
        'composer.core.State._gone',
        'composer.utils.checkpoint._gone',
        'streaming.StreamingDataset._gone',
        'streaming.base.gone.A',
        'torch._gone',
    ):
        assert not exists(gone), gone


@pytest.mark.parametrize(
    ('source', 'name'),
    [
        ('from composer.utils.checkpoint import _load', 'composer.utils.checkpoint._load'),
        ('from streaming.base import shared\nshared.anything = 1', 'streaming.base.shared.anything'),
        ('import torch\ntorch._dynamo.config.x = 1', 'torch._dynamo.config.x'),
        ('import torch._inductor.x', 'torch._inductor.x'),
        ('from composer.utils import checkpoint as c\nc._x = c.y', 'composer.utils.checkpoint._x'),
        ('def f(state):\n    return state.a._x', '._x'),
        ('class A:\n    def f(self):\n        return self._x', '._x'),
        ('import composer\nclass A(composer.Trainer):\n    def _train_batch(self):\n        pass', '._train_batch'),
        ('import composer\nclass A(composer.Trainer):\n    def eval(self):\n        pass', '.eval'),
        ('from streaming import Stream\nclass A(Stream):\n    def f(self):\n        self.local = ""', '.local'),
        ('name = "ray._private.services"', 'ray._private.services'),
    ],
)  # fmt: skip
def test_the_scan_finds(source, name):
    assert ('a.py', name) in Scan({'a.py': source}).found()


def test_the_scan_passes_by_what_is_public_or_our_own():
    source = 'import os\nimport composer\nfrom diffusion import _x\nclass A(composer.Callback):\n    def _f(self):\n        self._y = os._exit, pair._replace(a=self._y)'
    assert Scan({'a.py': source}).found() == set()
