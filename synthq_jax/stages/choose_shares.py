"""Chooses shares beside BM25 by noisy scores on private dev queries.

What public queries choose (`fuse`) cannot know how well a retriever answers the
private ones. Here these choose: every share of every retriever that may be shared
is scored on the dev queries, and one Gaussian mechanism releases all scores. Where
a rule that looks at one record alone divides the records, dev queries pay for this
and for no training, so that it adds nothing to what a record pays at most (the study
`tuning` asks dev queries, too: then they pay for both). Rows without privacy, which
nobody releases, choose without noise; rows that are only compared, and claims for
other units, keep the share that public queries choose.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Float

from synthq_jax import artifacts
from synthq_jax.models import t5_checkpoints
from synthq_jax.pipeline import (
  config_types,
  inputs,
  noisy_sums,
  results,
  system_results,
)
from synthq_jax.privacy import rounding, terms
from synthq_jax.retrieval import encode, fusion, trec
from synthq_jax.stages import _search, stage

__all__ = ["STAGE", "Config", "run"]

_SPLIT = "dev"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is tried, and for which promise; every value is public."""

  enabled: bool = False
  """Whether dev queries choose; if not, `fuse` asks public ones."""
  epsilon: float = 1.0
  """Of all scores together, beside what the retrievers cost. Where a rule divides
  the records, up to the least of theirs it raises nobody's total."""
  delta: float | None = None
  """Of the promise; None: 1 / (2n), n the larger number of dev and of train
  queries, or users."""
  shares: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
  """Of a retriever beside BM25, ascending, in [0, 1]; noise grows as the square
  root of their number times that of the retrievers."""
  widest: float = artifacts.speed_only(
    0.02
  )  # what is released has no part in it
  """Standard deviation of the noise on a mean, at most; with more noise nothing is
  released, and public queries choose."""
  batch_size: int = artifacts.speed_only(256)
  """Queries encoded at once."""

  def __post_init__(self):
    config_types.positive(self, "epsilon", "delta", "widest")
    config_types.at_least(self, 1, "batch_size")
    pairs = zip((0.0, *self.shares), (*self.shares, 1.0), strict=True)
    if not self.shares or not all(low <= high for low, high in pairs):
      raise ValueError(
        "expected ascending shares in [0, 1] in choose_shares.Config.shares, got"
        f" {self.shares}"
      )


def jobs(run):
  """Yields one release for all retrievers that may be shared, and "without"."""
  config = run.config.choose_shares
  if not (config.enabled and run.config.rows.fused):
    return
  shared, without = {}, {}
  for name, made in run.retrievers.items():
    claimed = made.value.statement
    is_private = results.is_private_path(made.value.directory)
    if math.isinf(claimed.epsilon) and is_private:
      without[name] = made
    elif results.is_shareable(made.value) and (
      claimed.is_public or claimed.unit == run.prepared.unit
    ):
      shared[name] = made
  size = len(shared) * len(config.shares)
  if refused := _refusal(config, size, run.prepared):
    run.say(f"[choose_shares] left to public queries: {refused}")
    return
  for name, rows in (("", shared), ("without", without)):
    if rows:
      vectors = {row: run.rows("encode_documents")[row] for row in rows}
      yield stage.Job(
        name=name,
        depends=(
          config,
          (run.config.fuse.method, run.config.fuse.depth),
          run.config.evaluate.drop_identical,
          *run.data,
          {row: (rows[row].digest, vectors[row].digest) for row in rows},
        ),
        settings=config,
        inputs={
          "retrievers": {row: made.value for row, made in rows.items()},
          "vectors": {row: made.value for row, made in vectors.items()},
          "fusion": run.config.fuse,
          "drop_identical": run.config.evaluate.drop_identical,
        },
      )


def check(run) -> None:
  """Refuses what could choose nothing, before anything is trained.

  Raises:
    ValueError: if nothing is fused, a weight is set, or dev queries are too few or
      are trained on or scored as well.
  """
  config, prepared = run.config.choose_shares, run.prepared
  if not config.enabled:
    return
  rows = run.config.rows
  if not rows.fused:
    raise ValueError(
      "choose_shares.Config.enabled=True needs plan.Rows.fused=True, got False"
    )
  if run.config.fuse.weight is not None:
    raise ValueError(
      "expected fuse.Config.weight=None where choose_shares.Config.enabled=True,"
      f" got {run.config.fuse.weight:g}: set one or the other"
    )
  if _SPLIT in prepared.test_split.split("+"):
    raise ValueError(
      "choose_shares chooses on dev queries, got scores on them, too"
      f" (TEST_SPLIT='{prepared.test_split}'): set TEST_SPLIT='test', or"
      " choose_shares.Config.enabled=False"
    )
  expected = 1 + rows.public_only + sum(map(math.isfinite, rows.synthetic))
  expected *= max(1, len(run.config.seeds))
  if refused := _refusal(config, expected * len(config.shares), prepared):
    raise ValueError(f"choose_shares: {refused}")
  folder, asked = run.root / prepared.private_directory, {}
  for split in ("train", _SPLIT, prepared.test_split):
    arrays = inputs.arrays(run, prepared, folder / f"{split}.npz")
    asked[split] = {*map(str, arrays["ids"])}
  for split in ("train", prepared.test_split):
    if both := len(asked[split] & asked[_SPLIT]):
      raise ValueError(
        f"choose_shares chooses on dev queries, got {both:,} of them in split"
        f" {split!r}, too: set choose_shares.Config.enabled=False"
      )


