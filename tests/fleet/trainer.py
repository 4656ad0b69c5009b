"""Stands in for train.py where training is not the point: checkpoints and manifests of the real format, requests to stop, exit codes.

python trainer.py OPTIONS RECIPE key=value ...
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from diffusion.checkpoints.manifest import CheckpointManifest, Content, batches_of, file_of, find_damage, manifest_of

DEFAULTS = {
    'steps': 6,
    'every': 2,
    'step_sec': 0.05,
    'code': 0,  # to end with, at step `at`
    'at': None,
    'deaf': False,  # to requests to stop
    'grandchild': False,
    'say': '',
}


def content_at(step):
    return f'weights after {step}'.encode() * 100


def save(folder, step):
    folder.mkdir(parents=True, exist_ok=True)
    content = content_at(step)
    (folder / f'.new-{step}').write_bytes(content)
    os.replace(folder / f'.new-{step}', folder / file_of(step))
    manifest = CheckpointManifest(
        {file_of(step): Content(hashlib.sha256(content).hexdigest(), len(content))}, step, 0, step * 4, 1, '0' * 64, {}, {}, {}, None, 0.0, 'now'
    )
    (folder / f'.new-{step}').write_text(manifest.to_json())
    os.replace(folder / f'.new-{step}', folder / manifest_of(step))
    for old in batches_of(os.listdir(folder))[:-2]:
        (folder / manifest_of(old)).unlink()
        (folder / file_of(old)).unlink()


def main():
    options = DEFAULTS | json.loads(sys.argv[1])
    overrides = dict(argument.split('=', 1) for argument in sys.argv[3:])
    run = Path(json.loads(overrides['run_folder']))
    folder = Path(json.loads(overrides['checkpoint.folder']))
    stop = []
    signal.signal(signal.SIGUSR1, lambda *_: stop.append(1))
    Path('seen.json').write_text(
        json.dumps({'environment': dict(os.environ), 'arguments': sys.argv[2:], 'inputs': sorted(str(p) for p in Path('inputs').rglob('*'))})
    )
    if options['grandchild']:
        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
        Path('grandchild').write_text(str(child.pid))
    step = 0
    for found in batches_of(os.listdir(folder))[-1:]:
        manifest = CheckpointManifest.parse((folder / manifest_of(found)).read_bytes(), found)
        assert find_damage(folder / file_of(found), manifest.content) is None
        step = found
    print(f'starting at {step} {options["say"]}', flush=True)
    run.mkdir(exist_ok=True)
    with (run / 'log.jsonl').open('a') as log:
        while step < options['steps']:
            if step == options['at']:
                print(f'ending with {options["code"]}: a long story', file=sys.stderr)
                if options['code'] < 0:
                    os.kill(os.getpid(), -options['code'])
                return options['code']
            time.sleep(options['step_sec'])
            step += 1
            print(json.dumps({'batch': step, 'loss/train/total': 1.0}), file=log, flush=True)
            if step % options['every'] == 0 or step == options['steps']:
                save(folder, step)
            if stop and not options['deaf']:
                save(folder, step)
                return 75
    return 0


if __name__ == '__main__':
    sys.exit(main())
