"""Stand-in for what files of launch/ start as `python -m fleet run ...`, with programs that stand in for training: python THIS -m fleet ARGUMENTS

FLEET_STAND_INS is a folder with JOB.json for each job, a list of options of tests/fleet/trainer.py: those of its first start, its second, and so on, the last
one for all further ones. Each start appends its process id to JOB.starts.
"""

import json
import os
import sys
from pathlib import Path

from fleet.__main__ import main
from fleet.attempts.attempt import Programs

PROGRAMS = Path(__file__).parents[1] / 'fleet'  # by their paths: importing the tests' own helpers takes seconds


def options_of_this_start(folder: Path, job: str) -> dict[str, object]:
    with (folder / f'{job}.starts').open('a') as file:
        print(os.getpid(), file=file)
    number = len((folder / f'{job}.starts').read_text().splitlines())
    given = json.loads((folder / f'{job}.json').read_text())
    return given[min(number, len(given)) - 1]


if __name__ == '__main__':
    script, option, module, *arguments = sys.argv
    assert (option, module, arguments[0]) == ('-m', 'fleet', 'run')
    options = options_of_this_start(Path(os.environ['FLEET_STAND_INS']), Path(arguments[1]).stem)
    programs = Programs(
        train=(sys.executable, str(PROGRAMS / 'trainer.py'), json.dumps(options)), export=(sys.executable, str(PROGRAMS / 'exporter.py'))
    )
    Programs.here = staticmethod(lambda num_gpus: programs)
    sys.argv = [script, *arguments]
    sys.exit(main())
