"""Holds the special ids of a T5 and its vocabulary.

In arrays of this library id 0 always is padding, and starts a decoder's output, as
in SeqIO and T5X. The ids below differ between models.
"""

import dataclasses

__all__ = ["TokenIds"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenIds:
  """The special ids of a model; the defaults are those of Google's T5.

  >>> TokenIds(eos=2, unk=3)  # ruT5
  TokenIds(pad=0, eos=2, unk=3)
  """

  pad: int = 0
  """Id of padding in files for other libraries; arrays here hold 0."""
  eos: int = 1
  """Id of the end of a text."""
  unk: int = 2
  """Id of a character without a piece."""

  def __post_init__(self):
    for name in ("pad", "eos", "unk"):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
          f"TokenIds.{name} must be an id, at least 0, got {name}={value!r}"
        )
    if not self.eos:
      raise ValueError(
        "TokenIds.eos must be above 0, which is padding in arrays, got eos=0"
      )
