"""Membership scores of a run's canaries, by what an attacker is given.

Formal guarantee: none; whatever is computed of canaries is private.
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
from synthq_jax.retrieval import encode, ranks
from synthq_jax.runtime import inputs, results, workspace

__all__ = ["ATTACKS", "Model", "load", "scores"]

ATTACKS = ("likelihood", "synthetic", "retriever")
"""The generator itself; its synthetic queries alone; a retriever trained on
them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """A T5 and how many tokens of a prompt stand before its inputs."""

  params: typing.Params
  config: t5_config.T5Config
  prompt_tokens: int = 0

  def read(
    self, tokens: Int[np.ndarray, "canary length"]
  ) -> Int[np.ndarray, "canary longer"]:
    """Puts the prompt before inputs."""
    return inputs.with_prompt(
      tokens, self.prompt_tokens, self.config.vocab_size
    )


def load(
  directory: Any,
  *,
  prompt_tokens: int = 0,
  token_ids: token_ids_lib.TokenIds | None = None,
) -> Model:
  """Reads a checkpoint of any known format.

  Args:
    directory: of the checkpoint.
    prompt_tokens: tokens of a prompt that stand before its inputs.
    token_ids: of the vocabulary, where the checkpoint may not say them itself.
  """
  params, config = t5_checkpoints.load(directory, token_ids=token_ids)
  return Model(
    params=params,
    config=t5_config.require(config, directory),
    prompt_tokens=prompt_tokens,
  )


def scores(
  space: workspace.Folders,
  prepared: results.PreparedData,
  wanted: Sequence[str],
  batch_size: int,
  *,
  models: tuple[Model, Model],
  records: Mapping[str, Int[np.ndarray, "canary length"]],
  written: tuple[results.SyntheticQueries | None, ...],
  retrievers: tuple[results.Checkpoint | None, ...],
) -> dict[str, Float[np.ndarray, " canary"]]:
  """Scores every canary by each attack for which there is material.

  Models, queries and retrievers are those of the generator and of the public
  checkpoint; None: not there.
  """
  found = {}
  if "likelihood" in wanted:
    found["likelihood"] = membership.calibrated(
      *(
        membership.log_likelihoods(
          one.params,
          one.config,
          one.read(records["inputs"]),
          records["targets"],
          batch_size=batch_size,
        )
        for one in models
      )
    )
  if "synthetic" in wanted and None not in written:
    found["synthetic"] = membership.calibrated(
      *(
        _under_ngrams(space, one, prepared, records["targets"])
        for one in written
      )
    )
  if "retriever" in wanted and None not in retrievers:
    # A retriever reads documents without the generator's prefix.
    sides = (
      records["targets"],
      records["inputs"][:, -prepared.document_length :],
    )
    found["retriever"] = membership.calibrated(
      *(_similarities(space, one, sides) for one in retrievers)
    )
  return found


def _under_ngrams(space, synthetic, prepared, targets):
  path = space.root / synthetic.directory / "tokens.npz"
  written = inputs.arrays(space, synthetic, path)["tokens"]
  fitted = membership.NgramModel.fit(written, vocab_size=prepared.vocab_size)
  return fitted.log_likelihoods(targets)


def _similarities(space, retriever, sides):
  model = load(space.root / retriever.directory)
  vectors = [
    encode.encode(model.params, model.config, tokens) for tokens in sides
  ]
  return ranks.own_scores(*vectors)
