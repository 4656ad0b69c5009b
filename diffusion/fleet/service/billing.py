"""`GET /bill`: what machines cost; an owner sees its own jobs, an operator everything."""

from collections.abc import Callable
from datetime import UTC, datetime

from starlette.responses import JSONResponse, Response

from diffusion.fleet.queue.bills import Period, bill
from diffusion.fleet.queue.database import Database
from diffusion.fleet.service.access import Refused, owner_of
from diffusion.fleet.service.http import Call

MAX_JOBS_BILLED = 1000


class Billing:
    """The endpoint of bills."""

    def __init__(self, database: Database):
        self.database = database
        self.endpoints: dict[tuple[str, str], Callable[[Call], Response]] = {('GET', '/bill'): self.bill}

    def bill(self, asked: Call) -> Response:
        """Sums of the period from `since` to `until`, dates or times in ISO 8601, of UTC unless they say otherwise."""
        with self.database.transaction() as connection:
            owner = owner_of(connection, asked.token)
            period = Period(_time(asked, 'since'), _time(asked, 'until'))
            limit = asked.whole_number('limit', MAX_JOBS_BILLED, MAX_JOBS_BILLED)
            return JSONResponse(bill(connection, None if owner.is_operator else owner.name, period, limit))


def _time(asked: Call, key: str) -> datetime | None:
    text = asked.query.get(key)
    if not text:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise Refused(400, f'{key}: {text[:80]!r} is no time; write 2026-01-31 or 2026-01-31T18:00') from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