def run(task: stage.Task) -> system_results.ChosenShares:
  """Scores every share of every retriever, and adds the noise.

  Formal guarantee:
    Unit: one dev query with its judgements, or all dev queries of one user, at
    most K. Relation: ADD_OR_REMOVE_ONE, n public. The released scores are one
    Gaussian mechanism with the sum that `noisy_sums.centred_sum` bounds, and
    satisfy the statement of the result, which the ledger holds before noise is
    drawn. What the retrievers cost comes on top, by `joint.claim`. Everything
    else (which share is best) is post-processing. Rows whose epsilon is infinite
    get no noise and a result under `private/`, with their own statement.

  Args:
    task: with the working directory's secret; its inputs are "prepared", the
      data; "retrievers" by row, all with a finite epsilon or all without;
      "vectors" of the documents by row; "fusion", a `fuse.Config`; and
      "drop_identical", as `evaluate.Config` has it.

  Returns:
    The scores; they may be shared where the retrievers may be.
  """
  config, space = task.settings, task.folders
  prepared, fuse = task.inputs["prepared"], task.inputs["fusion"]
  retrievers = task.inputs["retrievers"]
  folder = space.root / prepared.private_directory
  judged = _search.asked(
    space, prepared, folder, _SPLIT, folder / f"{_SPLIT}.npz"
  )
  judged = judged._replace(drop_identical=task.inputs["drop_identical"])
  lexical = _search.lexical(judged, fuse.depth)
  tables = []
  for row, retriever in retrievers.items():
    dense = _dense(task, judged, retriever, task.inputs["vectors"][row])
    tables.append(_scores(task, judged, lexical, dense))
  table = np.concatenate(tables, axis=1)  # [query, row x share]
  statement = next(iter(retrievers.values())).statement
  is_private, noise, means = True, 0.0, table.mean(axis=0)
  if math.isfinite(statement.epsilon):
    promise = noisy_sums.of_split(
      config, prepared, _SPLIT, terms.SHARES,
      how=terms.SUMMED, size=table.shape[1], space=space,
    )  # fmt: skip
    total = noisy_sums.centred_sum(table)
    statement, noisy = noisy_sums.draw(task, promise, total)
    noise = promise.noise_multiplier * promise.l2_sensitivity / len(table)
    is_private, means = False, noisy_sums.MIDDLE + noisy / len(table)
  by_row = zip(retrievers, means.reshape(len(retrievers), -1), strict=True)
  return system_results.ChosenShares(
    directory=space.relative(task.folder(private=is_private)),
    statement=statement,
    num_queries=len(table),
    noise=noise,
    scores={
      row: tuple(zip(config.shares, of_row.tolist(), strict=True))
      for row, of_row in by_row
    },
    systems=results.releases_behind(retrievers.values()),
  )


def _refusal(config: Config, size: int, prepared: results.PreparedData) -> str:
  """Says what is wrong with more noise than scores can stand."""
  number = prepared.num_queries.get(_SPLIT, 0)
  if not number:
    return "there are no dev queries"
  if not size:
    return ""
  made = noisy_sums.of_split(config, prepared, _SPLIT, terms.SHARES, size=size)
  std = made.noise_multiplier * made.l2_sensitivity
  if std / number <= config.widest:
    return ""
  return (
    f"expected noise of at most {config.widest:g} on a mean, got"
    f" {std / number:.2g}: {size} scores of {number:,} dev queries at epsilon"
    f" {rounding.epsilon(config.epsilon)}, where about"
    f" {math.ceil(std / config.widest):,} would do; try fewer shares, or raise"
    " choose_shares.Config.epsilon"
  )


def _dense(task, judged, retriever, vectors) -> trec.Run:
  """Returns what a retriever finds for the dev queries."""
  params, model_config = t5_checkpoints.load(
    task.folders.root / retriever.directory
  )
  asked = encode.encode(
    params,
    model_config,
    judged.query_tokens,
    batch_size=task.settings.batch_size,
  )
  documents = task.folders.root / vectors.vectors
  return _search.nearest(judged, documents, asked, task.inputs["fusion"].depth)


def _scores(
  task, judged, lexical: trec.Run, dense: trec.Run
) -> Float[np.ndarray, "query share"]:
  """Returns each query's score at each share, in the order of the judgements."""
  fuse, shares = task.inputs["fusion"], task.settings.shares
  by_share = fusion.scores(
    fuse.method,
    lexical,
    dense,
    judged.qrels,
    shares,
    depth=fuse.depth,
  )
  return np.stack([by_share[share] for share in shares], axis=1)


STAGE = stage.of(
  __name__,
  needs=("encode_documents",),
  reads=("prepared",),
  needs_secret=True,
)
