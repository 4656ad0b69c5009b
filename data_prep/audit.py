"""Check a dataset and show what is in it, on one page for a browser.

    python -m data_prep.audit DATASET [--sample N] [--report FILE]

DATASET is a folder or URL (s3://, gs://, oci://) that data_prep.convert or data_prep.encode has written; all its streams are looked at.
Every shard is compared with its SHA-256 in index.json, and every sample is decoded and compared with its columns and the manifest:
images, their sizes and digests, captions and their weights, latents, which have to be finite. The counts of manifest.json, index.json
and failures.parquet have to agree, and no key may be there twice. Nothing is changed; what is wrong is listed with what to do about it.
"""

import os
import time
from pathlib import Path

from pydantic import PositiveInt

from data_prep.mds.command import exit_code, host_processes
from diffusion.common.command_line import Arguments, option, positional
from diffusion.common.text import print_message, print_page
from diffusion.contracts.errors import BAD_INPUT, DataError, IncompleteError
from diffusion.contracts.manifest import Manifest

EXIT_CODES = """exit codes: 0 the dataset is sound; 2 it is not, or is no dataset, or an option is wrong;
3 storage could not be read, or a worker was killed: the same command may succeed later"""


class AuditRequest(Arguments):
    """Dataset to check."""

    dataset: str = positional('DATASET', 'folder or URL of an MDS dataset of images or latents')
    sample: PositiveInt | None = option(
        None,
        'check N samples spread evenly over the dataset instead of all, and read and hash only the shards that hold them; '
        'of the other shards only presence and size are checked',
        'N',
    )
    report: Path | None = option(None, 'the page (default: DATASET/report.html, or ./audit-NAME.html for a URL)', 'FILE')
    processes: PositiveInt | None = option(None, 'worker processes on this host (default: its cores)', 'N')


def main() -> int:
    args = AuditRequest.parse('data_prep.audit', __doc__, EXIT_CODES)
    return exit_code(args.dataset, lambda: audit_and_report(args.dataset, args.report, args.sample, args.processes or host_processes()))


def audit_and_report(dataset: str, report: Path | None, sample: int | None, processes: int) -> int:
    """Check the dataset, say what was found, write the page; returns the exit code."""
    start = time.monotonic()
    remote = '://' in dataset
    if not remote and not Path(dataset).is_dir():
        raise DataError(f'{dataset}: no such folder; name the folder or URL of a dataset')
    path = report or (Path(f'audit-{dataset.rstrip("/").rpartition("/")[2]}.html') if remote else Path(dataset) / 'report.html')
    if path.is_dir() or not os.access(path.parent, os.W_OK):  # said before hours of reading
        raise DataError(f'{path}: no file can be written there; name another place for the report with --report FILE')
    Manifest.read(dataset)
    from data_prep.auditing.dataset import audit_dataset, complaint, summary  # what reads is imported after arguments and files are looked at

    found = audit_dataset(dataset, sample, processes)
    print_page(summary(found, time.monotonic() - start))
    if found.findings.problems:
        print_message(complaint(found))
    from data_prep.auditing.page import write_report  # draws with matplotlib, which the workers need not import

    try:
        write_report(found, path)
    except OSError as error:
        raise IncompleteError(f'{path}: the report could not be written: {error}; name another place with --report FILE') from error
    print_page(f'  report: {path}')
    return BAD_INPUT if found.findings.problems else 0


if __name__ == '__main__':
    raise SystemExit(main())
