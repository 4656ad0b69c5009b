"""What tells an exported model from other folders, without torch."""

from pathlib import Path

from diffusion.contracts.errors import InputError

LORA_FOLDER = 'lora'  # of an exported adapter


def refuse_no_model(folder: Path) -> None:
    """Raises InputError: this is neither a model in the diffusers layout nor an exported adapter."""
    is_adapter = (folder / LORA_FOLDER).is_dir() and (folder / 'export.json').is_file()
    if not (is_adapter or (folder / 'model_index.json').is_file()):
        raise InputError(f'{folder}: no model_index.json; python -m diffusion.export CHECKPOINT OUT writes a model')
