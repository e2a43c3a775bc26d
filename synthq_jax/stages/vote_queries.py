"""Lets private train queries choose among written ones: a vote, with noise.

Each train query votes for the written query that is nearest to it; written ones
with more noisy votes than a threshold stay. One round, no training: with queries of
the public checkpoint (`plan.Rows.voted = ('public_only',)`) the vote is the only
private step; with those of a generator it is a second one, after training, and
the row's epsilon covers both.

References:
  Lin et al. 2024, Differentially Private Synthetic Data via Foundation Model APIs
  (Private Evolution), arXiv:2305.15560; Xie et al. 2024, for text,
  arXiv:2403.01749.
"""

import dataclasses
import math

import numpy as np
from scipy import stats

from synthq_jax.models import encoders
from synthq_jax.pipeline import config_types, inputs, noisy_sums, results
from synthq_jax.pipeline import queries as queries_lib
from synthq_jax.privacy import rounding, terms
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import encode
from synthq_jax.retrieval import index as index_lib
from synthq_jax.stages import _written, stage

__all__ = ["PREFIX", "STAGE", "Config", "kept", "run"]

PREFIX = "voted_"
"""Before the name of the set of queries that is chosen from."""
_BLOCK = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(queries_lib.Config):
  """How votes are counted, and for which promise; every value is public."""

  epsilon: float = 8.0
  """Of a row: of its votes, and of the generator that wrote, together."""
  delta: float | None = None
  """Of the votes; None: 1 / (2n), n train queries or users."""
  threshold: float = 2.0
  """Standard deviations of the noise that the votes for what stays exceed."""

  def __post_init__(self):
    super().__post_init__()
    config_types.positive(self, "epsilon", "delta", "threshold")
    if math.isinf(self.epsilon):
      raise ValueError("vote_queries.Config.epsilon must be finite, got inf")


def jobs(run):
  """Yields a vote on each set of queries of `plan.Rows.voted`."""
  config = run.config.vote_queries
  for name, (written, source) in run.written.items():
    if results.row_of(name) not in run.config.rows.voted:
      continue
    settings = run.seeded(config, name)
    compared = run.compared(f"synthetic_{PREFIX}{name}")
    yield stage.Job(
      name=f"{PREFIX}{name}",
      depends=(settings, *run.encoder_data, source, *compared),
      settings=settings,
      inputs={"synthetic": written, "compared": compared},
    )


def check(run) -> None:
  """Refuses rows whose epsilon a generator spends alone.

  Raises:
    ValueError: naming the row.
  """
  config = run.config.vote_queries
  spent = {
    stage.row_name(epsilon): epsilon for epsilon in run.config.rows.synthetic
  }
  for row in run.config.rows.voted:
    if not spent.get(row, 0.0) < config.epsilon:
      raise ValueError(
        "vote_queries.Config.epsilon must be above what the generator of the row"
        f" {row} costs, got {rounding.epsilon(config.epsilon)}: raise it, or take queries of a"
        " generator at a smaller epsilon"
      )


