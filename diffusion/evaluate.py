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

import signal
import sys
from pathlib import Path

if sys.path[:1] == [str(Path(__file__).resolve().parent)]:  # started as a file: in front of all packages would be this project's rooms
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from data_prep.engines.command import exit_code
from diffusion.common.processes import quick_imports
from diffusion.common.text import print_page
from diffusion.evaluation.job.request import PRESETS, ComparisonRequest, EvaluationRequest
from diffusion.faults import preemption

EXIT_CODES = """exit codes: 0 everything (of this rank) is done; 2 input or options are wrong and the message says how; 3 not finished, for a reason
outside (storage, a full disk), 130 stopped by Ctrl-C or SIGTERM: run the same command again to resume"""


def main() -> int:
    if '--compare' in sys.argv[1:]:
        comparison = ComparisonRequest.parse('diffusion.evaluate', 'Write one page about several finished evaluations.')
        return exit_code(str(comparison.page), lambda: compare(comparison))
    request = EvaluationRequest.parse('diffusion.evaluate', __doc__, EXIT_CODES)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C
    return exit_code(str(request.out), lambda: run(request))


def compare(comparison: ComparisonRequest) -> int:
    from diffusion.evaluation.pages.page import write_page  # draws with Matplotlib

    write_page(comparison.compare, comparison.page)
    print(f'evaluate: {comparison.page}')
    return 0


def run(request: EvaluationRequest) -> int:
    with preemption.kept(), quick_imports():  # of torch, so after the arguments are read
        from diffusion.evaluation.job.evaluating import evaluate, launched
        from diffusion.evaluation.job.planning import plan
        from diffusion.evaluation.job.results import PAGE_NAME, RESULT_NAME
        from diffusion.evaluation.pages.page import table_of, write_page

    if request.protocol is not None:
        print(f'evaluate: {request.protocol}: {PRESETS[request.protocol].source}', file=sys.stderr)
    if request.changes:
        what = ', '.join(f'--{name}' for name in request.changes)
        print(f'evaluate: {what} differs from the preset {request.protocol}; the result does not carry its name or targets', file=sys.stderr)
    if request.plan:
        print_page(plan(request))
        return 0
    ranks, device = launched()
    if evaluate(request, ranks, device) is None:
        print(f'{request.out}: rank {ranks.rank} has done its share; the last one to finish scores')
    else:
        write_page([request.out], request.out / PAGE_NAME)
        print_page(f'{table_of(request.out)}\n{request.out / RESULT_NAME}, {request.out / PAGE_NAME}')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
