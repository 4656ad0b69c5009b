"""Stands in for diffusion.generate: python generator.py MODEL OUT options."""

import json
import sys
from pathlib import Path


def main():
    model, out, *options = sys.argv[1:]
    Path(out).mkdir()
    for i, prompt in enumerate(option.removeprefix('--prompt=') for option in options if option.startswith('--prompt=')):
        (Path(out) / f'{i:04d}.png').write_text(f'{prompt} {(Path(model) / "lora/weights.safetensors").read_text()[:15]}')
    (Path(out) / 'grid.png').write_text(json.dumps(options))


if __name__ == '__main__':
    main()
