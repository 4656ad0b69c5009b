"""Log what the encoders of other machines do, and let go of the cluster when the run ends."""

import time

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.common.ray_cluster import disconnect
from diffusion.online.pool import Pool


class EncodersLog(Callback):
    """Logs, as the first rank sees them: encoders that serve, those that were replaced, images/s of each, and the share of the time that was waited
    for them and not for the loader.

    Args:
        every: batches between two records.
    """

    def __init__(self, pool: Pool, every: int):
        self.pool, self.every = pool, every
        self.last: tuple[float, int, float] | None = None  # when, images, seconds waited

    def batch_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0 or state.timestamp.batch.value % self.every:
            return
        pool, last = self.pool, self.last
        self.last = now = time.monotonic(), pool.num_images, pool.waited_sec
        metrics: dict[str, float] = {'encoders/serving': pool.num_serving, 'encoders/replaced': pool.num_replaced}
        if last is not None:
            seconds, images, waited_sec = (later - earlier for earlier, later in zip(last, now, strict=True))
            metrics['encoders/images_per_sec_per_encoder'] = images * dist.get_world_size() / seconds / len(pool.members)
            metrics['encoders/wait_share'] = waited_sec / seconds
        logger.log_metrics(metrics)

    def close(self, state: State, logger: Logger) -> None:
        """Before this process ends, or starts itself anew: the encoders end with the first rank's."""
        disconnect()
