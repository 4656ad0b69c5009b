"""What `watch` says of jobs while they run."""

import re

from fleet.client import following


class Client:
    """A service whose jobs end one after another, one in each `looks` looks."""

    def __init__(self, num, looks):
        self.num, self.looks, self.asked = num, looks, 0

    def get(self, path, **query):
        if path != '/jobs':
            return {'number': 1}
        self.asked += 1
        ended = self.asked // self.looks
        return {'jobs': [
            {'id': str(number), 'name': f'job-{number}', 'number': number + 1, 'state': 'done' if number < ended else 'leased', 'dollars': 0.0, 'cause': ''}
            for number in range(self.num)
        ]}  # fmt: skip


def test_a_line_for_each_change_and_one_a_minute_without_any(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(following.time, 'monotonic', lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    said = []
    assert following.follow(Client(3, looks=45), ['0', '1', '2'], 3, said.append, wait) == 0
    plain = [re.sub(', about .*', '', line) for line in said]
    # 135 s from one to the next: its change, and two lines that say the same with another time left.
    assert [line.split()[0] for line in plain] == ['0', '0', '0', '1', '1', '1', '2', '2', '2', '3']
    assert 'left' not in said[0]
    assert said[3].endswith('about 4 min left')
