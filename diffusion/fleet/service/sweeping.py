"""Work that nobody asks for: lapsed leases, machines that are gone, the last job. One service at a time does it."""

import threading

from diffusion.common.text import first_line, print_message, redacted
from diffusion.fleet.policies.last_job import stranded
from diffusion.fleet.queue import leases, reading
from diffusion.fleet.queue.database import Connection, Database
from diffusion.fleet.queue.leases import LeaseSettings

GONE_AFTER = 3.0  # leases without a sign of life after which a machine's stay has ended
SWEEPS = 0x737765  # advisory lock: of several services one sweeps; it goes with the connection, however that ends


class Sweeper:
    """A thread that sweeps, for as long as the service runs; claims take lapsed leases back too."""

    def __init__(self, database: Database, settings: LeaseSettings, every_sec: float = 5.0):
        self.database, self.settings, self.every_sec = database, settings, every_sec
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name='sweeper', daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join(10)

    def _run(self) -> None:
        while not self.ended.wait(self.every_sec):
            try:
                self.sweep()
            except Exception as error:  # a database that restarts; whatever it is, the next look may succeed, and without sweeps leases stay
                print_message(f'sweeper: {redacted(first_line(error, with_type=True))}')

    def sweep(self) -> bool:
        """Look once; False if another service is at it."""
        with self.database.transaction() as connection:
            row = connection.execute('select pg_try_advisory_xact_lock(%s) as mine', [SWEEPS]).fetchone()
            if row is None or not row['mine']:
                return False
            leases.take_back(connection, 'j.lease_until <= now()')
            end_sessions(connection, GONE_AFTER * self.settings.lease_sec)
            lift_bans(connection)
        return True


def end_sessions(connection: Connection, after_sec: float) -> None:
    """End the stays of machines that have said nothing for so long; one that still lives is told 401, and enrols again."""
    connection.execute(
        """with ended as (
            update session set ended = last_seen where ended is null and last_seen < now() - %s * interval '1 second' returning node
        ) update node set state = 'gone' from ended where name = ended.node and state in ('live', 'draining')""",
        [after_sec],
    )


def lift_bans(connection: Connection) -> None:
    """Let the oldest ban of a job go that no live machine may take (policies/last_job.py)."""
    queued = reading.jobs(connection, "j.state = 'queued' and exists (select 1 from ban where ban.job = j.id and ban.until > now())")
    if not queued:
        return
    live = reading.nodes(connection, "n.state = 'live'")
    for found in stranded(queued, live, reading.bans(connection), reading.now(connection)):
        if found.lift is not None:
            connection.execute('delete from ban where job = %s and node = %s', [found.lift.job, found.lift.node])
