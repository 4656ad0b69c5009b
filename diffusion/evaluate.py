"""Score a model: draw images from captions and compare them with real ones.

    python -m diffusion.evaluate MODEL --data DATASET --out OUT [--metrics fid,kid,cmmd,clip] [--samples 30000] [--guidance 1.5,3,5,7.5] [--steps 50]
    composer -n 8 diffusion/evaluate.py MODEL --data DATASET --out OUT ...       the same images and the same figures, on 8 GPUs
    python -m diffusion.evaluate --compare OUT OUT ... --page FILE      one page about several finished evaluations

MODEL is a folder that diffusion.export wrote (a model or an adapter), a run folder or a checkpoint (exported into OUT first, EMA weights), or
with --revision a model on the Hub that is in its local cache. DATASET is an image MDS on a disk or in object storage, a folder of images
with .txt captions, or a file of statistics (--save-statistics of an earlier evaluation, or an npz with mu and sigma).

The noise of an image depends on --seed and the id of its prompt alone. OUT gets evaluation.json with the figures and everything that they depend
on, samples, and the most similar pairs of drawn and known images. Run the same command again after a stop to resume.
"""

import argparse
import signal
import sys
from pathlib import Path

if sys.path[:1] == [str(Path(__file__).resolve().parent)]:  # started as a file: in front of all packages would be this project's rooms
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from data_prep.mds.command import exit_code
from diffusion.common.arguments import CommandParser, guidance_scale, image_side, names, positive_int, seed_number
from diffusion.common.processes import quick_imports
from diffusion.common.text import did_you_mean, print_page
from diffusion.evaluation.protocol import PRESETS
from diffusion.faults import preemption
from diffusion.recipe.catalog import METRICS

EXIT_CODES = """exit codes: 0 everything (of this rank) is done; 2 input or options are wrong and the message says how; 3 not finished, for a reason
outside (storage, a full disk), 130 stopped by Ctrl-C or SIGTERM: run the same command again to resume"""


def main() -> int:
    if '--compare' in sys.argv[1:]:
        return compare()
    parser = CommandParser('diffusion.evaluate', __doc__, epilog=EXIT_CODES)
    parser.add_argument('model', metavar='MODEL', help='exported folder or adapter, run folder, checkpoint, or OWNER/NAME on the Hub')
    parser.add_argument('--data', default='', metavar='DATASET', help='real images: MDS, folder, or file of statistics')
    parser.add_argument('--out', required=True, type=Path, metavar='OUT', help='folder for the result, new or begun by this command')
    parser.add_argument('--revision', metavar='COMMIT', help='of MODEL on the Hub')
    parser.add_argument('--base', metavar='FOLDER', help='where the model that an exported adapter belongs to is, if it has moved')

    subject = parser.add_argument_group('subject: CLIP-I, DINO and CLIP-T of a fine-tuned model, in place of --data')
    subject.add_argument('--subject', type=Path, metavar='PHOTOS', help='folder of photos; --prompts name the subject as {}')
    subject.add_argument('--word', default='', metavar='TEXT', help='what stands for {} in prompts: "sks dog"')
    subject.add_argument('--class-word', dest='kind', default='', metavar='TEXT', help='its class, for CLIP and the model before fine-tuning: dog')

    protocol = parser.add_argument_group('protocol: what the figures depend on')
    protocol.add_argument('--protocol', type=preset, metavar='NAME', help=f'a preset, which the other options change: {", ".join(PRESETS)}')
    protocol.add_argument('--metrics', type=names, metavar='NAME,...', help=f'{", ".join(METRICS)}; '
        'METRIC@NETWORK takes the features of another network, such as kid@random-conv (default: fid,kid,cmmd,clip)')  # fmt: skip
    protocol.add_argument('--samples', type=positive_int, metavar='N', help='images at each guidance scale (default: 30000, or all captions)')
    protocol.add_argument('--guidance', type=scales, metavar='SCALE,...', help='guidance scales, each scored (default: 1.5,3,5,7.5)')
    protocol.add_argument('--steps', type=positive_int, metavar='N', help='sampling steps (default: 50)')
    protocol.add_argument(
        '--sampler', metavar='CLASS', help="diffusers' scheduler, such as DDIMScheduler or, spaced otherwise, DDIMScheduler@leading"
    )
    protocol.add_argument('--resolution', type=image_side, metavar='PX', help="side of drawn and real images (default: the model's)")
    protocol.add_argument('--seed', type=seed_number, default=0, help='of noise, choice of captions and resampling (default %(default)s)')
    protocol.add_argument('--chunk', type=positive_int, default=16, metavar='N', help='images drawn together (default %(default)s)')
    protocol.add_argument('--precision', choices=('fp32', 'bf16'), help='of the denoiser (default: bf16 on a GPU, fp32 without one)')
    protocol.add_argument('--prompts', type=Path, metavar='FILE', help="a prompt a line, in place of the dataset's captions")

    parser.add_argument('--weights', type=Path, metavar='FOLDER', help="feature networks' weights (default: local caches); nothing is downloaded")
    parser.add_argument('--download', action='store_true', help="get feature networks' weights that are not on this machine")
    parser.add_argument('--training', metavar='DATASET', help='images among which neighbours of the drawn ones are looked for (default: DATASET)')
    parser.add_argument('--cache', type=Path, metavar='FOLDER', help='features of real images (default: .real_features next to OUT)')
    parser.add_argument('--plan', action='store_true', help='only say what it would take')
    parser.add_argument('--keep-images', action='store_true', help='keep all drawn images as MDS in OUT/images')
    parser.add_argument('--save-statistics', type=Path, metavar='FILE', help='statistics of the real images, to use as DATASET (.safetensors)')
    comparing = parser.add_argument_group('comparing finished evaluations, without MODEL and other options')  # read by `compare`
    comparing.add_argument('--compare', type=Path, nargs='+', metavar='OUT', help='folders with evaluation.json')
    comparing.add_argument('--page', type=Path, metavar='FILE', help='the page about them, one HTML file')
    args = parser.parse_args()
    if args.page is not None:
        parser.error('--page is where --compare OUT OUT ... writes; an evaluation writes its own page, OUT/evaluation.html')
    if not args.plan and bool(args.data) == (args.subject is not None):
        parser.error('name what to compare with: --data DATASET, or --subject PHOTOS')
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C
    return exit_code(str(args.out), lambda: run(args))


