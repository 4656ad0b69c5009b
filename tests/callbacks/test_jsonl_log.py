import torch

from diffusion.callbacks.jsonl_log import JsonlLog, read_log


def test_metrics_of_a_batch_share_a_line_and_intervals_are_kept(tmp_path):
    log = JsonlLog(tmp_path / 'log.jsonl', every=2)
    for batch in range(5):
        log.log_metrics({'loss/train/total': torch.tensor(batch / 4), 'time/batch': batch}, step=batch)
        log.log_metrics({'lr-AdamW/group0': 0.5, 'name': 'text'}, step=batch)
    log.log_metrics({'metrics/eval/loss': 7}, step=5)  # whenever it comes
    log.close(None, None)
    records = read_log(tmp_path / 'log.jsonl')
    assert [record['batch'] for record in records] == [0, 2, 4, 5]
    assert records[1] == {'batch': 2, 'loss/train/total': 0.5, 'lr-AdamW/group0': 0.5}
    assert records[-1] == {'batch': 5, 'metrics/eval/loss': 7.0}


def test_a_resumed_run_overrides_the_batches_it_repeats(tmp_path):
    path = tmp_path / 'log.jsonl'
    path.write_text('{"batch": 1, "a": 1}\n{"batch": 2, "a": 2}\n{"batch": 3, "a"')
    log = JsonlLog(path, every=1)
    log.log_metrics({'a': 20.0}, step=2)
    log.close(None, None)
    assert read_log(path) == [{'batch': 1, 'a': 1}, {'batch': 2, 'a': 20.0}]
    assert read_log(tmp_path / 'none.jsonl') == []
