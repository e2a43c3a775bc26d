"""Converts SeqIO's records to the features of models, and reads a task whole.

The converter for dual encoders has the names that T5X Retrieval reads.

Encoder-decoder tasks need none of ours: seqio.EncDecFeatureConverter takes them
as they are.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from synthq_jax import extras

if TYPE_CHECKING:
  import seqio

__all__ = ["dual_encoder", "read_task"]

_CHUNK = 4096
"""Records that are converted together."""

_LEFT = "left_encoder_input_tokens"
_RIGHT = "right_encoder_input_tokens"
_NEGATIVE = "right_negative_encoder_input_tokens"


def dual_encoder(
  pack: bool = False,
  use_custom_packing_ops: bool = False,
  *,
  negatives: bool = False,
  **kwargs: Any,
) -> "seqio.FeatureConverter":
  """Returns a converter of (query, document) pairs for a dual encoder.

  The task's "inputs" (queries) become left_encoder_input_tokens, its "targets"
  (documents) right_encoder_input_tokens and its "negative_targets"
  right_negative_encoder_input_tokens, all int32, padded with 0.

  Args:
    pack: must be False: two queries in one row would see each other, and one
      person's record would no longer be one row.
    use_custom_packing_ops: taken because T5X passes it; must be False.
    negatives: whether the task has "negative_targets".
    **kwargs: of seqio.FeatureConverter.

  Raises:
    ValueError: if packing is asked for.
  """
  if pack or use_custom_packing_ops:
    raise ValueError(
      "expected pack=False for a dual encoder, got packing: each row has to be"
      " one pair"
    )
  return _classes()[negatives](pack=False, **kwargs)


def read_task(
  task: "str | seqio.Task",
  split: str,
  lengths: Mapping[str, int],
  converter: "seqio.FeatureConverter",
  *,
  use_cached: bool = False,
) -> dict[str, np.ndarray]:
  """Reads a split of a task once, as a model's converter shows it.

  For samplers that ask for records by number: each record once, in the order in
  which the task gives them. A preprocessor that shuffles gives every machine
  another one; `backends.t5x.batches.in_order` sorts them.

  Args:
    task: the task or its name; no mixture, whose records have no numbers.
    split: of the task, e.g. "train".
    lengths: TASK_FEATURE_LENGTHS.
    converter: makes the model's features; it must not pack.
    use_cached: whether to read what seqio's cache_tasks_main wrote.

  Returns:
    One array for each of the model's features, one row for each record.

  Raises:
    ValueError: if it is a mixture, records are to be packed, or there are none.
  """
  with extras.required("seqio"):
    import seqio

  task = seqio.get_mixture_or_task(task) if isinstance(task, str) else task
  if isinstance(task, seqio.Mixture):
    raise ValueError(
      f"expected a task, got the mixture {task.name!r}, which repeats and mixes"
      " its records: make one task of them, so that each is there once"
    )
  if converter.pack:
    raise ValueError(
      "expected pack=False, got pack=True: packing joins several records in one"
      " row, which would be clipped as one; set DatasetConfig.pack = False"
    )
  rows = seqio.get_dataset(
    task,
    dict(lengths),
    dataset_split=split,
    shuffle=False,
    num_epochs=1,
    feature_converter=converter,
    use_cached=use_cached,
    seed=0,
  )
  blocks = list(rows.batch(_CHUNK).as_numpy_iterator())
  if not blocks:
    raise ValueError(
      f"expected records in split {split!r} of task {task.name!r}, got none"
    )
  joined = {n: [block[n] for block in blocks] for n in blocks[0]}
  return {name: np.concatenate(parts) for name, parts in joined.items()}


@functools.cache
def _classes() -> dict[bool, Any]:
  """Makes the classes when SeqIO, and with it TensorFlow, is wanted."""
  with extras.required("seqio"):
    import seqio
    import tensorflow as tf

  spec = seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)

  class DualEncoderFeatureConverter(seqio.FeatureConverter):
    """Pairs without negatives of their own."""

    NAMES = {"inputs": _LEFT, "targets": _RIGHT}
    TASK_FEATURES = dict.fromkeys(NAMES, spec)
    MODEL_FEATURES = dict.fromkeys(NAMES.values(), spec)
    PACKING_FEATURE_DTYPES = None

    def _convert_features(self, ds, task_feature_lengths):
      ds = self._pack_or_pad(ds, task_feature_lengths)
      passed = self._passthrough_features
      return ds.map(
        lambda row: {
          **{new: row[old] for old, new in self.NAMES.items()},
          **{name: row[name] for name in passed},
        },
        num_parallel_calls=tf.data.AUTOTUNE,
      )

    def get_model_feature_lengths(self, task_feature_lengths):
      """Returns the lengths under their new names."""
      return {
        **{new: task_feature_lengths[old] for old, new in self.NAMES.items()},
        **{n: task_feature_lengths[n] for n in self._passthrough_features},
      }

  class DualEncoderWithNegativesFeatureConverter(DualEncoderFeatureConverter):
    """Pairs, each with a negative."""

    NAMES = {
      **DualEncoderFeatureConverter.NAMES, "negative_targets": _NEGATIVE
    }  # fmt: skip
    TASK_FEATURES = dict.fromkeys(NAMES, spec)
    MODEL_FEATURES = dict.fromkeys(NAMES.values(), spec)

  return {
    False: DualEncoderFeatureConverter,
    True: DualEncoderWithNegativesFeatureConverter,
  }
