"""YAML as plain data (scalars, lists and mappings), from files that a stranger may have written."""

import re
from typing import Any

import yaml

from diffusion.common.text import one_line

MAX_DEPTH = 30  # the deepest shipped recipe has 5
MAX_NODES = 20_000  # keys and values; the longest shipped recipe has 300


class PlainSafeLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses duplicate keys, aliases (ten lines can expand to gigabytes), and too much depth or length.

    Numbers are those of YAML 1.2 too (`1e-4`), dates stay text, and so do all keys.
    """

    depth = num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, 'aliases (*name) are not read; write the value again, or ${key}', mark)
        if self.depth == MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f'nested more than {MAX_DEPTH} deep', mark)
        if self.num_nodes == MAX_NODES:
            raise yaml.composer.ComposerError(None, None, f'more than {MAX_NODES:,} keys and values', mark)
        self.num_nodes += 1
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, 'a key is text; this one is a list or a mapping', key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key '{key.value}' comes twice", key.start_mark)
            seen.add(key.value)
            key.tag = 'tag:yaml.org,2002:str'  # 256, on and null are names here
        return super().construct_mapping(node, deep)


PlainSafeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != 'tag:yaml.org,2002:timestamp']
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_EXPONENT = re.compile(r'[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+\Z')  # to the end: a digest may begin so
PlainSafeLoader.add_implicit_resolver('tag:yaml.org,2002:float', _EXPONENT, list('-+.0123456789'))


def read_yaml(text: str) -> Any:
    """Parse YAML into plain data.

    Raises:
        yaml.YAMLError: it is not YAML, or not of the kind above.
    """
    try:
        return yaml.load(text, Loader=PlainSafeLoader)  # noqa: S506 - a subclass of the safe one
    except ValueError as error:
        raise yaml.YAMLError('it holds a number of more digits than Python reads') from error


def yaml_problem(error: yaml.YAMLError) -> str:
    """Describe what is wrong in a text, with its place in front and the line below, to which an arrow points."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return one_line(error).replace(' in "<unicode string>",', ' at')
    mark, begun = error.problem_mark, error.context_mark
    context = f', {error.context} from line {begun.line + 1}' if error.context and begun is not None and begun.line != mark.line else ''
    snippet = mark.get_snippet(indent=6)
    return f'line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}' + ('' if snippet is None else f'\n{snippet}')
