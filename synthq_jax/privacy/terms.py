"""The terms of every promise: unit, what is public, assumed, not protected.

One value of `Terms` for each kind of private training of the project. Terms are
names of sentences that stand in sentences.toml alone; `claim` adds the numbers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from synthq_jax.privacy import unit as unit_lib

__all__ = [
  "CLIENT", "EXAMPLES", "IMAGE_PAIRS", "QUERIES", "RANKED", "SCORES", "T5X",
  "Terms",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
  """What is promised to whom.

  A sentence is one of your own, or a name of sentences.toml.
  """

  unit: unit_lib.Unit = unit_lib.EXAMPLE
  """What one record is."""
  mechanism: str = "records"
  """What is clipped and noised: a name of sentences.toml, or words."""
  public: tuple[str, ...] = ()
  """What everybody is taken to know."""
  assumptions: tuple[str, ...] = ()
  """What must hold for the promise to hold."""
  not_protected: tuple[str, ...] = ()
  """What is not promised."""
  notes: tuple[str, ...] = ()
  """How the result is derived."""
  secret_is_fixed: bool = False
  """Whether anybody can recompute the noise."""
  without_noise: str = ""
  """What is noted where there is no noise; empty: epsilon is infinite."""

  def but(
    self,
    *,
    assumptions: Sequence[str] = (),
    not_protected: Sequence[str] = (),
    **fields: Any,
  ) -> "Terms":
    """Returns these terms with more sentences, and other fields.

    Args:
      assumptions: sentences that come first.
      not_protected: sentences that come last.
      **fields: values in place of these.
    """
    return dataclasses.replace(
      self,
      assumptions=(*assumptions, *self.assumptions),
      not_protected=(*self.not_protected, *not_protected),
      **fields,
    )


_BATCHES = ("secret_seeds", "secret_batches")
_SHOWN = ("how_many", "common")

EXAMPLES = Terms(
  public=("number", "settings"),
  assumptions=("record", *_BATCHES, "unpublished", "trials", "ideal_numbers"),
  not_protected=_SHOWN,
)
"""Of any model that is trained on private examples, as a classifier."""

QUERIES = dataclasses.replace(
  EXAMPLES,
  unit=unit_lib.QUERY,
  public=("documents", "number", "vocabulary", "settings"),
  assumptions=("record", "kept", *EXAMPLES.assumptions[1:]),
  not_protected=("which_documents", *_SHOWN),
)
"""Of a generator or retriever that is trained on private queries."""

RANKED = dataclasses.replace(
  QUERIES, assumptions=("judged", "found", *EXAMPLES.assumptions)
)
"""Of what ranks the documents that BM25 and a retriever find."""

SCORES = Terms(
  unit=unit_lib.QUERY,
  mechanism="scores",
  public=("documents", "number", "scored"),
  assumptions=(
    *("record", "judged", "found", "systems", "secret_seeds", "unpublished"),
    *("trials", "ideal_numbers"),
  ),
  not_protected=_SHOWN,
)
"""Of means over private test queries."""

T5X = EXAMPLES.but(
  mechanism="t5x",
  public=("number", "vocabulary", "settings"),
  assumptions=("t5x_example", "t5x_evaluation"),
  without_noise="no_noise",
)
"""Of a task that is trained inside T5X."""

IMAGE_PAIRS = Terms(
  unit=unit_lib.IMAGE_PAIR,
  public=("test_images", "number", "settings"),
  assumptions=("record", *_BATCHES, "trials", "image_trials", "ideal_numbers"),
  not_protected=_SHOWN,
  notes=("public_head",),
  without_noise="no_noise",
)
"""Of an image encoder that is trained on pairs of images."""

CLIENT = Terms(
  unit=unit_lib.CLIENT,
  mechanism="updates",
  public=("number", "vocabulary", "settings"),
  assumptions=(
    *("record", "sent", "dropping_out", "sums", "taking_part"),
    *("secret_seeds", "trials", "ideal_numbers"),
  ),
  not_protected=_SHOWN,
)
"""Of federated averaging that hides whole clients."""
