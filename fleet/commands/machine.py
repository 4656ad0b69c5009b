"""Commands that run on machines: the database's schema, the service, a worker, one job without a queue."""

import secrets
import signal
import sys
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from diffusion.common.command_line import option, positional
from diffusion.common.text import counted, print_message
from diffusion.contracts.errors import BAD_INPUT, CRASH, STALLED, InputError, run_command, train_code
from fleet.commands import Command

LOOPBACK = '127.0.0.1'


def _checked_network(text: str) -> str:
    from data_prep.crawling.addresses import network

    network(text)
    return text


Network = Annotated[str, AfterValidator(_checked_network)]


class InitCommand(Command):
    """Create a fleet in an empty PostgreSQL database, and its first operator.

        FLEET_DATABASE_URL=postgresql://USER:PASSWORD@HOST/NAME python -m fleet init [--operator NAME] [--database-file FILE]

    Prints the operator's token, and the key that signs its notices, once. Everything else is done with it, through the service.
    """

    operator: str = option('operator', 'its name', 'NAME')
    database_file: Path | None = option(None, 'that holds the URL of the database, in place of FLEET_DATABASE_URL', 'FILE')

    def run(self) -> None:
        from fleet.queue.database import connected, create, database_url, new_token
        from fleet.service.gate import digest

        url = database_url(self.database_file)
        create(url)
        token, notice_key = new_token('owner'), secrets.token_bytes(32)
        with connected(url) as connection:
            connection.execute(
                'insert into owner (name, token_hash, is_operator, notice_key) values (%s, %s, true, %s)', [self.operator, digest(token), notice_key]
            )
        print(f'token of {self.operator}, shown once: {token}')
        print(f'key of its notices, shown once: {notice_key.hex()}')


class ServerCommand(Command):
    """Answer machines, owners and operators: the service, in front of PostgreSQL and object storage.

        python -m fleet server --bucket s3://BUCKET/FOLDER [--host 127.0.0.1] [--port 8080] [--database-file FILE]

    The database is that of FLEET_DATABASE_URL; credentials of the bucket are boto3's, S3_ENDPOINT_URL names another server than AWS. Several may run
    at once. It speaks HTTP: put a proxy with TLS before it where others than this machine connect.
    """

    bucket: str = option(..., 'where inputs, checkpoints and results are: s3://BUCKET/FOLDER', 'URL')
    host: str = option(LOOPBACK, 'address to listen at')
    port: NonNegativeInt = option(8080, '0 takes a free one and prints it')
    recipes: Path | None = option(None, 'recipes that jobs may name (default: yamls of this installation)', 'FOLDER')
    database_file: Path | None = option(None, 'that holds the URL of the database, in place of FLEET_DATABASE_URL', 'FILE')
    lease_sec: PositiveFloat = option(120.0, 'silence after which a job is given to another machine')
    renew_sec: PositiveFloat = option(30.0, 'between two signs of life of a machine')
    poll_sec: PositiveFloat = option(15.0, 'between two questions of an idle machine')
    grace_sec: PositiveFloat = option(60.0, 'that training may outlast its lease')
    allow_notices_to: list[Network] = option([], 'tell servers of this network of ended jobs as well, also by http; repeatable', 'NETWORK')

    def run(self) -> None:
        if not 2 * self.renew_sec < self.lease_sec:
            raise InputError(f'--renew-sec {self.renew_sec:g}: a lease of {self.lease_sec:g} s must outlast two of them; make it shorter')
        import uvicorn

        from data_prep.crawling.addresses import network
        from fleet.jobs.checking import RECIPES
        from fleet.queue.database import VERSION, Database, check_bucket, connected, database_url, upgrade
        from fleet.queue.leases import LeaseSettings
        from fleet.service.app import create_app
        from fleet.service.bucket import Bucket, StorageAway
        from fleet.service.gate import FleetService

        recipes = self.recipes or RECIPES
        num_recipes = len(list(recipes.glob('*.yaml')))
        if not num_recipes:
            raise InputError(f'--recipes {recipes}: there is no recipe (*.yaml) in it; name the folder that holds them')
        url, bucket = database_url(self.database_file), Bucket(self.bucket)
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
        settings = LeaseSettings(self.lease_sec, self.renew_sec, self.poll_sec, self.grace_sec)
        notices_to = tuple(map(network, self.allow_notices_to))
        app = create_app(FleetService(Database(url), bucket, recipes, settings, notices_to=notices_to))
        # Its own log would hold a line a request; errors are printed.
        config = uvicorn.Config(
            app, self.host, self.port, log_level='warning', access_log=False, server_header=False, timeout_graceful_shutdown=10, lifespan='on'
        )
        try:
            socket = config.bind_socket()
        except SystemExit:
            raise InputError(f'--port {self.port}: another process listens there, or {self.host} is no address of this machine') from None
        socket.listen(1024)  # who reads the next line may connect at once
        print(f'the fleet listens at http://{self.host}:{socket.getsockname()[1]}', flush=True)
        print(f'{counted(num_recipes, "recipe")} in {recipes.absolute()}', flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again once all requests are answered
        uvicorn.Server(config).run(sockets=[socket])


class WorkerCommand(Command):
    """Do the jobs of a queue on this machine, which may vanish at any time.

        python -m fleet worker --server URL --token-file FILE --work DIR [--machine NAME] [--gpu KIND --gpu-gb N] [--idle-min 15] [--gpus 1]

    Enrols with the token of a pool, then asks for a job, does it, and asks again. Needs no inbound network, no database and no key of a bucket.
    Base models stay in DIR between jobs, and so does the machine's last token, with which it enrols again; everything else of a job is deleted when
    it has ended. SIGTERM saves and hands over the checkpoint first.

    Exit codes: 0 left in order (no job for --idle-min, drained, replaced, asked to stop), 2 the service does not take the token, or PyTorch has no
    kernels for the GPU; 76 three failures of this machine in a row, or no service: start it on another one.
    """

    server: str = option(..., 'the service, https://HOST', 'URL')
    token_file: Path = option(..., "file with the pool's token, or one of this machine alone", 'FILE')
    work: Path = option(..., 'folder of this machine: base models that stay, files of the running job', 'DIR')
    machine: str | None = option(None, "name of this machine (default: the host's)", 'NAME')
    gpu: str | None = option(None, 'kind of its GPUs, such as rtx-4090 (default: what nvidia-smi says; cpu)', 'KIND')
    gpu_gb: NonNegativeFloat | None = option(None, 'memory of one GPU in GB (default: what nvidia-smi says; 0)', 'N')
    image: str = option('', 'digest of the container image that this worker runs in', 'DIGEST')
    gpus: PositiveInt = option(1, 'processes of a job, one a GPU', 'N')
    idle_min: PositiveFloat = option(15.0, 'leave after this time without a job', 'MINUTES')
    keep_gb: PositiveFloat = option(50.0, 'base models kept for later jobs', 'GB')
    recipes: Path | None = option(None, "folder of recipes (default: this installation's)", 'DIR')

    def run(self) -> int:
        from diffusion.cost.hardware import refuse_gpu_apart
        from fleet.attempts.attempt import Programs, write_log
        from fleet.attempts.workplace import StopRequest
        from fleet.jobs.checking import RECIPES
        from fleet.worker.worker import FleetWorker, MachineFacts, gpu_of_driver, host_name

        try:
            token = self.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f'--token-file: {self.token_file} cannot be read: {error}') from error
        if not token.isascii() or not token.isprintable() or not token:
            raise InputError(f'--token-file: {self.token_file} holds no token; the operator gets one with `fleet pools`')
        gpu, gpu_gb = gpu_of_driver() if self.gpu is None or self.gpu_gb is None else (self.gpu, self.gpu_gb)
        if gpu != 'cpu':
            refuse_gpu_apart()  # or every job would fail here, and be blamed for it
        machine = MachineFacts(
            name=self.machine or host_name(),
            gpu=self.gpu or gpu,
            gpu_gb=gpu_gb if self.gpu_gb is None else self.gpu_gb,
            num_gpus=self.gpus,
            image=self.image,
        )
        programs, stop = Programs.here(self.gpus), StopRequest()
        with stop.on_signals():
            return FleetWorker(
                self.server, token, machine, self.work, programs, stop, write_log, self.idle_min * 60, self.keep_gb, self.recipes or RECIPES
            ).run()

    def end(self) -> int:
        try:
            return run_command(self.run, out=self.work, remedy='name another --work')
        except OSError as error:
            print_message(f'{self.work}: {error}')
            return BAD_INPUT


