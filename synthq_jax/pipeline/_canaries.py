"""The canaries of a run: made of its public documents, from its secret."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.audit import candidates
from synthq_jax.pipeline import inputs, results, workspace

__all__ = ["check", "check_coins", "make"]

_TEXTS_PER_CANARY = 2


def make(
  settings: Any,
  space: workspace.Workspace,
  prepared: results.PreparedData,
  name: str = "",
) -> tuple[canaries_lib.Canary, ...]:
  """Makes the canaries, the same ones each time.

  Args:
    settings: a `plan.Canaries`.
    space: the working directory, whose secret draws texts, secrets and coins.
    prepared: documents and vocabulary; no private query is read.
    name: of the repetition: each has canaries of its own.

  Returns:
    The canaries; none where none are wanted.

  Raises:
    ValueError: if the vocabulary has no symbols for a kind.
  """
  if not settings.number:
    return ()
  cells = len(settings.kinds) * len(settings.repetitions)
  wanted = _TEXTS_PER_CANARY * cells * settings.number
  return canaries_lib.make(
    _texts(space, prepared, wanted, space.seed(f"canary texts{name}")),
    inputs.vocabulary(space, prepared),
    number=settings.number,
    kinds=settings.kinds,
    repetitions=settings.repetitions,
    digits=settings.digits,
    seed=space.seed(f"canaries{name}"),
  )


def check(
  config: Any,
  space: workspace.Workspace,
  prepared: results.PreparedData,
  canaries: tuple[canaries_lib.Canary, ...],
) -> None:
  """Refuses what an audit would refuse once everything is trained.

  Args:
    config: a `plan.RunConfig`.
    space: the working directory.
    prepared: vocabulary and lengths.
    canaries: from `make`.

  Raises:
    ValueError: if a coin has fallen to one side only, a secret does not fit the
      lengths, or there are fewer secrets than candidates.
  """
  if not canaries:
    return
  check_coins(canaries)
  vocabulary = inputs.vocabulary(space, prepared)
  one_of_each = tuple({canary.kind: canary for canary in canaries}.values())
  canaries_lib.tokenize(
    one_of_each,
    vocabulary,
    prefix=config.finetune_dp.prefix,
    document_length=prepared.document_length,
    query_length=prepared.query_length,
  )
  rng = np.random.default_rng(0)  # to see whether it can be done
  symbols = canaries_lib.alphabets((c.kind for c in one_of_each), vocabulary)
  for canary in one_of_each:
    own = symbols[canary.kind]
    candidates.draw(canary, own, config.audit.num_ranked, rng)
    if canaries_lib.KINDS[canary.kind].side == "query":
      candidates.draw(canary, own, config.audit.num_candidates, rng)


def check_coins(canaries: Sequence[canaries_lib.Canary]) -> None:
  """Refuses canaries without a control group, or without anything to find.

  Raises:
    ValueError: if all coins fell to one side.
  """
  inserted = sum(canary.inserted for canary in canaries)
  if not 0 < inserted < len(canaries):
    raise ValueError(
      f"expected inserted and held-out canaries, got {inserted} inserted of"
      f" {len(canaries)}: set a greater plan.Canaries.number"
    )


def _texts(
  space: workspace.Workspace,
  prepared: results.PreparedData,
  wanted: int,
  seed: list[int],
) -> list[str]:
  """Draws documents that have any text, without reading all into memory."""
  rng = np.random.default_rng(seed)
  num = prepared.num_documents
  chosen = set(rng.permutation(num)[:wanted].tolist())
  with open(inputs.corpus(space, prepared), encoding="utf-8") as stream:
    lines = [line for i, line in enumerate(stream) if i in chosen]
  texts = [inputs.document_text(line) for line in lines]
  return [text for text in texts if text.split()]
