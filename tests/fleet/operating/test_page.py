"""The fleet's pages: what they say at no, a few and a thousand jobs, to whom, and that a telephone and a browser without scripts show them."""

import base64
import re
import shutil
import subprocess
from html import escape

import pytest

from tests.fleet.operating.made_up import token_of
from tests.monitoring.report.pages import Page


def page_of(service, path='/', name='root'):
    answer = service.get(path, name)
    assert answer.status_code == 200, answer.text
    assert answer.headers['content-type'] == 'text/html; charset=utf-8'
    assert "default-src 'none'" in answer.headers['content-security-policy']
    assert answer.headers['cache-control'] == 'no-store'
    page = Page(answer.text)
    assert not {'script', 'iframe', 'object', 'link', 'form', 'img'} & {tag for tag, _ in page.elements}
    assert '@media (prefers-color-scheme: dark)' in answer.text
    for tag, attributes in page.elements:
        assert not [key for key in attributes if key.startswith('on')], (tag, attributes)
        assert re.fullmatch(
            r'jobs/[0-9a-f-]{36}/page|\.\./[0-9a-f-]{36}/page|\.\./\.\./((jobs|groups)/[\w.-]+/page)?', attributes.get('href', '../../')
        ), attributes
    return page


def number(page, label):
    """The value above a label that begins so."""
    texts = [text.strip() for text in page.texts if text.strip()]
    (place,) = [place for place, text in enumerate(texts) if text.startswith(label) and texts[place - 1][:1] in '$0123456789']
    return texts[place - 1]


def test_an_empty_fleet(service):
    page = page_of(service)
    assert 'There is no job yet.' in page.text
    assert 'No machine is here.' in page.text


def test_twelve_jobs(service, made_up):
    made_up.populate(12, 3)
    page = page_of(service)
    assert number(page, 'done of 12') == '8'
    assert number(page, 'on machines') == '3'
    assert number(page, 'waiting') == '1'
    assert 'more job' not in page.text
    assert [attributes['content'] for attributes in page.attributes('meta') if attributes.get('http-equiv') == 'refresh'] == ['30']


def test_a_thousand_jobs_are_few_rows(service, made_up):
    made_up.populate(1000, 40)
    page = page_of(service)
    assert len(page.rows) < 120
    assert '970 more jobs' in page.text
    assert re.search(r'1\d more machines', page.text)
    assert re.search(r'\d+ jobs left at [\d.]+ jobs/h, the pace of the last 2.0 h \(\d+ jobs done\)', page.text)
    assert len(service.get('/').content) < 100_000


def test_how_long_it_takes_is_said_with_its_reason(service, made_up, connection):
    """Ten jobs done in an hour, ten left: an hour. Before three are done: by the steps."""
    made_up.node('m', since=60)
    running = made_up.job('anna', state='leased', node='m', step=0, epoch=1)
    made_up.attempt(running, 1, 'm', 60, 0, (0, 400), pace=0.5)
    page = page_of(service)
    assert '1,000 steps left at 0.5 steps/s, what 1 machine at work do now' in page.text
    assert number(page, 'left, until') == '33 min'
    for done in range(10):
        job = made_up.job('anna', state='done', ended=5 * done + 1, epoch=1)
        made_up.attempt(job, 1, 'm', 60, 5 * done + 1, (0, 1400), 'done')
    for _ in range(9):
        made_up.job('anna')
    page = page_of(service)
    assert number(page, 'jobs done per hour') == '10.0'
    assert number(page, 'left, until') == '60 min'
    connection.execute("update job set state = 'queued', node = null, lease_until = null where state = 'leased'")
    assert 'no machine works at one' in page_of(service).text


@pytest.mark.parametrize('speed', [1e-9, 1e-300, 5e-324])
def test_a_speed_of_nearly_nothing_names_no_date(speed, service, made_up):
    """A machine says what it likes, and no calendar has the day on which it would be done."""
    made_up.node('m', since=60)
    made_up.attempt(made_up.job('anna', state='leased', node='m', epoch=1), 1, 'm', 60, 0, (0, 400), pace=speed)
    page = page_of(service)
    assert f'1,000 steps left at {speed:.3g} steps/s' in page.text
    assert 'left, until' not in page.text


def test_expected_dollars_are_those_of_done_jobs(service, made_up):
    """Two done for $0.324 each; one waits, one has cost a quarter: 0.648 + 0.081, and 0.324 + 0.243 more."""
    made_up.node('m', since=600)
    for begin in (300, 200):
        job = made_up.job('anna', state='done', ended=begin - 60, epoch=1)
        made_up.attempt(job, 1, 'm', begin, begin - 60, (0, 1400), 'done')
    running = made_up.job('anna', state='leased', node='m', epoch=1)
    made_up.attempt(running, 1, 'm', 15, 0, (0, 300), pace=0.5)
    made_up.job('anna')
    assert number(page_of(service), 'so far, $1.30 expected in all') == '$0.73'


def test_owners_see_their_own(service, made_up):
    made_up.populate(60, 5)
    made_up.node('salad-idle')
    secret = made_up.job('ben', 'secret-of-ben', 'failed', ended=5, cause='cause-of-ben', epoch=1)
    made_up.attempt(secret, 1, 'salad-idle', 20, 10, (0, 0), 'data', message='message-of-ben')
    everything, own = page_of(service).text, page_of(service, name='anna').text
    for text in ('secret-of-ben', 'cause-of-ben', 'salad-idle', 'Owners'):
        assert text in everything
        assert text not in own
    assert 'Jobs of anna' in own
    assert 'ben' not in own
    assert 'Of the budget of $10.00' in own
    assert service.get(f'/jobs/{secret}/page', 'anna').status_code == 404
    assert 'message-of-ben' in page_of(service, f'/jobs/{secret}/page', 'ben').text


