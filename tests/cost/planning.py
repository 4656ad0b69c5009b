"""Plans for tests: the table of rows by subject, and what was printed."""

import json

import pytest

from tests.conftest import REPOSITORY, run_here

PHASES = [str(REPOSITORY / f'yamls/sd2-base-{px}.yaml') for px in (256, 512)]


@pytest.fixture(autouse=True)
def without_runs(tmp_path, monkeypatch):
    """Plan in a folder that has the recipes alone: a demo's run in the checkout would be planned in place of what is published."""
    (tmp_path / 'yamls').symlink_to(REPOSITORY / 'yamls')
    monkeypatch.chdir(tmp_path)


def planned(tmp_path, *arguments):
    path = tmp_path / 'plan.json'
    printed = run_here('diffusion.plan', *arguments, '--json', path)
    return by_subject(json.loads(path.read_text())), printed


def by_subject(plan):
    """Add to the table the quantities of each recipe, and of each number of GPUs and recipe; quantities of the bill are [p10, p50, p90]."""
    lines = plan['rows']
    names = [line['recipe'] for line in lines if line['what'] == 'resolution']
    plan['recipes'] = [{line['what']: line['quantity'] for line in lines if line.get('recipe') == name and 'num_gpus' not in line} for name in names]
    plan['columns'] = []
    for num_gpus in dict.fromkeys(line['num_gpus'] for line in lines if line['group'] == 'steps alone'):
        here = [line for line in lines if line.get('num_gpus') == num_gpus and line['group'] in ('recipe', 'memory', 'steps alone')]
        phases = [{line['what']: line for line in here if line.get('recipe') == name} for name in names]
        column = {'num_gpus': num_gpus} | {line['what']: line['quantity'] for line in here if 'recipe' not in line}
        column['errors'] = [line['formula'] for line in here if line['what'] == 'no plan']
        column['dollars'] = next((line['dollars'][1] for line in here if 'dollars' in line), None)
        column['phases'] = [
            {what: line['quantity'] for what, line in own.items()}
            | {
                'name': name,
                'origin': own['throughput']['kind'],
                'fits': 'source' not in own['micro-batch'],
                'needs': own.get('needs', {}).get('formula'),
            }
            for name, own in zip(names, phases, strict=True)
            if own
        ]
        plan['columns'].append(column)
    for line in plan['bill']:
        line['quantity'] = line['quantity'] if isinstance(line['quantity'], list) else [line['quantity']] * 3
    return plan


def text_of(printed):
    """Without the ends of lines."""
    return ' '.join(printed.stdout.split())


def refused(*arguments):
    return run_here('diffusion.plan', *arguments, code=2).stderr
