"""Encoded batches become samples."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from data_prep.encoding.pixels import Encoding, Pixels
from data_prep.mds.parts import PartsWriting


class Writing(PartsWriting):
    """Writes the parts of an encoding."""

    def __init__(self, encoding: Encoding):
        super().__init__(encoding.job, encoding.columns, encoding.shard_bytes)

    def write(self, batch: Pixels, moments_on_device: Tensor, embeddings_on_device: Mapping[str, Tensor]) -> None:
        """Write an encoded batch; the tensors may not be computed yet."""
        writer, moments = self.writer(batch.part), moments_on_device.cpu().numpy()
        embeddings = {column: encoded.cpu().numpy() for column, encoded in embeddings_on_device.items()}
        for i, row in enumerate(batch.rows):
            if not np.isfinite(moments[i]).all():
                writer.drop(row['key'], row.get('url', ''), 'latents not finite')
                continue
            values = {**row, 'moments': moments[i], **{column: encoded[i] for column, encoded in embeddings.items()}}
            writer.keep({column: values[column] for column in self.columns[batch.stream]}, batch.stream)