def run(task: stage.Task) -> results.SyntheticQueries:
  """Counts the votes, adds the noise, and keeps what exceeds the threshold.

  Formal guarantee:
    Unit: one train query, or one user. Relation: ADD_OR_REMOVE_ONE, n public. The
    votes are one Gaussian mechanism with the vector of `noisy_sums.counted` over
    the written queries: a query's place is the exact nearest one, a function of
    that query, the public encoder and the written queries alone. These were
    public, or released before, and depend on no vote; the statement joins both
    claims. What stays is post-processing of the noisy votes.

  Args:
    task: with the working directory's secret; its inputs are "prepared", the
      data; "encoder", the folder of a public checkpoint; "synthetic", the written
      queries; and whether the row is only "compared".

  Returns:
    What stays; under `private/` if it is only compared, or what was written is.

  Raises:
    ValueError: if the noise leaves nothing, or would by itself keep more than
      votes can.
  """
  config, space = task.settings, task.folders
  prepared, synthetic = task.inputs["prepared"], task.inputs["synthetic"]
  ids = inputs.document_tokens(space, prepared).ids
  written = _written.read(space, ids, synthetic)
  number = len(written.names)
  path = space.root / prepared.private_directory / "train.npz"
  private = inputs.arrays(space, prepared, path)
  units = prepared.units("train")
  promise = noisy_sums.of_split(
    config, prepared, "train", terms.VOTES,
    how=terms.WEIGHED, space=space, beside=synthetic.statement,
  )  # fmt: skip
  std = promise.noise_multiplier * promise.l2_sensitivity
  _check_noise(config, std, number, units)
  places = _nearest(task, written.tokens, private["tokens"])
  votes = noisy_sums.counted(places, number, private.get("users"))
  statement, noisy = noisy_sums.draw(task, promise, votes)
  stay = kept(noisy, config.threshold * std)
  if not len(stay):
    raise ValueError(
      f"vote_queries: none of {number:,} written queries has more than"
      f" {config.threshold:g} standard deviations of noise ({std:.3g} votes each):"
      " lower the threshold, write fewer queries, or raise epsilon"
    )
  directory = task.folder(
    private=bool(task.inputs.get("compared"))
    or results.is_private_path(synthetic.directory)
  )
  corpus = inputs.corpus(space, prepared)
  return _written.save(
    task,
    written.take(stay),
    directory,
    index=queries_lib.index_of(ids, corpus),
    corpus=corpus,
    name=task.name,
    statement=_statement(synthetic, statement),
    removed=synthetic.removed | {"not voted for": number - len(stay)},
    filters=f"{synthetic.filters} What stays has the votes of private queries for"
    f" the nearest, with noise of {std:.3g} votes each, above"
    f" {config.threshold * std:.3g}.".strip(),
  )


def kept(noisy: np.ndarray, threshold: float) -> np.ndarray:
  """Returns the places with more noisy votes than a threshold, ascending.

  >>> kept(np.array([0.5, 3.0, -1.0]), 2.0)
  array([1])
  """
  return np.flatnonzero(noisy > threshold)


def _nearest(task, written: np.ndarray, private: np.ndarray) -> np.ndarray:
  """Returns the nearest written query of each private one, the first of equals."""
  params, model_config = inputs.load_public(
    task.inputs["encoder"], task.inputs["prepared"]
  )
  params = encoders.of(model_config).select(params)

  def vectors(tokens: np.ndarray) -> np.ndarray:
    size = task.settings.batch_size
    return encode.encode(params, model_config, tokens, batch_size=size)

  index = index_lib.exact(vectors(written))
  asked = vectors(private)
  found = [
    index.search(asked[i : i + _BLOCK], 1)[1][:, 0]
    for i in range(0, len(asked), _BLOCK)
  ]
  return np.concatenate(found)


def _check_noise(config: Config, std: float, written: int, units: int) -> None:
  """Refuses noise that alone would keep more than all votes together can."""
  by_noise = written * stats.norm.sf(config.threshold)

  def excess(units: int) -> float:  # without that noise grows with log n
    return by_noise * config.threshold * std / units

  if excess(units) > 1:
    raise ValueError(
      f"vote_queries: expected votes to keep more than noise, got {units:,} voters,"
      f" who can lift {units / (config.threshold * std):,.0f} of {written:,} written"
      f" queries over {config.threshold:g} standard deviations ({std:.3g} votes"
      f" each), and noise {by_noise:,.0f} at epsilon"
      f" {rounding.epsilon(config.epsilon)}; about"
      f" {noisy_sums.enough(excess, units):,} would do: raise epsilon or the"
      " threshold, or write fewer queries"
    )


def _statement(
  synthetic: results.SyntheticQueries, votes: statement_lib.PrivacyStatement
) -> statement_lib.PrivacyStatement:
  """Joins the claims of who wrote and of who voted."""
  return noisy_sums.joined(
    [synthetic.statement, votes],
    "Of the written queries those stay that noisy votes of private queries chose.",
  )


STAGE = stage.of(
  __name__,
  needs=("filter_queries",),
  reads=("prepared", "encoder"),
  needs_secret=True,
)
