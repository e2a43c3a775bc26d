"""What a client's private training promises about its single questions.

Where the negatives of a question come from decides what is protected:

- "public": from a public corpus, mined for each question by itself. Nothing of
  the client's collection but the record's own question and answer is read, and
  the unit is both of them.
- "own": from the client's sentences. A sentence then stands in the rows of many
  questions, and clipping rows bounds nothing for it. The unit is the question
  with the mark which sentence answers it; what the sentences say is NOT
  protected. That is enough for a client that does not hide its documents, and
  too little for one with private passages.

A sentence that answers m questions is in m records in either case;
`statement.group` says what is left for it.
"""

import dp_accounting

from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import sampling, terms

__all__ = ["NEGATIVES", "RELATION", "claim"]

NEGATIVES = ("public", "own")
"""Where the negatives of a record come from."""

RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
"""Of the claim."""


def claim(
  *,
  sampler: sampling.Poisson,
  steps: int,
  l2_clip_norm: float,
  noise_multiplier: float,
  delta: float,
  negatives: str = "public",
) -> claim_lib.Claim:
  """Returns the promise of one client's private training.

  Formal guarantee:
    Relation: ADD_OR_REMOVE_ONE, for everybody who sees all models that the
    client sends, and those between its steps. Unit, with `negatives="public"`:
    a question with its answer sentence. With `negatives="own"`: a question and
    which sentence answers it, while the client's sentences stay as they are.
    That of `claim.Claim`, if `steps` counts all steps of
    `silo.private_training`, each on a batch of `silo.batches` that was drawn
    for no other step. Public: these settings, and the corpus of public
    negatives. Assumes what `terms.silo` says.

    A record is one client's. What other clients send depends on it through
    this client's noisy sums alone, so no more is lost by their training: each
    client has its own ledger, and its epsilon is that of its records.

  >>> draws = sampling.Poisson(
  ...     num_examples=9, expected_batch_size=3, max_batch_size=9)
  >>> own = {"l2_clip_norm": 0.1, "noise_multiplier": 1.0, "negatives": "own"}
  >>> claim(sampler=draws, steps=60, delta=1e-4, **own).words.unit
  'question'

  Args:
    sampler: draws the train questions of a step.
    steps: in all rounds together that the client may take part in.
    l2_clip_norm: of a record's gradient, over all parameters.
    noise_multiplier: noise standard deviation over the clip norm.
    delta: below 1 / (the client's number of train questions).
    negatives: one of `NEGATIVES`.

  Raises:
    ValueError: for draws and negatives that nothing is claimed for.
  """
  if not isinstance(sampler, sampling.Poisson):
    raise ValueError(
      "expected a privacy.sampling.Poisson as the sampler of a client, got"
      f" {type(sampler).__name__}: make one with Poisson.with_margin"
    )
  if negatives not in NEGATIVES:
    raise ValueError(
      f"expected negatives among {NEGATIVES}, got negatives={negatives!r}"
    )
  return claim_lib.Claim(
    sampler=sampler,
    steps=steps,
    noise_multiplier=noise_multiplier,
    l2_clip_norm=l2_clip_norm,
    delta=delta,
    relation=RELATION,
    words=terms.silo(negatives),
  )
