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
from synthq_jax.pipeline import inputs, results, workspace
from synthq_jax.retrieval import encode

__all__ = ["ATTACKS", "Model", "Released", "load", "scores"]

ATTACKS = ("likelihood", "synthetic", "retriever")
"""The generator itself; its synthetic queries alone; a retriever trained on
them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Released:
  """What came of a generator, beside what came of the public checkpoint."""

  generator: results.Checkpoint
  """Fine-tuned with the canaries."""
  written: results.SyntheticQueries | None = None
  """Its queries as they were written; None: they were not."""
  synthetic: results.SyntheticQueries | None = None
  """Those that filters kept, or all."""
  public_synthetic: results.SyntheticQueries | None = None
  """Those of the public checkpoint."""
  retriever: results.Checkpoint | None = None
  """Trained on `synthetic`."""
  public_retriever: results.Checkpoint | None = None
  """Before any training of this run."""


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


def load(directory: Any, prompt_tokens: int = 0) -> Model:
  """Reads a checkpoint of any known format."""
  params, config = t5_checkpoints.load(directory)
  return Model(params=params, config=config, prompt_tokens=prompt_tokens)


def scores(
  wanted: Sequence[str],
  space: workspace.Workspace,
  prepared: results.PreparedData,
  released: Released,
  *,
  model: Model,
  public: Model,
  records: Mapping[str, Int[np.ndarray, "canary length"]],
  batch_size: int,
) -> dict[str, Float[np.ndarray, " canary"]]:
  """Scores every canary by each attack for which there is material.

  Args:
    wanted: of `ATTACKS`.
    space: the working directory.
    prepared: vocabulary and lengths.
    released: what the attackers are given.
    model: the generator.
    public: the checkpoint it started from.
    records: tokens of all canaries, without a prompt.
    batch_size: records scored at once.

  Returns:
    For each attack the scores, calibrated by what is public.
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
        for one in (model, public)
      )
    )
  pair = released.synthetic, released.public_synthetic
  if "synthetic" in wanted and None not in pair:
    found["synthetic"] = membership.calibrated(
      *(_under_ngrams(space, one, prepared, records["targets"]) for one in pair)
    )
  pair = released.retriever, released.public_retriever
  if "retriever" in wanted and None not in pair:
    # A retriever reads documents without the generator's prefix.
    sides = (
      records["targets"],
      records["inputs"][:, -prepared.document_length :],
    )
    found["retriever"] = membership.calibrated(
      *(_similarities(space, one, sides) for one in pair)
    )
  return found


def _under_ngrams(space, synthetic, prepared, targets):
  """Returns log-likelihoods under n-grams of a set of synthetic queries."""
  path = space.root / synthetic.directory / "tokens.npz"
  written = inputs.arrays(space, synthetic, path)["tokens"]
  fitted = membership.NgramModel.fit(written, vocab_size=prepared.vocab_size)
  return fitted.log_likelihoods(targets)


def _similarities(space, retriever, sides):
  """Returns cosines of each canary's query and document under a retriever."""
  model = load(space.root / retriever.directory)
  vectors = [
    encode.encode(model.params, model.config, tokens) for tokens in sides
  ]
  return membership.similarities(*vectors)
