"""Computes membership scores of a run's canaries for each attack.

Formal guarantee: none; every number computed from canaries is private.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from synthq_jax import typing
from synthq_jax.audit import membership
from synthq_jax.models import t5_checkpoints, t5_config
from synthq_jax.models import token_ids as token_ids_lib
from synthq_jax.retrieval import encode
from synthq_jax.runtime import inputs, results, workspace

__all__ = ["ATTACKS", "Model", "compute_scores", "load"]

ATTACKS = ("likelihood", "synthetic", "retriever")
"""Attacks by what the attacker has: the generator, its synthetic queries alone,
or a retriever trained on them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """A T5 and its configuration."""

  params: typing.Params
  config: t5_config.T5Config


def load(
  directory: Any, *, token_ids: token_ids_lib.TokenIds | None = None
) -> Model:
  """Reads a checkpoint of any known format.

  Args:
    directory: folder of the checkpoint.
    token_ids: special ids of the vocabulary, if the checkpoint may lack them.
  """
  params, config = t5_checkpoints.load(directory, token_ids=token_ids)
  return Model(params=params, config=t5_config.require(config, directory))


def compute_scores(
  space: workspace.Folders,
  prepared: results.PreparedData,
  attacks: Sequence[str],
  batch_size: int,
  *,
  models: tuple[Model, Model],
  records: Mapping[str, Int[np.ndarray, "canary length"]],
  written: tuple[results.SyntheticQueries | None, ...],
  retrievers: tuple[results.Checkpoint | None, ...],
) -> dict[str, Float[np.ndarray, " canary"]]:
  """Scores every canary by each attack whose models or queries exist.

  Each pair of models, queries or retrievers is that of the generator and that
  of the public checkpoint; None: it does not exist.
  """
  by_attack = {}
  if "likelihood" in attacks:
    by_attack["likelihood"] = membership.calibrated(
      *(
        membership.log_likelihoods(
          source.params,
          source.config,
          records["inputs"],
          records["targets"],
          batch_size=batch_size,
        )
        for source in models
      )
    )
  if "synthetic" in attacks and None not in written:
    by_attack["synthetic"] = membership.calibrated(
      *(
        _score_by_ngrams(space, source, prepared, records["targets"])
        for source in written
      )
    )
  if "retriever" in attacks and None not in retrievers:
    # A retriever reads documents without the generator's prefix.
    sides = (
      records["targets"],
      records["inputs"][:, -prepared.document_length :],
    )
    by_attack["retriever"] = membership.calibrated(
      *(_compute_similarities(space, source, sides) for source in retrievers)
    )
  return by_attack


def _score_by_ngrams(space, synthetic, prepared, targets):
  path = space.root / synthetic.directory / "tokens.npz"
  written = inputs.arrays(space, synthetic, path)["tokens"]
  fitted = membership.NgramModel.fit(written, vocab_size=prepared.vocab_size)
  return fitted.log_likelihoods(targets)


def _compute_similarities(space, retriever, sides):
  model = load(space.root / retriever.directory)
  vectors = [
    encode.encode(model.params, model.config, tokens) for tokens in sides
  ]
  return membership.similarities(*vectors)
