"""The machines of the fleet, those that are here first.

    python -m diffusion.fleet nodes [--all]

For operators.
"""

from collections.abc import Sequence
from typing import Any

from diffusion.common.arguments import CommandParser
from diffusion.contracts.errors import run_command


def main(arguments: Sequence[str]) -> int:
    from diffusion.fleet.client.http import add_server

    parser = CommandParser('diffusion.fleet nodes', __doc__)
    parser.add_argument('--all', action='store_true', help='also those that are gone')
    add_server(parser)
    args = parser.parse_args(arguments)

    def work() -> None:
        from collections import Counter

        from diffusion.common.text import markdown_table, print_page
        from diffusion.fleet.client.http import connect

        answer = connect(args).get('/nodes')
        states = Counter(node['state'] for node in answer['nodes'])
        shown = [node for node in answer['nodes'] if args.all or node['state'] != 'gone']
        lines = [', '.join(f'{num:,} {state}' for state, num in states.items()) or 'no machine has enrolled yet']
        if shown:
            head = ['machine', 'pool:', 'state:', 'GPU:', 'GB', '$/h', 'job:', 'step', 'steps/s', 'last sign', 'done', 'attempts', 'reason:']
            rows = [
                [
                    node['name'], node['pool'], node['state'], node['gpu'], f'{node["gpu_gb"]:g}',
                    None if node['price_per_hour'] is None else f'{node["price_per_hour"]:.3f}',
                    node['job_name'] or node['job'], None if node['job'] is None else f'{node["step"] or 0:,}',
                    None if node['steps_per_sec'] is None else f'{node["steps_per_sec"]:.3g}', f'{node["silent_sec"]:.0f} s ago',
                    str(node['done']), str(node['attempts']), '; '.join([*_first_lines(node['reason']), *_other_recipes(node)]),
                ]
                for node in shown
            ]  # fmt: skip
            lines += ['', markdown_table(head, rows)]
        if answer['left_out']:
            lines.append(f'{answer["left_out"]:,} more')
        print_page('\n'.join(lines))

    return run_command(work)


def _first_lines(reason: str) -> list[str]:
    return [line.strip() for line in reason.splitlines()[:2]]


def _other_recipes(node: dict[str, Any]) -> list[str]:
    other = node['other_recipes']
    if not other or node['state'] == 'gone':
        return []
    more = f' and {len(other) - 1:,} more' if len(other) > 1 else ''
    return [f'gets no job of {other[0]}{more}: other than here, or missing (its version: {node["version"] or "not said"})']
