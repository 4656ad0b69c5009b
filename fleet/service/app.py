"""The service: endpoints of machines, owners and operators over one database and one bucket. Several at once are safe; so is none for a while."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from fleet.jobs.checking import recipe_digests
from fleet.queue.database import upgrade
from fleet.service import machines, metrics, operators, owners, pages
from fleet.service.background import Sweeper, WebhookSender
from fleet.service.gate import FleetService

ABOUT = """JSON over HTTP with a token for each request, as `Authorization: Bearer TOKEN`; for GET, browsers may send it as the password of basic
authentication. Other methods take JSON alone, at most 1 MB of it, and nothing from another site's page.

400, 415 and 422: the request is wrong, and `error` says what. 401: the token opens nothing, or not this. 409: the lease is another's, or the state of
a thing forbids it. 410: leave. 429 and 503: try again, after `Retry-After` seconds where it says so."""


def create_app(service: FleetService) -> FastAPI:
    """Make the ASGI application; it opens the database when it starts.

    Raises, when it starts:
        InputError: the database does not answer, or holds another schema.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.database.open()
        with service.database.transaction() as connection:
            upgrade(connection)
            digests = recipe_digests(service.recipes)
            connection.execute('delete from recipe where name <> all(%s)', [list(digests)])
            connection.execute(
                """insert into recipe (name, sha256) select * from unnest(%s::text[], %s::text[])
                on conflict (name) do update set sha256 = excluded.sha256""",
                [list(digests), list(digests.values())],
            )
        sweeper = Sweeper(service.database, service.leases, service.sweep_every_sec)
        sender = WebhookSender(service.database, service.notices_to, service.notices_every_sec)
        sweeper.start()
        sender.start()
        try:
            yield
        finally:
            sweeper.stop()
            sender.stop()
            service.database.close()

    # No page that loads scripts of others: /openapi.json alone.
    app = FastAPI(title='Fleet', version='1', description=ABOUT, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    for module in (machines, owners, operators, metrics, pages):
        app.include_router(module.router)

    @app.get('/healthz', tags=['asked by load balancers'])
    def healthz() -> JSONResponse:
        """Say whether this process reaches the database; without a token."""
        try:
            with service.database.transaction() as connection:
                connection.execute('select 1')
        except Exception:
            return JSONResponse({'database': False}, 503)
        return JSONResponse({'database': True})

    return app
