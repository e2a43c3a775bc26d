"""SeqIO's converter for dual encoders, with the names that T5X Retrieval reads.

Encoder-decoder tasks need none of ours: seqio.EncDecFeatureConverter takes them
as they are.
"""

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  import seqio

__all__ = ["dual_encoder"]

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


@functools.cache
def _classes() -> dict[bool, Any]:
  """Makes the classes when SeqIO, and with it TensorFlow, is wanted."""
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
      """Pads, and renames."""
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
