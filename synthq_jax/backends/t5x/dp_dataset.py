"""Draws Poisson batches for T5X's training loop."""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from synthq_jax import extras
from synthq_jax.backends.t5x import batches
from synthq_jax.backends.t5x import release as release_lib
from synthq_jax.data import feature_converters
from synthq_jax.privacy import sampling

with extras.required("seqio"):
  from clu.data import dataset_iterator

with extras.required("t5x"):
  from t5x import utils

__all__ = ["PoissonBatches", "get_dataset"]


def get_dataset(
  cfg: utils.DatasetConfig,
  shard_id: int,
  num_shards: int,
  feature_converter_cls: Callable[..., Any],
  num_epochs: int | None = None,
  continue_from_last_checkpoint: bool = False,
  *,
  release: release_lib.Release,
) -> "PoissonBatches":
  """Makes the batches of a training; bind it to `train.get_dataset_fn`.

  Every host reads the whole split into its memory, since a batch may hold any
  record. All hosts draw the same batch, and each yields its part. `shuffle` and
  `seed` of the configuration have no effect.

  Formal guarantee: batches are those of `sampling.Poisson`, functions of the
  release's secret and the number of the step, however often T5X is resumed.

  Args:
    cfg: configuration of the training split; batch_size includes padding.
    shard_id: number of this host's part of a batch.
    num_shards: number of parts of a batch.
    feature_converter_cls: feature converter of the model.
    num_epochs: must be None, since steps are counted, not epochs.
    continue_from_last_checkpoint: must be False; the step determines the batch.
    release: the release, shared with the trainer.

  Returns:
    An iterator that begins at the trainer's step.

  Raises:
    ValueError: if the configuration or the data differs from the release's.
  """
  settings = release.settings
  if num_epochs is not None or continue_from_last_checkpoint:
    raise ValueError(
      "expected num_epochs=None and continue_from_last_checkpoint=False, got"
      f" {num_epochs=}, {continue_from_last_checkpoint=}: batches follow from"
      " the step"
    )
  if cfg.pack:
    raise ValueError(
      "expected DatasetConfig.pack = False, got True: packing joins several"
      " examples in one row, which would be clipped as one"
    )
  if cfg.batch_size != settings.max_batch_size or cfg.batch_size % num_shards:
    raise ValueError(
      "expected DatasetConfig.batch_size of Settings.max_batch_size ="
      f" {settings.max_batch_size}, a multiple of the {num_shards} hosts' parts,"
      f" got {cfg.batch_size}: set both by BATCH_SIZE"
    )
  if cfg.module:
    importlib.import_module(cfg.module)
  if not cfg.task_feature_lengths:
    raise ValueError(
      "expected DatasetConfig.task_feature_lengths, got"
      f" {cfg.task_feature_lengths}: lengths that follow from the longest text"
      " would tell about it; set TASK_FEATURE_LENGTHS"
    )
  read = functools.partial(_read_task, cfg, feature_converter_cls)
  # Hashed first, so that one copy at a time is in memory. A training that goes on
  # has the digest of records that were checked when it began.
  part = {} if release.has_begun else read(leaves_out=True)
  part = batches.count_records(part)
  records, digest = batches.in_order(read())
  count = len(records[batches.EXAMPLE_ID])
  if count != settings.num_examples:
    raise ValueError(
      f"expected NUM_EXAMPLES={settings.num_examples} examples in split"
      f" {cfg.split!r}, got {count}: the noise was computed for the former"
    )
  if part and part - batches.count_records(records):
    raise ValueError(
      f"expected preprocessors of {cfg.mixture_or_task_name} that look at one raw"
      f" record at a time, got others for split {cfg.split!r}: one record less"
      " changes or adds examples of other records, as draws by a record's place,"
      " limits on their number and prompts of other records do; draw by the"
      " record's own content (a hash as the seed), or leave the preprocessor out"
    )
  release.check_records(digest)
  return PoissonBatches(records, release, shard_id, num_shards)


def _read_task(
  cfg: utils.DatasetConfig,
  feature_converter_cls: Callable[..., Any],
  *,
  leaves_out: bool = False,
) -> dict[str, np.ndarray]:
  """Reads the records of a split, or two thirds of them."""
  return feature_converters.read_task(
    cfg.mixture_or_task_name,
    cfg.split,
    cfg.task_feature_lengths,
    feature_converter_cls(pack=False),
    use_cached=cfg.use_cached,
    leaves_out=leaves_out,
  )


class PoissonBatches(dataset_iterator.DatasetIterator):
  """Yields a batch of padding alone, and then the batches of a training.

  T5X asks for a batch before its trainer exists and knows the step, and gets the
  padding. `dp_trainer.DPTrainer` skips it.
  """

  def __init__(
    self,
    records: Mapping[str, np.ndarray],
    release: release_lib.Release,
    shard: int,
    num_shards: int,
  ):
    """Stores records and builds the batch of padding; draws nothing."""
    self._records, self._release = records, release
    self._shard, self._num_shards = shard, num_shards
    rows = release.settings.max_batch_size // num_shards
    padding = sampling.Batch(np.zeros(rows, int), np.ones(rows, bool))
    self._first = sampling.take(records, padding)
    self._is_first = True

  @property
  def element_spec(self) -> dict[str, dataset_iterator.ArraySpec]:
    """Dtype and shape of this host's part of each feature."""
    return {
      name: dataset_iterator.ArraySpec(dtype=x.dtype, shape=x.shape)
      for name, x in self._first.items()
    }

  def __next__(self) -> dict[str, np.ndarray]:
    if self._is_first:
      self._is_first = False
      return self._first
    drawn = self._release.settings.sampler.batch(
      self._release.batch_seed(), self._release.next_step()
    )
    part = sampling.split(drawn, self._num_shards)[self._shard]
    return sampling.take(self._records, part)

  def reset(self) -> None:
    """Does nothing: the trainer's step determines the batch."""

  def save(self, filename: Any) -> None:
    """Does nothing: batches are functions of the step, which T5X saves."""
    del filename

  def restore(self, filename: Any) -> None:
    """Does nothing, as `save`."""
    del filename
