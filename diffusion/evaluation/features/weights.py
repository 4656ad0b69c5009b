"""Weights of published networks: found in a local folder or a cache, compared with their digest, never unpickled, downloaded only on request."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusion.checkpoints.manifest import sha256_of
from diffusion.common.text import first_line
from diffusion.contracts.errors import EncoderError
from diffusion.encoders.pretrained import hub_problem

MODEL_FILES = ('model.safetensors', 'pytorch_model.bin')  # of a folder of transformers, the better one first
DESCRIPTIONS = ('*.json', '*.txt')  # configuration and tokenizer


@dataclass(frozen=True)
class WeightsSource:
    """Origin of a network's weights."""

    files: tuple[str, ...]  # below a folder of weights, the published one first (FOLDER/FILE if it is on the Hub); of transformers, the folder
    hub: str = ''  # repository on the Hub, if it is there
    url: str = ''  # of the file, if it is not on the Hub
    sha256: str = ''  # or the beginning of it; '' if none was published: the digest found is then part of the protocol
    size: str = ''  # in words

    @property
    def cached(self) -> list[Path]:
        """Places of the files in the folder in which torch-fidelity and torchmetrics keep their downloads; none of what is on the Hub."""
        return [Path(torch.hub.get_dir(), 'checkpoints', file) for file in self.files] if self.url else []


def find_file(name: str, source: WeightsSource, weights: Path | None, download: bool) -> Path:
    """Return the path of a network's single file: below `weights`, or in the cache of torch.hub or of the Hub.

    Args:
        name: of the network, for messages.
        download: get what is missing, into that cache.

    Raises:
        EncoderError: it is nowhere, with the places and commands; or it is another file than the digest says.
    """

    def of_hub(local_files_only: bool) -> Path:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(source.hub, Path(source.files[0]).name, local_files_only=local_files_only))

    below = [weights / file for file in source.files] if weights else []
    found = next((path for path in [*below, *source.cached] if path.is_file()), None) or _from_hub(of_hub, source, download)
    if found is None and download and source.url:
        found = source.cached[0]
        found.parent.mkdir(parents=True, exist_ok=True)
        _downloaded(name, source, lambda: torch.hub.download_url_to_file(source.url, str(found), source.sha256 or None, progress=False))
    if found is None:
        raise _missing(name, source, weights)
    digest = sha256_of(found) if source.sha256 else ''
    if not digest.startswith(source.sha256):
        raise EncoderError(
            f'{name}: {found} has the SHA-256 {digest}, expected {source.sha256}...: another network, or a damaged copy. '
            f'Delete it and download it again: {source.url or source.hub}'
        )
    return found


def find_folder(name: str, source: WeightsSource, weights: Path | None, download: bool) -> Path:
    """Return the folder of a network in the layout of transformers: below `weights`, or in the Hub's cache.

    Raises:
        EncoderError: it is nowhere, with the places and commands.
    """

    def of_hub(local_files_only: bool) -> Path | None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        for file in MODEL_FILES:
            folder = Path(snapshot_download(source.hub, allow_patterns=[*DESCRIPTIONS, file], local_files_only=local_files_only))
            if (folder / file).is_file():
                return folder
        if local_files_only:
            raise LocalEntryNotFoundError(f'{source.hub}: the cache holds no weights')
        return None

    below = [weights / file for file in source.files] if weights else []
    found = next((path for path in below if path.is_dir()), None) or _from_hub(of_hub, source, download)
    if found is None or not any((found / file).is_file() for file in MODEL_FILES):
        raise _missing(name, source, weights)
    return found


def folder_file(folder: Path) -> Path:
    """Return the file of weights that is read from such a folder."""
    return next(folder / file for file in MODEL_FILES if (folder / file).is_file())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, on the CPU: safetensors, or a pickle of tensors alone.

    Raises:
        EncoderError: it is damaged, or a pickle that would do more than build tensors.
    """
    try:
        if path.suffix == '.safetensors':
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:  # of safetensors, of zipfile, of the unpickler
        raise EncoderError(f'{path}: cannot be read as a file of weights: {first_line(error, with_type=True)}') from error


def _from_hub(find: Callable[..., Path | None], source: WeightsSource, download: bool) -> Path | None:
    if not source.hub:
        return None
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return find(local_files_only=True)
    except LocalEntryNotFoundError:
        return _downloaded(source.hub, source, lambda: find(local_files_only=False)) if download else None


def _downloaded(name: str, source: WeightsSource, work: Callable[[], Any]) -> Any:
    problem = hub_problem() if source.hub else ''
    try:
        return work()
    except Exception as error:  # of the network, of the Hub, of a digest that differs
        raise EncoderError(f'{name}: cannot be downloaded from {source.url or source.hub}: {problem or first_line(error, with_type=True)}') from error


def _missing(name: str, source: WeightsSource, weights: Path | None) -> EncoderError:
    places = [str(weights / file) for file in source.files] if weights else ['(no folder of weights was given)']
    if source.url:
        places.append(str(source.cached[0]))
        command = f'curl -L --create-dirs -o {weights or "WEIGHTS"}/{source.files[0]} {source.url}'
    else:
        places.append(f"the Hub's cache of {source.hub}")
        folder, _, file = source.files[0].partition('/')  # the one file, or what a folder needs and not the weights of other libraries
        wanted = file or ' '.join(f"--include '{pattern}'" for pattern in (*DESCRIPTIONS, *MODEL_FILES))
        command = f'hf download {source.hub} {wanted} --local-dir {weights or "WEIGHTS"}/{folder}'
    facts = ', '.join(part for part in (source.size, f'SHA-256 {source.sha256}...' if source.sha256 else '') if part)
    return EncoderError(
        f'{name}: its weights{f" ({facts})" if facts else ""} are in none of: {", ".join(places)}. '
        f'Get them with: {command}; or allow the download with --download'
    )