class RunCommand(Command):
    """Do one job on this machine: the whole of a worker without a queue, for Kubernetes, Slurm, SkyPilot or a terminal.

        python -m fleet run JOB.yaml --work DIR --outputs URL-or-folder [--gpus N] [--epoch N]

    JOB.yaml is what `submit` takes. Inputs may be folders or files of this machine, by their paths from the folder of JOB.yaml:
    `inputs: {subject: photos/timber}`; an address (`url`) has `sha256` and `bytes` besides, a folder has neither. `submit --keys` prints all keys.

    Fetches the job's inputs, resumes from the newest published checkpoint, trains, publishes each new checkpoint, exports, draws
    `validation.prompts`, and hands over the result below OUTPUTS/JOB, where JOB is the job's name or the file's. Run the same command again, on any
    machine, to resume. SIGTERM saves first. If two run at the same time the older one ends with 73 when it wants to publish.

    Exit codes are those of train.py: 0 finished (also if it already was), 64 the job is wrong, 65 its data are, 70 crash, 73 another attempt has
    begun, 75 stopped and saved, 76 stalled or storage failing: run it elsewhere, 77 the loss stayed NaN; docs/reliability.md says what to do.
    """

    job: Path = positional('JOB.yaml', 'the job')
    work: Path = option(..., 'folder of this machine for files of the job, and for base models that stay', 'DIR')
    outputs: str = option(..., 'folder or URL that gets a folder JOB', 'PREFIX')
    gpus: PositiveInt = option(1, 'processes, one a GPU', 'N')
    epoch: PositiveInt | None = option(None, "the engine's number of this attempt, larger than of any before (default: the next one)", 'N')
    keep_gb: PositiveFloat = option(50.0, 'base models kept for later jobs', 'GB')
    recipes: Path | None = option(None, "folder of recipes (default: this installation's)", 'DIR')

    def end(self) -> int:
        from fleet.attempts.attempt import Programs
        from fleet.attempts.direct import run_job
        from fleet.attempts.workplace import StopRequest
        from fleet.jobs.checking import RECIPES

        programs, stop = Programs.here(self.gpus), StopRequest()
        with stop.on_signals():
            try:
                return run_job(self.job, self.work, self.outputs, programs, stop, self.epoch, self.recipes or RECIPES, self.keep_gb)
            except OSError as error:
                print_message(f'{self.work}: {error}')
                return STALLED
            except Exception as error:
                if (code := train_code(error)) == CRASH:
                    raise
                print_message(error)
                return code
