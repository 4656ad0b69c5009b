import torch

from diffusion.monitoring.records import JsonlLog
from diffusion.monitoring.report.run import read_log


def test_metrics_of_a_batch_share_a_line_and_intervals_are_kept(tmp_path):
    log = JsonlLog(tmp_path / 'log.jsonl', every=2)
    for batch in range(5):  # as Composer does: the loss before the batch is counted, the rest after
        log.log_metrics({'loss/train/total': torch.tensor(batch / 4), 'trainer/device_train_microbatch_size': 8}, step=batch)
        log.log_metrics({'lr-AdamW/group0': 0.5}, step=batch)
        log.log_metrics({'name': 'text', 'time/batch': 7}, step=batch + 1)
    log.log_metrics({'metrics/eval/loss': 7, 'metrics/eval/loss_t000-099': float('nan')}, step=5)  # whenever it comes
    log.close(None, None)
    assert (tmp_path / 'log.jsonl').read_text().splitlines()[-1] == '{"batch": 5, "metrics/eval/loss": 7.0, "metrics/eval/loss_t000-099": null}'
    records = read_log(tmp_path / 'log.jsonl')
    assert [record['batch'] for record in records] == [2, 4, 5]
    assert records[0] == {'batch': 2, 'loss/train/total': 0.25, 'lr-AdamW/group0': 0.5}  # the second batch's loss
    assert records[-1] == {'batch': 5, 'metrics/eval/loss': 7.0}


def test_a_resumed_run_overrides_the_batches_it_repeats(tmp_path):
    path = tmp_path / 'log.jsonl'
    path.write_text('{"batch": 1, "a": 1}\n{"batch": 2, "a": 2}\n{"batch": 3, "a"')
    log = JsonlLog(path, every=1)
    log.log_metrics({'a': 20.0}, step=2)
    log.close(None, None)
    assert read_log(path) == [{'batch': 1, 'a': 1}, {'batch': 2, 'a': 20.0}]
    assert read_log(tmp_path / 'none.jsonl') == []