def compare() -> int:
    parser = CommandParser('diffusion.evaluate', 'Write one page about several finished evaluations.')
    parser.add_argument('--compare', required=True, type=Path, nargs='+', metavar='OUT', help='folders with evaluation.json')
    parser.add_argument('--page', required=True, type=Path, metavar='FILE', help='the page, one HTML file')
    args = parser.parse_args()

    def write() -> int:
        from diffusion.evaluation.page import write_page  # draws with Matplotlib

        write_page(args.compare, args.page)
        print(f'evaluate: {args.page}')
        return 0

    return exit_code(str(args.page), write)


def run(args: argparse.Namespace) -> int:
    with preemption.kept(), quick_imports():  # of torch, so after the arguments are read
        from diffusion.evaluation.evaluating import evaluate, launched
        from diffusion.evaluation.planning import plan_of, text_of
        from diffusion.evaluation.preparing import Request
        from diffusion.evaluation.results import PAGE_NAME, RESULT_NAME
        from diffusion.evaluation.table import table_of

    options = {name: value for name, value in vars(args).items() if name not in ('protocol', 'plan', 'compare', 'page')}
    request = Request(**options, preset=args.protocol)
    if request.changes:
        what = ', '.join(f'--{name}' for name in request.changes)
        print(f'evaluate: {what} differs from the preset {request.preset}; the result does not carry its name or targets', file=sys.stderr)
    if args.plan:
        print_page(text_of(plan_of(request)))
        return 0
    ranks, device = launched()
    found = evaluate(request, ranks, device)
    if found is None:
        print(f'{args.out}: rank {ranks.rank} has done its share; the last one to finish scores')
    else:
        print_page(f'{table_of(found)}\n{args.out / RESULT_NAME}, {args.out / PAGE_NAME}')
    return 0


def preset(given: str) -> str:
    """An argparse type: a name in PRESETS."""
    if given not in PRESETS:
        raise argparse.ArgumentTypeError(f'unknown preset {given}{did_you_mean(given, PRESETS)} Known: {", ".join(PRESETS)}')
    return given


def scales(given: str) -> tuple[float, ...]:
    """An argparse type: `1.5,3`."""
    return tuple(map(guidance_scale, names(given)))


if __name__ == '__main__':
    raise SystemExit(main())
