"""Where nested settings differ: recipes, environments, protocols."""

from collections.abc import Collection, Mapping
from typing import Any


def differences(trees: Mapping[str, Mapping[str, Any]], ignored: Collection[str] = ()) -> list[tuple[str, ...]]:
    """(dotted field, value in each tree) of the fields that are not the same in all.

    Args:
        ignored: dotted fields that may differ.
    """
    flat = [dict(leaves(tree)) for tree in trees.values()]
    fields = list(dict.fromkeys(field for tree in flat for field in tree))
    rows = [(field, *(tree.get(field, 'absent') for tree in flat)) for field in fields if field not in ignored]
    return [row for row in rows if len(set(row[1:])) > 1]


def leaves(tree: Mapping[str, Any], prefix: str = '') -> list[tuple[str, str]]:
    """(dotted field, value as YAML would write it) of every value that is no mapping, or an empty one."""
    found = list[tuple[str, str]]()
    for key, value in tree.items():
        found += leaves(value, f'{prefix}{key}.') if isinstance(value, Mapping) and value else [(f'{prefix}{key}', _text(value))]
    return found


def _text(value: Any) -> str:
    return 'null' if value is None else str(value).lower() if isinstance(value, bool) else str(value)
