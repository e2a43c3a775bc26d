"""Membership scores of canaries: a high score suggests an inserted canary.

The attacker has the fine-tuned generator and knows the canaries' texts, which
the auditor wrote, and guesses which canaries were inserted: `log_likelihoods` of
a query given its document. Short queries and common words score high under every
model. So the audit subtracts the scores of the public checkpoint that the training
started from, which never saw a canary: a log-likelihood ratio.

Formal guarantee: none. A score is computed from canaries that belong to the
private records, so it is as private as they are. Higher scores of inserted
canaries show a leak; equal scores show that this attacker found none.

References:
  Carlini et al., "Extracting Training Data from Large Language Models", USENIX
  Security 2021, section 5.2 (another model's likelihood as a reference).
"""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from synthq_jax import typing
from synthq_jax.losses import seq2seq
from synthq_jax.models import t5, t5_config

__all__ = [
  "apply_in_batches",
  "log_likelihoods",
  "score_in_batches",
]


def log_likelihoods(
  params: typing.Params,
  model_config: t5_config.T5Config,
  inputs: Int[np.ndarray, "record input"],
  targets: Int[np.ndarray, "record length"],
  *,
  batch_size: int = 256,
) -> Float[np.ndarray, " record"]:
  """Returns log P(query | document) under a T5, EOS included, in nats.

  This is the score of an attacker who has the generator's parameters, or its
  probabilities of texts, and knows a canary's query and document.

  Formal guarantee: none; private, as the canaries are.

  Args:
    params: parameters of `t5.Transformer`.
    model_config: configuration of the model.
    inputs: tokens of documents as the generator reads them, prefix included;
      0 = padding.
    targets: tokens of queries; 0 = padding.
    batch_size: records scored at once; changes memory and speed only. The last
      batch is filled up, so that one shape is compiled.

  Returns:
    Log-likelihoods in float64, at most 0.

  Raises:
    ValueError: if inputs and targets are not as many, an id is negative, a query
      has no token, or the model gives a number that is not finite, as it does for
      ids beyond its vocabulary.
  """
  inputs, targets = np.asarray(inputs), np.asarray(targets)
  _check_records(inputs, targets)
  params = jax.device_put(params)
  return score_in_batches(
    lambda rows: _score(
      params, inputs[rows], targets[rows], model_config=model_config
    ),
    len(targets),
    batch_size,
  )


def apply_in_batches(
  function: Callable[[Int[np.ndarray, " batch"]], Array],
  total: int,
  batch_size: int,
) -> np.ndarray:
  """Calls a function on batches of rows of one size, so that it compiles once.

  Args:
    function: function from positions of rows to one value for each. The last
      batch is filled up with its first row.
    total: number of rows, at least 1.
    batch_size: rows at once, at least 1.

  Returns:
    The values of all rows, in order.
  """
  size, parts = min(batch_size, total), []
  for begin in range(0, total, size):
    rows = np.arange(begin, begin + size)
    parts.append(np.asarray(function(np.where(rows < total, rows, begin))))
  return np.concatenate(parts)[:total]


def score_in_batches(
  function: Callable[[Int[np.ndarray, " batch"]], Array],
  total: int,
  batch_size: int,
) -> Float[np.ndarray, " record"]:
  """Calls `apply_in_batches` and returns the log-likelihoods in float64.

  Raises:
    ValueError: if one is not finite.
  """
  values = apply_in_batches(function, total, batch_size).astype(np.float64)
  if not np.isfinite(values).all():
    raise ValueError(
      "expected finite log-likelihoods, got others for"
      f" {np.sum(~np.isfinite(values))} of {total} records: look for a model"
      " that diverged, or train with a lower learning rate"
    )
  return values


def _check_records(inputs: np.ndarray, targets: np.ndarray) -> None:
  """Refuses records that would get a number that says nothing."""
  if not 0 < len(targets) == len(inputs):
    raise ValueError(
      "expected inputs and targets of the same records, at least one, got"
      f" {len(inputs)} and {len(targets)}"
    )
  # JAX would take a negative id from the end of the vocabulary.
  if min(inputs.min(initial=0), targets.min(initial=0)) < 0:
    raise ValueError("expected ids of at least 0, got negative ones")
  empty = np.sum(~np.any(targets != seq2seq.PADDING_ID, axis=-1))
  if empty:
    raise ValueError(
      f"expected targets with tokens, got {empty} of padding alone: leave them"
      " out, every model gives them probability 1"
    )


@functools.partial(jax.jit, static_argnames=("model_config",))
def _score(
  params: typing.Params,
  inputs: Int[Array, "batch input"],
  targets: Int[Array, "batch length"],
  *,
  model_config: t5_config.T5Config,
) -> Float[Array, " batch"]:
  """Returns the log-likelihood of each query given its document."""
  model = t5.Transformer(model_config)
  logits = model.apply({"params": params}, inputs, t5.shift_right(targets))
  return -seq2seq.cross_entropy(logits, targets, normalization="sum")
