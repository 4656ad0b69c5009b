"""A machine of the storm: it speaks the protocol as the real worker does, over jobs of ten steps of 20 ms without a training process.

Started by fork, so that a killed one is replaced in milliseconds.
"""

import hashlib
import os
import time

import requests

from tests.fleet.fleet import DIGESTS

STEP_SEC = 0.02
CHECKPOINTS = (5, 10)


class Lost(Exception):
    """409 or 401: forget the job, or enrol again."""


class Machine:
    def __init__(self, server: str, pool_token: str, name: str, idle_sec: float, refuses: bool = False, checkpoints: tuple[int, ...] = CHECKPOINTS):
        self.server, self.session, self.refuses, self.checkpoints = server, requests.Session(), refuses, checkpoints
        self.pool_token, self.name, self.idle_sec = pool_token, name, idle_sec
        self.said = {'machine': name, 'gpu': 'fake', 'gpu_gb': 24, 'recipes': DIGESTS}
        self.headers: dict[str, str] = {}

    def ask(self, path: str, content: dict, token: str = '') -> requests.Response:
        headers = {'Authorization': f'Bearer {token}'} if token else self.headers
        while True:
            try:
                answer = self.session.post(self.server + path, json=content, headers=headers, timeout=5)
            except requests.RequestException:
                time.sleep(0.1)
                continue
            if answer.status_code in (401, 409):
                raise Lost(answer.status_code)
            if answer.status_code == 503:
                time.sleep(0.1)
                continue
            assert answer.status_code in (200, 204, 410), answer.text
            return answer

    def run(self) -> None:
        """Until nothing is handed out for `idle_sec`, or the machine is drained."""
        while True:
            try:
                said = self.ask('/enroll', self.said, self.pool_token).json()
                self.headers = {'Authorization': f'Bearer {said["token"]}'}
                self.renew_sec = said['renew_sec']
                self.work()
                return
            except Lost:
                time.sleep(0.1)  # its name is free again when the one before has been silent for a lease

    def work(self) -> None:
        empty_since = None
        while True:
            answer = self.ask('/claim', {})
            if answer.status_code == 410:
                return
            if answer.status_code == 204:
                empty_since = empty_since or time.monotonic()
                if time.monotonic() - empty_since > self.idle_sec:
                    return
                time.sleep(float(answer.headers['Retry-After']))
                continue
            empty_since = None
            try:
                self.attempt(answer.json())
            except Lost as lost:
                if lost.args[0] == 401:
                    raise

    def attempt(self, lease: dict) -> None:
        job, epoch = f'/jobs/{lease["job"]}', lease['epoch']
        if self.refuses:
            self.ask(f'{job}/end', {'epoch': epoch, 'exit_code': 64, 'message': 'no such recipe'})
            return
        step = lease['checkpoint']['step'] if lease['checkpoint'] else 0
        renewed = time.monotonic()
        while step < 10:
            time.sleep(STEP_SEC)
            step += 1
            if time.monotonic() - renewed > self.renew_sec:
                self.ask(f'{job}/renew', {'epoch': epoch, 'step': step})
                renewed = time.monotonic()
            if step in self.checkpoints:
                files = self.upload(job, epoch, step, f'{lease["job"]} {epoch} {step}')
                self.ask(f'{job}/publish', {'epoch': epoch, 'step': step, 'files': files})
        files = self.upload(job, epoch, None, f'result of {lease["job"]} by {epoch}')
        self.ask(f'{job}/end', {'epoch': epoch, 'exit_code': 0, 'step': step, 'files': files})

    def upload(self, job: str, epoch: int, step: int | None, text: str) -> dict:
        content = text.encode()
        files = {'file.txt': {'sha256': hashlib.sha256(content).hexdigest(), 'bytes': len(content)}}
        signed = self.ask(f'{job}/urls', {'epoch': epoch, 'step': step, 'files': files}).json()['files']['file.txt']
        answer = requests.put(signed['url'], data=content, headers=signed['headers'], timeout=30)
        assert answer.status_code in (200, 412), answer.text
        return files


def fork(server: str, pool_token: str, name: str, idle_sec: float = 10, refuses: bool = False, checkpoints: tuple[int, ...] = CHECKPOINTS) -> int:
    """Start one, perhaps one that answers 64 to everything; returns its process id."""
    child = os.fork()
    if child == 0:
        try:
            Machine(server, pool_token, name, idle_sec, refuses, checkpoints).run()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return child
