"""What `make test-changed` runs: the tests of the rooms that differ from a commit, and those that import what differs, directly or not.

    python -m tests.changed [COMMIT]

COMMIT is `origin/main` unless named. Files that git does not know yet count as changed.
"""

import subprocess
import sys
from pathlib import Path

import grimp

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ('diffusion', 'data_prep', 'fleet', 'benchmarks')


def changed_files(commit: str) -> set[str]:
    """Return the names of files that differ between a commit and the work tree."""
    commands = ['git', 'diff', '--name-only', commit], ['git', 'ls-files', '--others', '--exclude-standard']
    return {name for command in commands for name in subprocess.check_output(command, cwd=REPOSITORY, text=True).splitlines()}


def tests_of(files: set[str]) -> list[str]:
    """Return the files and folders of tests that these changed files call for; the whole of `tests` where no room can be named."""
    chosen = {name for name in files if name.startswith('tests/') and Path(name).name.startswith('test_')}
    helpers = {name for name in files if name.startswith('tests/')} - chosen
    if any(Path(name).parent == Path('tests') for name in helpers) or files & {'setup.py', 'pyproject.toml', 'constraints.txt'}:
        return ['tests']
    graph = grimp.build_graph(*PACKAGES, 'tests')
    graph.remove_module('tests.conftest')  # through its fixtures every test would depend on everything
    for name in files - chosen:
        module = '.'.join(Path(name).with_suffix('').parts).removesuffix('.__init__')
        # A file that is no module, such as a table in JSON, is read by its room.
        while module and module not in graph.modules:
            module = module.rpartition('.')[0]
        reached = {f'{each.replace(".", "/")}.py' for each in (graph.find_downstream_modules(module) if module else ())}
        chosen |= {each for each in reached if Path(each).name.startswith('test_')}
        chosen |= {f'tests/{name.removeprefix("diffusion/").partition("/")[0]}'}  # the room's own, also those that call it as a command
    if not all(name.startswith('tests/') for name in files):  # commands, documents and recipes
        chosen |= {f'tests/{path.name}' for path in (REPOSITORY / 'tests').glob('test_*.py')}
    kept = {name for name in chosen if (REPOSITORY / name).exists()}
    return sorted(name for name in kept if not any(str(parent) in kept for parent in Path(name).parents))


if __name__ == '__main__':
    print(*tests_of(changed_files(*sys.argv[1:] or ['origin/main'])))
