"""Composer as it is, with the smallest model and its own checkpoints: what the twins of the promises run."""

from pathlib import Path
from typing import Any

import composer
import torch
from composer.models import ComposerClassifier
from torch.utils.data import DataLoader, TensorDataset


def stock_trainer(folder: Path | str, batches: int, **more: Any) -> composer.Trainer:
    """Saves every second batch and resumes by itself, overwriting what a killed process left."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 64), torch.randint(0, 64, (32,)))
    model = torch.nn.Linear(64, 64)
    arguments: dict[str, Any] = {
        'save_folder': str(folder),
        'save_filename': 'ba{batch}-rank{rank}.pt',
        'save_interval': '2ba',
        'save_overwrite': True,
        'autoresume': True,
        'run_name': 'stock',
    }
    return composer.Trainer(
        model=ComposerClassifier(model, num_classes=64),
        train_dataloader=DataLoader(data, batch_size=4),
        max_duration=f'{batches}ba',
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        device='cpu',
        progress_bar=False,
        seed=1,
        **{**arguments, **more},
    )


def stock_fit(folder: Path | str, batches: int, **more: Any) -> composer.Trainer:
    trainer = stock_trainer(folder, batches, **more)
    trainer.fit()
    trainer.close()
    return trainer