def test_one_job_over_its_machines(service, made_up):
    for name in ('m1', 'm2'):
        made_up.node(name)
    job = made_up.job('anna', 'timber', 'leased', node='m1', step=500, epoch=3, notify={'webhook': 'https://example.org/?token=geheim'})
    made_up.attempt(job, 1, 'm1', 100, 80, (0, 540), 'lost', 0.5)
    made_up.attempt(job, 2, 'm2', 70, 60, (500, 500), 'crashed', start_min=None, message='<b>CUDA out of memory', code=70)
    made_up.attempt(job, 3, 'm1', 50, 0, (500, 900), pace=0.5)
    page = page_of(service, f'/jobs/{job}/page', 'anna')
    bars = page.attributes('rect')
    assert [bar['class'] for bar in bars] == ['of-lost', 'of-leased', 'of-failed']  # a line a machine
    assert [round(float(bar['x'])) for bar in bars] == [0, 500, 300]
    assert [round(float(bar['width'])) for bar in bars] == [200, 500, 100]
    assert number(page, 'steps done twice') == '40'
    assert '<b>CUDA out of memory' in page.text
    assert 'crashed, exit code 70' in page.text
    assert 'geheim' not in page.text
    assert 'No machine has had it yet.' in page_of(service, f'/jobs/{made_up.job("anna")}/page').text


def test_a_job_that_waits_says_why(service, made_up, connection):
    """Of the owner's own queue: neither jobs of others nor what comes later count."""
    made_up.node('m')
    first, other, last = made_up.job('anna'), made_up.job('ben'), made_up.job('anna')
    connection.execute('update job set priority = 5 where id = %s', [last])

    def said(job):
        waits = service.get(f'/jobs/{job}').json()['waits']
        assert f'It waits: {waits}.' in service.get(f'/jobs/{job}/page').text
        return waits

    assert said(first) == '1 job of anna before it'
    assert said(last) == 'it is the next one of anna, for the next machine that asks'
    assert said(other) == 'it is the next one of ben, for the next machine that asks'
    connection.execute("update owner set budget_dollars = 0 where name = 'anna'")
    assert said(last).startswith('the budget of anna is spent')
    connection.execute("update job set state = 'cancelled', ended = now() where id = %s", [last])
    assert service.get(f'/jobs/{last}').json()['waits'] == ''
    assert 'It waits' not in service.get(f'/jobs/{last}/page').text


def test_names_are_text(service, made_up):
    made_up.node('m')
    job = made_up.job('anna', '<script>alert(1)</script>', 'failed', ended=1, cause='"><img src=x onerror=alert(1)>', epoch=1)
    made_up.attempt(job, 1, 'm', 9, 8, (0, 0), 'recipe')
    page_of(service)
    page_of(service, f'/jobs/{job}/page')


def test_a_browser_asks_for_a_password(service, made_up):
    answer = service.client.get('/')
    assert answer.status_code == 401
    assert answer.headers['www-authenticate'].startswith('Basic ')
    password = base64.b64encode(f'anyone:{token_of("anna")}'.encode()).decode()
    assert 'Jobs of anna' in service.client.get('/', headers={'Authorization': f'Basic {password}'}).text
    assert service.client.get(f'/jobs/{made_up.job("anna")}/page').status_code == 401


@pytest.mark.skipif(shutil.which('chromium') is None, reason='no browser here')
@pytest.mark.parametrize('width', [400, 1280])
def test_nothing_is_wider_than_the_screen(width, service, made_up, tmp_path):
    """Measured by a browser; a table in a box that scrolls by itself may not do so at a telephone's width either."""
    made_up.populate(300, 12)
    made_up.node('a-machine-with-an-uncommonly-long-name-' + 'x' * 20)
    job = made_up.job('anna', 'a-job-with-an-uncommonly-long-name-' + 'x' * 25, 'failed', ended=1, cause='/a/path/' + 'x' * 300, epoch=1)
    made_up.attempt(job, 1, 'a-machine-with-an-uncommonly-long-name-' + 'x' * 20, 90, 80, (0, 0), 'crashed', message='x' * 500)
    # In a frame, as a window of chromium is never narrower than 500 pixels.
    script = """<script>onload = () => { document.title = 'width ' + Math.max(...[...document.querySelector('iframe').contentDocument.querySelectorAll('*')]
        .filter(e => !e.closest('svg, pre')).map(e => Math.max(e.getBoundingClientRect().right, e.scrollWidth))) }</script>"""
    for rank in range(3):
        targets = [f'attention.{place}.to_{part}' for place in range(rank + 8) for part in 'qkv']
        made_up.job('anna', f'another-job-with-a-long-name-{rank}-' + 'x' * 25, group='g' * 60, overrides={'adapter.targets': targets})
    for name, path in (('fleet', '/'), ('job', f'/jobs/{job}/page'), ('group', f'/groups/{"g" * 60}/page')):
        file = tmp_path / f'{name}.html'
        frame = f'<iframe width="{width}" height="900" style="border: 0" srcdoc="{escape(service.get(path).text)}"></iframe>'
        file.write_text(f'<!doctype html><title></title>{frame}{script}')
        dom = subprocess.run(
            ['chromium', '--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars', '--window-size=1400,1000', '--dump-dom', file.as_uri()],
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
        found = re.search(r'<title>width ([\d.]+)</title>', dom)
        assert found, dom[:500]
        assert float(found[1]) <= width, name
