"""Defines the terms of every claim: unit, public facts, assumptions and limits.

There is one value of `Terms` for each kind of private training of the project.
Terms are names of sentences in sentences.toml; `claim` adds the numbers.
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
  """The words of a claim.

  Each is a sentence of your own, or a name of sentences.toml.
  """

  unit: unit_lib.Unit = unit_lib.EXAMPLE
  """The unit of privacy."""
  mechanism: str = "records"
  """The clipped and noised quantity: a name of sentences.toml, or words."""
  public: tuple[str, ...] = ()
  """Facts that are treated as public."""
  assumptions: tuple[str, ...] = ()
  """Assumptions of the claim."""
  not_protected: tuple[str, ...] = ()
  """Facts that the claim does not protect."""
  notes: tuple[str, ...] = ()
  """Steps by which the result is derived."""
  secret_is_fixed: bool = False
  """Whether anybody can recompute the noise."""
  without_noise: str = ""
  """Note of a training without noise, whose statement then has no ledger. Empty:
  the statement has a ledger and an infinite epsilon."""

  def but(
    self,
    *,
    assumptions: Sequence[str] = (),
    not_protected: Sequence[str] = (),
    **fields: Any,
  ) -> "Terms":
    """Returns these terms with more sentences and replaced fields.

    Args:
      assumptions: sentences to add in front.
      not_protected: sentences to add at the end.
      **fields: new values of other fields.
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
"""Terms of any model trained on private examples, such as a classifier."""

QUERIES = dataclasses.replace(
  EXAMPLES,
  unit=unit_lib.QUERY,
  public=("documents", "number", "vocabulary", "settings"),
  assumptions=("record", "kept", *EXAMPLES.assumptions[1:]),
  not_protected=("which_documents", *_SHOWN),
)
"""Terms of a generator or retriever trained on private queries."""

RANKED = dataclasses.replace(
  QUERIES, assumptions=("judged", "found", *EXAMPLES.assumptions)
)
"""Terms of a ranker of the documents that BM25 and a retriever find."""

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
"""Terms of noisy mean scores over private test queries."""

T5X = EXAMPLES.but(
  mechanism="t5x",
  public=("number", "vocabulary", "settings"),
  assumptions=("t5x_example", "t5x_evaluation"),
  without_noise="no_noise",
)
"""Terms of a task trained inside T5X."""

IMAGE_PAIRS = Terms(
  unit=unit_lib.IMAGE_PAIR,
  public=("test_images", "number", "settings"),
  assumptions=("record", *_BATCHES, "trials", "image_trials", "ideal_numbers"),
  not_protected=_SHOWN,
  notes=("public_head",),
  without_noise="no_noise",
)
"""Terms of an image encoder trained on pairs of images."""

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
"""Terms of federated averaging that protects whole clients."""
