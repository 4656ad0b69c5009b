"""Networks by name. Each is a JSON file in networks/: diffusers' configuration of it, its `family`, and the `encoders` of encoders/sizes.py that go
with it where the real ones cannot be had. Adding a network of a known family is adding a file. No torch."""

import json
from dataclasses import dataclass
from typing import Any

from diffusion.recipe.rules import NETWORKS


@dataclass(frozen=True)
class Network:
    """A file of networks/.

    Attributes:
        config: diffusers' own arguments of the network.
        encoders: a key of KINDS in encoders/sizes.py; None if none of them fits.
    """

    name: str
    family: str
    config: dict[str, Any]
    encoders: str | None = None


def find_network(name: str) -> Network:
    """Raises KeyError if the file does not name its family."""
    content = json.loads((NETWORKS / f'{name}.json').read_text())
    return Network(name, content.pop('family'), encoders=content.pop('encoders', None), config=content)
