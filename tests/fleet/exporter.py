"""Stands in for diffusion.export: python exporter.py [NAME] RUN OUT; NAME is a file that is written besides."""

import json
import sys
from pathlib import Path


def main():
    *more, run, out = sys.argv[1:]
    newest = sorted(Path(run, 'checkpoints').glob('ba*.pt'))[-1]
    (Path(out) / 'lora').mkdir(parents=True)
    (Path(out) / 'lora/weights.safetensors').write_bytes(newest.read_bytes())
    (Path(out) / 'export.json').write_text(json.dumps({'checkpoint': newest.name}))
    for name in more:
        (Path(out) / name).write_text('more')


if __name__ == '__main__':
    main()
