"""How unevenly negatives fall on the sentences.

In many dimensions some points, the hubs, are among the nearest of very many
others. Taken as negatives, they are what all questions learn to avoid, while
most sentences are never seen.

References:
  Radovanovic et al., "Hubs in Space: Popular Nearest Neighbors in
  High-Dimensional Data", JMLR 11, 2010, section 2 (skewness of N_k).
"""

import dataclasses

import numpy as np
from jaxtyping import Int

__all__ = ["Hubness", "measure"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hubness:
  """How often sentences occur in a table of negatives."""

  skewness: float
  """Of the numbers of occurrences: 0 if they are symmetric about their mean,
  large where few sentences occur very often. 0 too where all occur equally
  often."""
  largest: int
  """Occurrences of the sentence that occurs most often."""
  largest_share: float
  """The share of the questions that have that sentence."""
  used_share: float
  """The share of the sentences that occur at all."""


def measure(table: Int[np.ndarray, "... n"], num_sentences: int) -> Hubness:
  """Counts how often each sentence is a negative.

  It says how negatives are spread, not whether they are hard or false; and
  compares tables of equal size alone: with more draws all shares grow.

  >>> measure(np.array([[0, 1], [0, 2]]), 4).largest_share
  1.0

  Args:
    table: positions of sentences, -1 for none; the last axis are those of one
      question, all different.
    num_sentences: how many could occur.

  Returns:
    The measures.

  Raises:
    ValueError: if the table is empty or holds a position that is no sentence's.
  """
  if not table.size or table.max() >= num_sentences:
    raise ValueError(
      f"expected negatives below num_sentences={num_sentences}, got a table of"
      f" shape {table.shape}; give the client's number of sentences"
    )
  counts = np.bincount(table[table >= 0], minlength=num_sentences)
  deviations = counts - counts.mean()
  spread = counts.std()
  skewness = float(np.mean((deviations / spread) ** 3)) if spread else 0.0
  questions = table.size // table.shape[-1]
  return Hubness(
    skewness=skewness,
    largest=int(counts.max()),
    largest_share=float(counts.max() / questions),
    used_share=float(np.mean(counts > 0)),
  )
