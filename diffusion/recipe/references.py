"""`${key}` in a YAML file of settings: replaced by the value of another key of the same settings, and by nothing else.

OmegaConf's own interpolation also reads the environment (`${oc.env:NAME}`, with quotes, nested, with defaults) and calls whatever resolvers the
process has registered; a recipe is data, may come with a stranger's checkpoint, and is written to logs. So OmegaConf is handed no text that holds
`${`: references are replaced before, and anything else is refused.
"""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import MISSING

REFERENCE = re.compile(r'\$\{([A-Za-z_][\w-]*(?:\.[\w-]+)*)\}')
MAX_REPLACED = 1000  # each doubles a text at most: without a limit thirty lines could fill the memory


class WrongReference(ValueError):
    """A reference that is not `${key}`, or whose key does not exist."""


class FollowsFromAnother(WrongReference):
    """A reference to a key that is itself wrong or missing, which is reported as an error of that key."""


class Circle(WrongReference):
    """A reference that leads back to its own key."""


class References:
    """Replaces the references in texts.

    Args:
        settings: all settings, defaults included, in which the keys are looked up.
    """

    def __init__(self, settings: Mapping[str, Any]):
        self.settings = settings
        self.replaced = 0

    def resolve(self, value: Any, by_way_of: tuple[str, ...] = ()) -> Any:
        """Return the value without references; a text that is one reference and nothing else takes over the other value's type.

        Raises:
            WrongReference: something else than `${key}`, or a key that is not there, or leads back to itself.
        """
        if isinstance(value, dict):
            return {key: self.resolve(inner, by_way_of) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.resolve(inner, by_way_of) for inner in value]
        if not isinstance(value, str) or '${' not in value:
            return value
        if '${' in REFERENCE.sub('', value):
            raise WrongReference(
                f"'{value}' is not read: only ${{key}}, with a key of these settings such as ${{run_folder}}, is replaced; "
                'nothing is taken from the environment. Write the value itself, or give it on the command line as key=value'
            )
        if whole := REFERENCE.fullmatch(value):
            return self._value_of(whole[1], by_way_of)
        text = REFERENCE.sub(lambda match: self._text_of(match[1], by_way_of), value)
        if '${' in text:  # assembled from harmless parts
            raise WrongReference(f"'{value}' becomes '{text}', which is another reference; write the value itself")
        return text

    def _text_of(self, key: str, by_way_of: tuple[str, ...]) -> str:
        value = self._value_of(key, by_way_of)
        if value is None or isinstance(value, dict | list):
            what = 'null' if value is None else 'a section' if isinstance(value, dict) else 'a list'
            raise WrongReference(f'${{{key}}} is {what}, which cannot be a part of a text')
        return str(value)

    def _value_of(self, key: str, by_way_of: tuple[str, ...]) -> Any:
        if key in by_way_of:
            raise Circle(f'${{{key}}} leads back to itself by way of {", ".join(by_way_of)}')
        self.replaced += 1
        if self.replaced > MAX_REPLACED:
            raise WrongReference(f'more than {MAX_REPLACED:,} references have to be replaced; write the values themselves')
        value: Any = self.settings
        for name in key.split('.'):
            if not isinstance(value, Mapping) or name not in value:
                raise WrongReference(f"${{{key}}} leads nowhere: there is no key '{key}'")
            value = value[name]
        if value == MISSING:
            raise FollowsFromAnother(f'${{{key}}} has no value yet')
        try:
            return self.resolve(value, (*by_way_of, key))
        except Circle:
            raise
        except WrongReference as error:
            raise FollowsFromAnother(f'${{{key}}} is wrong itself') from error


def overlaid(below: Any, above: Any) -> Any:
    """Merge two layers of settings: sections key by key, everything else replaced."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{key: overlaid(below.get(key), value) for key, value in above.items()}}
