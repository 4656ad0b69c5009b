"""The service: endpoints of machines, owners and operators over one database and one bucket. Several at once are safe; so is none for a while."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from data_prep.crawling.addresses import Network
from diffusion.fleet.jobs.checking import RECIPES
from diffusion.fleet.queue.database import Database, check_version
from diffusion.fleet.queue.leases import Terms
from diffusion.fleet.service.billing import Billing
from diffusion.fleet.service.bucket import Bucket
from diffusion.fleet.service.http import Call, Rates, endpoint
from diffusion.fleet.service.job_page import JobPages
from diffusion.fleet.service.machines import Machines
from diffusion.fleet.service.metrics import Metrics, Requests
from diffusion.fleet.service.notices import Courier
from diffusion.fleet.service.operators import Operators
from diffusion.fleet.service.owners import Owners
from diffusion.fleet.service.page import StatusPages
from diffusion.fleet.service.scaling import ScaleEndpoint
from diffusion.fleet.service.sweeping import Sweeper, Sweeping


@dataclass
class ServiceSettings:
    """Of one process of the service.

    Args:
        recipes: folder of the recipes that jobs may name.
        notices_to: networks that are told of ended jobs, also by http, beside the public internet.
    """

    database: Database
    bucket: Bucket
    recipes: Path = RECIPES
    terms: Terms = field(default_factory=Terms)
    sweeping: Sweeping = field(default_factory=Sweeping)
    notices_to: tuple[Network, ...] = ()
    notices_every_sec: float = 5.0


def create_app(settings: ServiceSettings) -> Starlette:
    """The ASGI application; it opens the database when it starts.

    Raises, when it starts:
        InputError: the database does not answer, or holds another schema.
    """
    database = settings.database
    rates = Rates()
    requests = Requests()
    groups = (
        Machines(database, settings.bucket, settings.terms),
        Owners(database, settings.bucket, settings.recipes, may_be_http=bool(settings.notices_to)),
        Operators(database),
        Billing(database),
        ScaleEndpoint(database),
        Metrics(database, requests),
        StatusPages(database),
        JobPages(database),
    )
    endpoints: dict[tuple[str, str], Callable[[Call], Response]] = {}
    for group in groups:
        endpoints |= group.endpoints

    def healthz(_: Request) -> Response:
        """Whether this process reaches the database; asked by load balancers, without a token."""
        try:
            with database.transaction() as connection:
                connection.execute('select 1')
        except Exception:
            return JSONResponse({'database': False}, 503)
        return JSONResponse({'database': True})

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        database.open()
        with database.transaction() as connection:
            check_version(connection)
        sweeper = Sweeper(database, settings.terms, settings.sweeping)
        courier = Courier(database, settings.notices_to, settings.notices_every_sec)
        sweeper.start()
        courier.start()
        try:
            yield
        finally:
            sweeper.stop()
            courier.stop()
            database.close()

    routes = [Route(path, requests.counted(method, path, endpoint(work, rates)), methods=[method]) for (method, path), work in endpoints.items()]
    return Starlette(routes=[Route('/healthz', healthz), *routes], lifespan=lifespan)
