"""A command of data_prep whose parts take a while, so that a test can meet it in the middle: `python -m tests.data_prep.engines.slowly MODULE ...`."""

import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from data_prep.converting import conversion as converting
from data_prep.converting.conversion import Conversion
from data_prep.encoding import dataset as encoding
from data_prep.encoding.dataset import EncodeWork
from data_prep.mds.job import Tally
from data_prep.sources.base import Part

PART_SEC = float(os.environ.get('SLOW_PART_SEC', '0.5'))


class SlowConversion(Conversion):
    def __call__(self, part: Part) -> Tally:
        time.sleep(PART_SEC)
        return super().__call__(part)


class SlowEncoding(EncodeWork):
    def start_fed(self, cpus: int, gpus: float) -> Callable[[Iterator[Any]], Tally]:
        encode = super().start_fed(cpus, gpus)

        def slowly(messages: Iterator[Any]) -> Tally:
            time.sleep(PART_SEC)
            return encode(messages)

        return slowly


if __name__ == '__main__':
    from tests.data_prep.engines import slowly  # under a name that workers can import

    converting.Conversion, encoding.EncodeWork = slowly.SlowConversion, slowly.SlowEncoding  # type: ignore[misc]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name='__main__')
