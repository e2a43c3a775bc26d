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

import dataclasses

import dp_accounting

from synthq_jax.privacy import accounting, sampling
from synthq_jax.privacy import statement as statement_lib

__all__ = ["NEGATIVES", "RELATION", "SiloPrivacy"]

NEGATIVES = ("public", "own")
"""Where the negatives of a record come from."""

PUBLIC = (
  "The number of the client's train questions, and which client it is.",
  "The settings: model, vocabulary, where training starts, learning rates, "
  "clip norm, batch size, steps of a round, rounds and noise.",
)
ASSUMPTIONS = (
  "A record is one question with the one of its answers that is trained on, in "
  "one client, and is drawn and clipped as one.",
  "In a round a client starts from published parameters, which saw its records "
  "through noisy sums that this claim counts, and nowhere else.",
  "A record's negatives are mined for it alone: the encoder gives a text the "
  "same vector, to the last bit, whatever is encoded beside it (tested on CPUs).",
  "The client takes part in no more rounds than are counted, and every round is "
  "counted whether its result was used or not.",
  "The seeds of sampling and noise stay with the client: whoever knows them can "
  "recompute the noise and take it away.",
  "Losses, gradient norms, scores, batches and mined negatives of the client "
  "are not published; every intermediate model may be, the server's eyes "
  "included.",
  "The settings were chosen without looking at the client's questions; trials "
  "that did look are listed as releases of their own.",
  statement_lib.IDEAL_NUMBERS,
)
NOT_PROTECTED = (
  "How many train questions the client has.",
  "A sentence that answers several questions is protected less: it is in the "
  "record of each.",
  "What many questions have in common: learning that is the purpose.",
)
_PUBLIC_CORPUS = "The corpus that negatives come from."
_SENTENCES = (
  "What the client's sentences say: they are negatives of many questions."
)

RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
"""Of the claim."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiloPrivacy:
  """The public settings of one client's private training.

  Formal guarantee:
    Relation: ADD_OR_REMOVE_ONE, for everybody who sees all models that the
    client sends, and those between its steps. Unit, with `negatives="public"`:
    a question with its answer sentence. With `negatives="own"`: a question and
    which sentence answers it, while the client's sentences stay as they are.
    `epsilon` at `delta`, if `steps` counts all steps of `silo.private_training`, each
    on a batch of `silo.batches` that was drawn for no other step. Public: these
    settings, and the corpus of public negatives. Assumes `ASSUMPTIONS`.

    A record is one client's. What other clients send depends on it through
    this client's noisy sums alone, so no more is lost by their training: each
    client has its own ledger, and its epsilon is that of its records.

  >>> sampler = sampling.Poisson.with_margin(
  ...     num_examples=4000, expected_batch_size=64)
  >>> privacy = SiloPrivacy(sampler=sampler, steps=600, l2_clip_norm=0.1,
  ...                       noise_multiplier=1.0, delta=1e-4)
  >>> round(privacy.epsilon, 2)
  1.97
  """

  sampler: sampling.Poisson
  """Draws the train questions of a step."""
  steps: int
  """Steps in all rounds together that the client may take part in."""
  l2_clip_norm: float
  """Of a record's gradient, over all parameters."""
  noise_multiplier: float
  """Noise standard deviation over the clip norm."""
  delta: float
  """Of the claim, below 1 / (the client's number of train questions)."""
  negatives: str = "public"
  """One of `NEGATIVES`."""

  def __post_init__(self):
    """Refuses draws and negatives that nothing is claimed for."""
    if not isinstance(self.sampler, sampling.Poisson):
      raise ValueError(
        "expected a privacy.sampling.Poisson as SiloPrivacy.sampler, got"
        f" {type(self.sampler).__name__}: make one with Poisson.with_margin"
      )
    if self.negatives not in NEGATIVES:
      raise ValueError(
        f"expected SiloPrivacy.negatives among {NEGATIVES}, got negatives="
        f"{self.negatives!r}"
      )

  @property
  def epsilon(self) -> float:
    """Of all steps, at `delta`; infinite without noise."""
    return accounting.epsilon(
      noise_multiplier=self.noise_multiplier,
      delta=self.delta,
      sampler=self.sampler,
      steps=self.steps,
      relation=RELATION,
    )

  def statement(self, identifier: str) -> statement_lib.PrivacyStatement:
    """Returns the client's claim, for its ledger, before the first round.

    Args:
      identifier: names this client in this run and no other.

    Raises:
      ValueError: if accounting refuses the settings.
    """
    is_public = self.negatives == "public"
    return statement_lib.training(
      identifier=identifier,
      sampler=self.sampler,
      noise_multiplier=self.noise_multiplier,
      l2_clip_norm=self.l2_clip_norm,
      steps=self.steps,
      delta=self.delta,
      relation=RELATION,
      unit="question with its answer" if is_public else "question",
      mechanism="per-question gradients in a client, clipped, summed, Gaussian"
      " noise",
      public=(*PUBLIC, _PUBLIC_CORPUS) if is_public else PUBLIC,
      assumptions=ASSUMPTIONS,
      not_protected=(
        NOT_PROTECTED if is_public else (*NOT_PROTECTED, _SENTENCES)
      ),
    )
