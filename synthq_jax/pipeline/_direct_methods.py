"""The methods of direct DP training: what is clipped, what that protects."""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import dp_accounting
import jax
import numpy as np

from synthq_jax import optim, typing
from synthq_jax.losses import contrastive
from synthq_jax.models import encoders, t5_checkpoints, t5_config
from synthq_jax.optim import contrastive as contrastive_lib

__all__ = [
  "LOSSES",
  "METHODS",
  "Claim",
  "Clipped",
  "build",
  "claim",
  "denominator",
  "encoder",
  "groups",
  "has_public_negatives",
  "keys",
]

METHODS = ("batch", "group", "logit", "row")
LOSSES = ("softmax", "sigmoid", "spreadout")

_MECHANISMS = {
  "batch": "the contrastive gradient of a whole batch, clipped as one",
  "group": (
    "contrastive gradients of groups of pairs, which a pair's own content"
    " assigns, clipped for each group and summed"
  ),
  "logit": (
    "gradients of the similarity of every query and document of a batch,"
    " clipped one by one, weighted and summed"
  ),
  "row": "gradients of each query's loss against {}, clipped and summed",
}
_AGAINST = {"public": "public documents", "batch": "the batch's documents"}
_NOT_THE_DOCUMENTS = (
  "Which documents were asked about, how often, and which of them were in one"
  " batch: the claim is about the texts of the queries alone."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
  """What a method protects, under which sampling."""

  relation: str
  """The neighbouring relation."""
  fixed_order: bool
  """Whether batches are public, and sampling amplifies nothing."""
  mechanism: str
  """In words."""
  record: str
  """What one record is, for the statement."""
  not_protected: tuple[str, ...]
  """Sentences for the statement."""


def claim(config: Any) -> Claim:
  """Returns what a configuration protects.

  Formal guarantee:
    Unit "pair" is claimed under Poisson sampling. For unit "query" the document
    stays, and where documents are negatives it moves the whole sum when its
    pair is drawn: who was drawn is visible, sampling amplifies nothing
    (docs/sensitivities.md), and batches are read in a fixed order, accounted as
    one release an epoch.

  Args:
    config: a `direct_dp.Config`.
  """
  text_alone = config.unit == "query"
  mechanism = _MECHANISMS[config.method].format(_AGAINST[config.negatives])
  over = "" if text_alone else ", over Poisson samples"
  return Claim(
    relation="REPLACE_SPECIAL" if text_alone else "ADD_OR_REMOVE_ONE",
    fixed_order=text_alone,
    mechanism=f"{mechanism}{over}, with Gaussian noise",
    record="query text" if text_alone else "query",
    not_protected=(_NOT_THE_DOCUMENTS,) if text_alone else (),
  )


def has_public_negatives(config: Any) -> bool:
  """Says whether batches hold public negatives."""
  return config.method == "row" and config.negatives == "public"


@dataclasses.dataclass(frozen=True)
class Clipped:
  """A clipped contrastive gradient whose unit is chosen, for `dp_step`."""

  fn: contrastive_lib.ContrastiveGrad
  unit: str

  @property
  def l2_clip_norm(self) -> float:
    """The norm of what is clipped."""
    return self.fn.l2_clip_norm

  def sensitivity(
    self, relation: dp_accounting.NeighboringRelation | str
  ) -> float:
    """Returns the L2 sensitivity of the sum for the unit."""
    return self.fn.sensitivity(relation, self.unit)

  def __call__(
    self,
    params: typing.Params,
    batch: typing.Batch,
    *,
    is_padding_example: jax.Array | None = None,
  ) -> tuple[typing.Params, contrastive_lib.ContrastiveAux]:
    """Returns the sum, and private losses and norms."""
    return self.fn(params, batch, is_padding_example=is_padding_example)


def build(config: Any, max_batch_size: int, encode: typing.EncodeFn) -> Clipped:
  """Builds the clipped gradient of a configuration.

  Args:
    config: a `direct_dp.Config`.
    max_batch_size: the sampler's.
    encode: `(params, tokens)` to vectors, of queries and documents.

  Raises:
    ValueError: if method and loss do not go together.
  """
  fn = optim.contrastive_clipped_grad(
    encode,
    encode,
    loss=_loss(config, max_batch_size),
    l2_clip_norm=config.clip_norm,
    method=_method(config),
    max_batch_size=max_batch_size,
    microbatch_size=config.microbatch_size,
  )
  return Clipped(fn, config.unit)


def _loss(config: Any, max_batch_size: int) -> Any:
  if config.loss == "softmax":
    return contrastive.Softmax(temperature=config.temperature)
  declared = max(2, max_batch_size)
  if config.loss == "sigmoid":
    return contrastive.Sigmoid(
      temperature=config.temperature,
      bias=config.bias,
      max_batch_size=declared,
    )
  return contrastive.Spreadout(max_batch_size=declared)


def _method(config: Any) -> Any:
  if config.method == "logit":
    return optim.Logit(norms=config.norms)
  if config.method == "row":
    return optim.Row(negatives=config.negatives, gradients=config.gradients)
  if config.method == "group":
    mean = config.group_size  # sizes are uneven: room for two deviations more
    return optim.Group(
      size=mean + math.ceil(2 * math.sqrt(mean)), groups=groups(config)
    )
  return optim.Batch()


def groups(config: Any) -> int:
  """Returns the public number of groups."""
  return max(1, config.batch_size // config.group_size)


def denominator(config: Any) -> float | None:
  """Returns the public divisor; None: the expected batch size."""
  return {"batch": 1.0, "group": float(groups(config))}.get(config.method)


def encoder(
  model_config: t5_config.T5Config, public: typing.Params
) -> Callable[..., jax.Array]:
  """Returns the encoder as a function of the trained parameters by path."""

  def encode(trained: typing.Params, tokens: jax.Array) -> jax.Array:
    params = t5_checkpoints.unflatten({**public, **trained})
    return encoders.of(model_config).encode(params, tokens)

  return encode


def keys(records: dict[str, np.ndarray], unit: str) -> np.ndarray:
  """Returns a number for each record that depends on its content alone.

  A group that went by the record's place would change for all that come after
  one that was removed. For unit "query" the number is the document's, which
  stays: a text that became empty must not take its pair to another group.

  Args:
    records: "queries" [record, length] and "rows" [record].
    unit: "pair" or "query".

  Returns:
    int32 [record].
  """
  names = ("queries", "rows") if unit == "pair" else ("rows",)
  parts = [
    np.ascontiguousarray(records[name]).astype(np.int32) for name in names
  ]
  digests = (
    functools.reduce(lambda d, x: zlib.crc32(x.tobytes(), d), record, 0)
    for record in zip(*parts, strict=True)
  )
  found = np.fromiter(digests, np.uint32, count=len(parts[0]))
  return found.view(np.int32)
