"""Fixtures of the tests of checkpoints."""

from collections.abc import Callable

import pytest

from diffusion.common import processes


@pytest.fixture
def failpoints(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets DIFFUSION_FAILPOINT; places are counted anew."""

    def arm(entries: str) -> None:
        processes._passed.clear()
        monkeypatch.setenv('DIFFUSION_FAILPOINT', entries)

    return arm
