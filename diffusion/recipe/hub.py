"""Names of models: a folder of this machine, or a repository on the Hugging Face Hub at a commit. No network."""

import re
from pathlib import Path


def neither_folder_nor_hub_id(source: str) -> str:
    """Return what is wrong with the name of a model; empty if it is a folder of this machine or has the form of a Hub id."""
    if Path(source).is_dir() or re.fullmatch(r'[\w.-]+/[\w.-]+', source):
        return ''
    return f"there is no folder '{source}', and a Hub id has the form owner/name"


def pins(revision: str | None) -> bool:
    """Whether a revision on the Hub is a commit, which no later upload changes."""
    return re.fullmatch(r'[0-9a-f]{40}', revision or '') is not None


def hub_source(load_path: str | None) -> tuple[str, str] | None:
    """Return (OWNER/NAME, COMMIT) of a model on the Hub, written OWNER/NAME@COMMIT; None for a file, folder or URL."""
    match = re.fullmatch(r'([\w.-]+/[\w.-]+)@([^/]*)', load_path or '')
    return None if match is None or Path(load_path or '').exists() else (match[1], match[2])
