"""Which loss weights and which decay of the learning rate serve a short run with v prediction and zero terminal SNR?

    python -m benchmarks.objectives --out objectives.jsonl [--network mlp] [--seeds 3] [--batches 1000]

Trains on the demo's task by each variant from each seed, and lets the demo's judge look at images of the average: the
share with the right colours. The objective, the rates, the average and the sampler are those of training; the loop is a plain one, with all latents
in memory. The network is the demo's U-Net, or a perceptron that takes seconds a run. A variant and seed that FILE.jsonl has already is not trained
again, so a stopped run is continued by the same command. Data and encoders are made once, in `--demo`. Prints mean, standard deviation and range
over the seeds.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.measured import command
from diffusion.common.arguments import positive_int


def main() -> None:
    parser = command('objectives', __doc__)
    parser.add_argument('--demo', type=Path, default=Path('runs/objectives'), help='folder of data and encoders (default %(default)s)')
    parser.add_argument('--network', choices=('mlp', 'shapes'), default='mlp', help="the demo's U-Net, or a perceptron (default %(default)s)")
    parser.add_argument('--seeds', type=positive_int, default=3, help='default %(default)s')
    parser.add_argument('--batches', type=positive_int, default=1000, help='a run (default %(default)s)')
    parser.add_argument('--images', type=positive_int, default=256, help='judged, a run (default %(default)s)')
    parser.add_argument('--processes', type=positive_int, default=1, help='runs at a time (default %(default)s)')
    args = parser.parse_args()
    from benchmarks.measuring.objectives import run  # imports torch, so after the arguments are read

    run(args)


if __name__ == '__main__':
    main()
