"""Job as an owner submits it: one YAML file a job, or one line of JSON each. Unknown keys are refused, and all mistakes are reported at once.

`python -m fleet submit --keys` prints the keys with the texts below.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diffusion.common.command_line import LARGEST_SEED
from diffusion.contracts.errors import InputError
from diffusion.recipe.keys import MISSING, key
from diffusion.recipe.merging import merge
from diffusion.recipe.reading import file_layers
from diffusion.recipe.schema import LARGEST_COUNT

NAME_CHARS = 64
NAME = re.compile(rf'[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARS - 1}}}')
SHA256 = re.compile(r'[0-9a-f]{64}')
LARGEST_INPUT_BYTES = 5 << 30  # of one PUT to object storage
MAX_PROMPTS, MAX_PROMPT_CHARS = 64, 4096
MAX_VALUES = 1000  # of a whole job: texts, numbers, lists and mappings, each of which is looked at several times
MAX_IMAGE_CHARS, MAX_WEBHOOK_CHARS = 200, 2000
# What an adapter or a model in the diffusers layout consists of, and images: nothing that is unpickled.
RESULT_SUFFIXES = ('.safetensors', '.json', '.jsonl', '.yaml', '.md', '.txt', '.model', '.png')


class JobError(InputError):
    """All mistakes in a job, one line each in `errors`."""

    def __init__(self, source: str, errors: list[str]):
        self.source, self.errors = source, errors
        super().__init__('\n'.join(f'{source}: {error}' for error in errors))


@dataclass
class JobInput:
    url: str = key(
        MISSING,
        "Where it is: a tar or zip archive of a folder, or one file; for `fleet run` also a path from the folder of the job's file; a "
        'folder has neither sha256 nor bytes.',
    )
    sha256: str = key(MISSING, 'Digest of its bytes, 64 hex digits: what arrives otherwise is refused.')
    bytes: int = key(MISSING, 'Its size.', low=0, high=LARGEST_INPUT_BYTES)


@dataclass
class MachineNeeds:
    """Which machines may take a job."""

    gpu_gb: float = key(0.0, 'Memory of one GPU, at least, in GB.', low=0, high=10_000)
    image: str | None = key(None, 'Digest of the container image that the worker must run in; null takes any.')
    trusted: bool = key(False, 'Only machines of pools that the operator trusts: others may belong to strangers, who can see the images.')


@dataclass
class JobLimits:
    """When a job is given up. Hours and dollars are those of all its attempts together."""

    attempts: int = key(3, 'Failures that count against the job, on machines that have finished others.', low=1, high=100)
    losses: int = key(20, 'Machines that vanished with it.', low=1, high=10_000)
    hours: float = key(6.0, 'Hours on machines.', low=0.01, high=10_000)
    dollars: float = key(1.0, 'Dollars for machines.', low=0.0001, high=1_000_000)


@dataclass
class JobNotice:
    webhook: str | None = key(None, 'Address (https) that is told when the job has ended, with a signature.')


@dataclass
class JobValidation:
    prompts: list[str] = key(list, 'Drawn with the result: in a queue as a job of its own, with `fleet run` into images/ of the result.')
    seed: int = key(0, 'Image i starts from the noise of seed + i.', low=0, high=LARGEST_SEED)
    guidance: float | None = key(None, "Classifier-free guidance scale; null takes the recipe's.", low=1, high=1000)
    steps: int | None = key(None, "Sampling steps; null takes the recipe's.", low=1, high=1000)


@dataclass
class JobSpec:
    recipe: str = key(MISSING, "Name of a recipe of the worker's image, such as `yamls/dreambooth-sdxl-lora.yaml`.")
    name: str | None = key(None, 'What its owner calls it: letters, digits and . _ -')
    group: str | None = key(None, 'Jobs of one owner and group are compared on one page; a name likewise. `submit --grid` sets it.')
    overrides: dict[str, Any] = key(dict, 'Changes to the recipe by key, such as `train.duration: 1000ba`; a list of keys is allowed.')
    inputs: dict[str, JobInput] = key(
        dict, 'Archives by name. The name of a stream of the recipe that has `photos` is their folder; `base` is the model in the diffusers layout.'
    )
    needs: MachineNeeds = key(MachineNeeds)
    limits: JobLimits = key(JobLimits)
    priority: int = key(0, 'Among the jobs of its owner: larger ones first.', low=-LARGEST_COUNT, high=LARGEST_COUNT)
    notify: JobNotice = key(JobNotice)
    validation: JobValidation = key(JobValidation)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def load_spec(path: Path) -> JobSpec:
    """Read a job for this machine from a YAML file; paths of inputs count from the file's folder.

    Raises:
        JobError: with every mistake.
    """
    errors: list[str] = []
    content = dict(overlaid_layers(file_layers(path, errors)))
    if isinstance(content.get('inputs'), Mapping):
        content['inputs'] = located_inputs(content['inputs'], path.parent, errors)
    if errors:
        raise JobError(str(path), errors)
    return spec_of(content, str(path))


def overlaid_layers(layers: list[tuple[str, dict[Any, Any]]]) -> Mapping[str, Any]:
    """A job has one file: what `base:` would bring is refused like any unknown key."""
    return layers[-1][1] if len(layers) == 1 else {**(layers[-1][1] if layers else {}), 'base': 'another file'}


def spec_of(content: Mapping[str, Any], source: str) -> JobSpec:
    """Check what a job says by itself, without its recipe (`checking.py` does).

    Args:
        content: of the file or of a line of JSON.
        source: of the content, for messages.

    Raises:
        JobError: with every mistake.
    """
    if num_values(content, MAX_VALUES) > MAX_VALUES:
        raise JobError(source, [f'more than {MAX_VALUES:,} keys and values; leave prompts out, or divide it into several jobs'])
    errors: list[str] = []
    spec: JobSpec = merge(JobSpec, [(source, dict(content))], errors)
    if errors:
        raise JobError(source, errors)
    errors = list(_mistakes(spec))
    if errors:
        raise JobError(source, errors)
    return spec


def num_values(content: object, enough: int) -> int:
    """Count the values in JSON or YAML, mappings and lists too; beyond `enough` it stops."""
    left, num = [content], 0
    while left and num <= enough:
        value = left.pop()
        num += 1
        if isinstance(value, list | tuple):
            left += value[: enough + 1]
        elif isinstance(value, Mapping):
            left += value.values()
    return num


def _mistakes(spec: JobSpec) -> list[str]:
    found = []
    if spec.name is not None and not NAME.fullmatch(spec.name):
        found.append(f'name: {spec.name[:80]!r} may have letters, digits and . _ - alone, 64 at most')
    if spec.group is not None and not NAME.fullmatch(spec.group):
        found.append(f'group: {spec.group[:80]!r} may have letters, digits and . _ - alone, 64 at most')
    for name, given in spec.inputs.items():
        if not NAME.fullmatch(name):
            found.append(f'inputs: the name {name[:80]!r} may have letters, digits and . _ - alone')
        if not SHA256.fullmatch(given.sha256):
            found.append(f'inputs.{name}.sha256: {given.sha256[:80]!r} is not 64 hex digits in lower case; sha256sum FILE prints them')
    if spec.notify.webhook is not None and not spec.notify.webhook.startswith(('https://', 'http://')):
        found.append(f'notify.webhook: {spec.notify.webhook[:80]!r} must begin with https://, or with http:// where the service allows that')
    elif spec.notify.webhook is not None and not _has_host(spec.notify.webhook):
        found.append(f'notify.webhook: {spec.notify.webhook[:80]!r} is no address; write https://HOST/PATH, with a port from 1 to 65535 if any')
    if len(spec.notify.webhook or '') > MAX_WEBHOOK_CHARS or not re.fullmatch('[!-~]*', spec.notify.webhook or ''):
        found.append(f'notify.webhook: at most {MAX_WEBHOOK_CHARS:,} characters of ASCII are wanted, without blanks; write others as %XX')
    if len(spec.needs.image or '') > MAX_IMAGE_CHARS:
        found.append(f'needs.image: {len(spec.needs.image or "")} characters, at most {MAX_IMAGE_CHARS}')
    if len(spec.validation.prompts) > MAX_PROMPTS:
        found.append(f'validation.prompts: {len(spec.validation.prompts)} prompts, at most {MAX_PROMPTS}')
    if any(len(prompt) > MAX_PROMPT_CHARS for prompt in spec.validation.prompts):
        found.append(f'validation.prompts: a prompt has at most {MAX_PROMPT_CHARS:,} characters')
    if '\\u0000' in json.dumps(asdict(spec), ensure_ascii=False):
        found.append('a text holds a NUL, which no database takes')
    found += [
        f'overrides.{name}: a value or a list of values is wanted, not a mapping'
        for name, value in spec.overrides.items() if isinstance(value, dict)
    ]  # fmt: skip
    return found


# Inputs that are paths of the owner's machine: what `submit` uploads, and `fleet run` takes as they are.


def path_of_input(given: object, folder: Path) -> Path | None:
    """The path that an input names, alone or as `{path: ...}`; None: it is said otherwise.

    Args:
        given: what the job says of the input.
        folder: of the job's file, from which paths count.
    """
    path = given.get('path') if isinstance(given, Mapping) and set(given) == {'path'} else given
    return folder / Path(path).expanduser() if isinstance(path, str) else None


def located_inputs(inputs: Mapping[Any, Any], folder: Path, errors: list[str]) -> dict[Any, Any]:
    """The inputs of a job for this machine: paths, also as `url`, become whole ones, with the digest of what is there. Of a folder it is that of its
    files' names and sizes.

    Args:
        folder: of the job's file.
        errors: gets a line for each path that cannot be used.
    """
    located = dict(inputs)
    for name, given in inputs.items():
        path = path_of_input(given, folder)
        url = given.get('url') if isinstance(given, Mapping) else None
        if path is None and isinstance(url, str) and '://' not in url:
            path = path_of_input(url, folder)
        if path is None:
            continue
        path = path.absolute()
        digests = [key for key in ('sha256', 'bytes') if isinstance(given, Mapping) and key in given]
        if path.is_dir() and digests:
            errors.append(f'inputs.{name}: {path} is a folder, and {" and ".join(digests)} belong to one file; leave them out, or name an archive')
        elif digests:
            located[name] = {**given, 'url': str(path)}
        elif path.is_dir():
            located[name] = {'url': str(path), 'sha256': _digest_of_names(path), 'bytes': 0}
        elif path.is_file():
            with path.open('rb') as file:
                located[name] = {'url': str(path), 'sha256': hashlib.file_digest(file, 'sha256').hexdigest(), 'bytes': path.stat().st_size}
        else:
            errors.append(f"inputs.{name}: {path} is not there; paths count from the folder of the job's file")
    return located


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # brackets that do not close, a port that is none
        return False


def _digest_of_names(folder: Path) -> str:
    files = sorted((path.relative_to(folder).as_posix(), path.stat().st_size) for path in folder.rglob('*') if path.is_file())
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()
