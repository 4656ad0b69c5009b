"""Do the jobs of a queue on this machine, which may vanish at any time.

    python -m diffusion.fleet worker --server URL --token-file FILE --work DIR [--machine NAME] [--gpu KIND --gpu-gb N] [--idle-min 15] [--gpus 1]

Enrols with the token of a pool, then asks for a job, does it, and asks again. Needs no inbound network, no database and no key of a bucket.
Base models stay in DIR between jobs; everything else of a job is deleted when it has ended. SIGTERM saves and hands over the checkpoint first.

Exit codes: 0 left in order (no job for --idle-min, drained, replaced, asked to stop), 2 the service does not take the token, or PyTorch has no
kernels for the GPU; 76 three failures of this machine in a row, or no service: start it on another one.
"""

from collections.abc import Sequence
from pathlib import Path

from diffusion.common.arguments import CommandParser, positive_float, positive_int
from diffusion.common.text import print_message
from diffusion.contracts.errors import InputError, run_command


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser('diffusion.fleet worker', __doc__)
    parser.add_argument('--server', required=True, metavar='URL', help='the service, https://HOST')
    parser.add_argument('--token-file', type=Path, required=True, metavar='FILE', help="file with the pool's token")
    parser.add_argument(
        '--work', type=Path, required=True, metavar='DIR', help='folder of this machine: base models that stay, files of the running job'
    )
    parser.add_argument('--machine', metavar='NAME', help="name of this machine (default: the host's)")
    parser.add_argument('--gpu', metavar='KIND', help='kind of its GPUs, such as rtx-4090 (default: what nvidia-smi says; cpu)')
    parser.add_argument('--gpu-gb', type=float, metavar='N', help='memory of one GPU in GB (default: what nvidia-smi says; 0)')
    parser.add_argument('--image', default='', metavar='DIGEST', help='digest of the container image that this worker runs in')
    parser.add_argument('--gpus', type=positive_int, default=1, metavar='N', help='processes of a job, one a GPU (default %(default)s)')
    parser.add_argument(
        '--idle-min', type=positive_float, default=15.0, metavar='MINUTES', help='leave after this time without a job (default %(default)g)'
    )
    parser.add_argument('--keep-gb', type=positive_float, default=50.0, metavar='GB', help='base models kept for later jobs (default %(default)g)')
    parser.add_argument('--recipes', type=Path, metavar='DIR', help="folder of recipes (default: this installation's)")
    args = parser.parse_args(arguments)

    from diffusion.cost.hardware import refuse_gpu_apart
    from diffusion.fleet.attempts.attempt import Programs, write_log
    from diffusion.fleet.attempts.workplace import StopRequest
    from diffusion.fleet.jobs.checking import RECIPES
    from diffusion.fleet.worker.worker import FleetWorker, MachineFacts, WorkerOptions, gpu_of_driver, host_name

    def work() -> int:
        try:
            token = args.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f'--token-file: {args.token_file} cannot be read: {error}') from error
        if not token.isascii() or not token.isprintable() or not token:
            raise InputError(f'--token-file: {args.token_file} holds no token; the operator gets one with `fleet pools`')
        gpu, gpu_gb = gpu_of_driver() if args.gpu is None or args.gpu_gb is None else (args.gpu, args.gpu_gb)
        if gpu != 'cpu':
            refuse_gpu_apart()  # or every job would fail here, and be blamed for it
        machine = MachineFacts(
            name=args.machine or host_name(),
            gpu=args.gpu or gpu,
            gpu_gb=gpu_gb if args.gpu_gb is None else args.gpu_gb,
            num_gpus=args.gpus,
            image=args.image,
        )
        options = WorkerOptions(args.work, args.idle_min * 60, args.keep_gb, args.recipes or RECIPES)
        stop = StopRequest()
        with stop.on_signals():
            return FleetWorker(args.server, token, machine, options, Programs.here(args.gpus), stop, write_log).run()

    try:
        return run_command(work, out=args.work, remedy='name another --work')
    except OSError as error:
        print_message(f'{args.work}: {error}')
        return 2
