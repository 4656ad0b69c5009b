"""The service of a fleet, in front of PostgreSQL and object storage.

    python -m diffusion.fleet server --bucket s3://BUCKET/FOLDER [--host 127.0.0.1] [--port 8080] [--database-file FILE]

The database is that of FLEET_DATABASE_URL; credentials of the bucket are boto3's, S3_ENDPOINT_URL names another server than AWS. Several may run
at once. It speaks HTTP: put a proxy with TLS before it where others than this machine connect.
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from data_prep.crawling.addresses import network
from diffusion.common.arguments import CommandParser, positive_float
from diffusion.common.text import counted, print_message
from diffusion.contracts.errors import InputError, run_command

LOOPBACK = '127.0.0.1'


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser('diffusion.fleet server', __doc__)
    parser.add_argument('--bucket', required=True, metavar='URL', help='where inputs, checkpoints and results are: s3://BUCKET/FOLDER')
    parser.add_argument('--host', default=LOOPBACK, help='address to listen at (default %(default)s)')
    parser.add_argument('--port', type=int, default=8080, help='0 takes a free one and prints it (default %(default)s)')
    parser.add_argument('--recipes', type=Path, metavar='FOLDER', help='recipes that jobs may name (default: yamls of this installation)')
    parser.add_argument('--database-file', type=Path, metavar='FILE', help='that holds the URL of the database, in place of FLEET_DATABASE_URL')
    parser.add_argument(
        '--lease-sec', type=positive_float, default=120, help='silence after which a job is given to another machine (default %(default)s)'
    )
    parser.add_argument('--renew-sec', type=positive_float, default=30, help='between two signs of life of a machine (default %(default)s)')
    parser.add_argument('--poll-sec', type=positive_float, default=15, help='between two questions of an idle machine (default %(default)s)')
    parser.add_argument('--grace-sec', type=positive_float, default=60, help='that training may outlast its lease (default %(default)s)')
    parser.add_argument(
        '--allow-notices-to', type=network, action='append', default=[], metavar='NETWORK',
        help='tell servers of this network of ended jobs as well, also by http; repeatable',
    )  # fmt: skip
    args = parser.parse_args(arguments)

    def work() -> None:
        if not 2 * args.renew_sec < args.lease_sec:
            raise InputError(f'--renew-sec {args.renew_sec:g}: a lease of {args.lease_sec:g} s must outlast two of them; make it shorter')
        import uvicorn

        from diffusion.fleet.jobs.checking import RECIPES
        from diffusion.fleet.queue.database import VERSION, Database, check_bucket, connected, database_url, upgrade
        from diffusion.fleet.queue.leases import LeaseSettings
        from diffusion.fleet.service.app import create_app
        from diffusion.fleet.service.bucket import Bucket, StorageAway
        from diffusion.fleet.service.gate import FleetService

        recipes = RECIPES if args.recipes is None else args.recipes
        num_recipes = len(list(recipes.glob('*.yaml')))
        if not num_recipes:
            raise InputError(f'--recipes {recipes}: there is no recipe (*.yaml) in it; name the folder that holds them')
        url, bucket = database_url(args.database_file), Bucket(args.bucket)
        with connected(url) as connection:
            if (found := upgrade(connection)) != VERSION:
                print_message(f'the schema of the database had version {found} and has {VERSION} now')
            check_bucket(connection, bucket.url)
        try:
            bucket.check()
            if not bucket.checks_digests:
                print_message(
                    f'--bucket {bucket.url}: takes other bytes than were signed; the service reads every result and checkpoint to compare them'
                )
        except StorageAway as error:  # may be back before the first request needs it
            print_message(f'--bucket {bucket.url}: does not answer ({error}); the fleet starts all the same')
        settings = LeaseSettings(args.lease_sec, args.renew_sec, args.poll_sec, args.grace_sec)
        app = create_app(FleetService(Database(url), bucket, recipes, settings, notices_to=tuple(args.allow_notices_to)))
        # Its own log would hold a line a request; errors are printed.
        config = uvicorn.Config(
            app, args.host, args.port, log_level='warning', access_log=False, server_header=False, timeout_graceful_shutdown=10, lifespan='on'
        )
        try:
            socket = config.bind_socket()
        except SystemExit:
            raise InputError(f'--port {args.port}: another process listens there, or {args.host} is no address of this machine') from None
        socket.listen(1024)  # who reads the next line may connect at once
        print(f'the fleet listens at http://{args.host}:{socket.getsockname()[1]}', flush=True)
        print(f'{counted(num_recipes, "recipe")} in {recipes.absolute()}', flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again once all requests are answered
        uvicorn.Server(config).run(sockets=[socket])

    return run_command(work)
