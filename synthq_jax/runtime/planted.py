"""Makes the canaries of a run; every stage gets the same ones."""

from typing import Any

import numpy as np

from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.runtime import inputs, results, workspace

__all__ = ["make"]

_TEXTS_PER_CANARY = 2


def make(
  settings: Any,
  space: workspace.Workspace,
  prepared: results.PreparedData,
) -> tuple[canaries_lib.Canary, ...]:
  """Makes the canaries of a run; every call returns the same ones.

  Args:
    settings: a `plan.Canaries`.
    space: the working directory, whose secret draws texts, secrets and coins.
    prepared: documents and vocabulary; no private query is read.

  Returns:
    The canaries; empty if `settings.number` is 0.

  Raises:
    ValueError: if the vocabulary has no symbols for a kind.
  """
  if not settings.number:
    return ()
  cells = len(settings.kinds) * len(settings.repetitions)
  rng = np.random.default_rng(space.seed("canary texts"))
  num_texts = _TEXTS_PER_CANARY * cells * settings.number
  chosen = set(rng.permutation(prepared.num_documents)[:num_texts].tolist())
  # Lines are read one by one: the collection may not fit into memory.
  with open(inputs.corpus(space, prepared), encoding="utf-8") as stream:
    lines = [line for i, line in enumerate(stream) if i in chosen]
  texts = [inputs.parse_document_text(line) for line in lines]
  return canaries_lib.make(
    [text for text in texts if text.split()],
    inputs.vocabulary(space, prepared),
    number=settings.number,
    kinds=settings.kinds,
    repetitions=settings.repetitions,
    digits=settings.digits,
    seed=space.seed("canaries"),
  )
