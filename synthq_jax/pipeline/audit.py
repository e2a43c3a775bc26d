"""Asks a fine-tuned generator for the secrets of its canaries.

Formal guarantee: none; everything here is private. An audit reads the canaries'
secrets and coins, so its numbers are no post-processing of the generator alone.
It can show that a claim is wrong, never that it is right.
"""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from synthq_jax import artifacts, typing
from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.audit import exposure
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.generation import decoding
from synthq_jax.losses import seq2seq
from synthq_jax.models import t5, t5_checkpoints, t5_config
from synthq_jax.pipeline import inputs, results, workspace

__all__ = ["Config", "run"]

_TYPE = "digits in the query of a made-up document"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How canaries are scored; who made them says how many there are."""

  num_candidates: int = 100
  """Secrets that each canary's own is ranked among, itself included."""
  queries_per_canary: int = 10
  """Queries written for each inserted canary's document, to find leaks."""
  prefix: str = "generate_query: "
  """Stands before each document, as in fine-tuning."""
  p: float = 0.8
  """Nucleus of the written queries, as in the generate stage."""
  batch_size: int = dataclasses.field(
    default=256, metadata={"speed_only": True}
  )
  """Candidates scored at once."""

  def __post_init__(self):
    for name, least in (
      ("num_candidates", 2),
      ("queries_per_canary", 1),
      ("batch_size", 1),
    ):
      if getattr(self, name) < least:
        raise ValueError(
          f"expected audit.Config.{name} >= {least}, got "
          f"{name}={getattr(self, name)}"
        )


class _Generator(NamedTuple):
  """The audited model and what turns text into its tokens."""

  params: typing.Params
  config: t5_config.T5Config
  vocabulary: Any  # seqio's; loading seqio takes seconds
  prepared: results.PreparedData
  prompt_tokens: int


def run(
  config: Config,
  space: workspace.Workspace,
  digest: str,
  *,
  prepared: results.PreparedData,
  checkpoint: results.Checkpoint,
  canaries: Sequence[canaries_lib.Canary],
  repetitions: int,
) -> results.AuditReport:
  """Ranks the secrets and looks for them in written queries.

  Writes private/audit/NAME/canaries.jsonl and summary.json; the latter has the
  control group and the intervals, too.

  Args:
    config: how to score.
    space: the working directory.
    digest: fingerprint to save the result under.
    prepared: vocabulary and lengths.
    checkpoint: the generator, fine-tuned with `canaries.pairs(canaries,
      repetitions)` among its private records.
    canaries: the same ones, held-out ones included.
    repetitions: how often each inserted one stood in the data.

  Returns:
    Means over the inserted canaries.

  Raises:
    ValueError: if no canary was inserted, one does not fit the lengths, or the
      vocabulary cannot tell its candidates apart.
  """
  start = time.monotonic()
  inserted = np.array([canary.inserted for canary in canaries], bool)
  if not inserted.any():
    raise ValueError(
      f"expected inserted canaries, got none of {len(canaries)}: make more"
    )
  params, model_config = t5_checkpoints.load(space.root / checkpoint.directory)
  generator = _Generator(
    params,
    model_config,
    inputs.vocabulary(space, prepared),
    prepared,
    checkpoint.prompt_tokens,
  )
  rng = np.random.default_rng(space.seed("audit candidates"))
  ranks = exposure.ranks(_likelihoods(config, generator, canaries, rng))
  written = _write(config, generator, canaries, space.key("audit queries"))
  leaked = np.array(
    [
      any(canaries_lib.stands_in(canary, text) for text in texts)
      for canary, texts in zip(canaries, written, strict=True)
    ]
  )
  directory = space.private("audit", checkpoint.name)
  _save_lines(directory, canaries, ranks, leaked, written)
  _save_summary(directory, config, inserted, ranks, leaked)
  bits = exposure.exposure(ranks[inserted], config.num_candidates)
  report = results.AuditReport(
    directory=space.relative(directory),
    name=checkpoint.name,
    canary_type=_TYPE,
    num_canaries=len(canaries),
    repetitions=repetitions,
    num_candidates=config.num_candidates,
    mean_rank=float(np.mean(ranks[inserted])),
    mean_exposure=float(np.mean(bits)),
    leaked=int(np.sum(leaked[inserted])),
    claimed_epsilon=checkpoint.statement.epsilon,
    seconds=time.monotonic() - start,
  )
  artifacts.save(directory, report, digest)
  return report


def _likelihoods(
  config: Config,
  generator: _Generator,
  canaries: Sequence[canaries_lib.Canary],
  rng: np.random.Generator,
) -> Float[np.ndarray, "canary candidate"]:
  """Scores every candidate of every canary, the secret in column 0."""
  texts = [
    (canaries_lib.query_with(canary, secret), canary.document)
    for canary in canaries
    for secret in canaries_lib.candidates(canary, config.num_candidates, rng)
  ]
  records = _tokenize(config, generator, texts)
  _check_distinct(records["targets"], config.num_candidates)
  params = jax.device_put(generator.params)
  scored = [
    np.asarray(_score(params, *batch, model_config=generator.config))
    for batch in _batches(records, config.batch_size)
  ]
  flat = np.concatenate(scored)[: len(texts)]
  return flat.reshape(len(canaries), config.num_candidates)


def _tokenize(
  config: Config, generator: _Generator, texts: Sequence[tuple[str, str]]
) -> dict[str, np.ndarray]:
  records = canaries_lib.tokenize(
    generator.vocabulary,
    texts,
    prefix=config.prefix,
    document_length=generator.prepared.document_length,
    query_length=generator.prepared.query_length,
  )
  records["inputs"] = inputs.with_prompt(
    records["inputs"], generator.prompt_tokens, generator.config.vocab_size
  )
  return records


def _check_distinct(targets: Int[np.ndarray, "row length"], num: int) -> None:
  """Refuses a vocabulary that writes two candidates of a canary alike."""
  for rows in targets.reshape(-1, num, targets.shape[1]):
    different = len(np.unique(rows, axis=0))
    if different < num:
      raise ValueError(
        f"expected {num} candidates of different tokens, got {different}: the "
        "vocabulary lacks digits, take one that has them"
      )


def _batches(
  records: dict[str, np.ndarray], size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields batches of one shape; the last is filled with its first row."""
  total = len(records["targets"])
  for begin in range(0, total, size):
    rows = np.arange(begin, begin + size)
    rows = np.where(rows < total, rows, begin)
    yield records["inputs"][rows], records["targets"][rows]


@functools.partial(jax.jit, static_argnames=("model_config",))
def _score(
  params: typing.Params,
  sources: Int[Array, "batch input"],
  targets: Int[Array, "batch length"],
  *,
  model_config: t5_config.T5Config,
) -> Float[Array, " batch"]:
  """Returns the log-likelihood of each query given its document, in nats."""
  model = t5.Transformer(model_config)
  logits = model.apply({"params": params}, sources, t5.shift_right(targets))
  return -seq2seq.cross_entropy(logits, targets, normalization="sum")


def _write(
  config: Config,
  generator: _Generator,
  canaries: Sequence[canaries_lib.Canary],
  key: jax.Array,
) -> list[list[str]]:
  """Writes queries for the canaries' documents, as the generate stage does."""
  texts = [(canary.query, canary.document) for canary in canaries]
  vocabulary = generator.vocabulary
  first_extra = vocabulary.vocab_size - vocabulary.extra_ids
  tokens = decoding.generate(
    generator.params,
    generator.config,
    _tokenize(config, generator, texts)["inputs"],
    ids=[f"canary {index}" for index in range(len(canaries))],
    key=key,
    sampler=decoding.Nucleus(p=config.p),
    max_length=generator.prepared.query_length,
    num_samples=config.queries_per_canary,
    forbidden=range(first_extra, generator.config.vocab_size),
  )
  return [[_text(vocabulary, row) for row in rows] for rows in tokens]


def _text(vocabulary: Any, row: np.ndarray) -> str:
  return vocabulary.decode([int(t) for t in row if t > vocabulary_lib.EOS_ID])


def _save_lines(directory: pathlib.Path, canaries, ranks, leaked, written):
  """Writes what was found for each canary."""
  lines = [
    json.dumps(
      {
        **dataclasses.asdict(canary),
        "rank": int(rank),
        "leaked": bool(leak),
        "written": texts,
      }
    )
    for canary, rank, leak, texts in zip(
      canaries, ranks, leaked, written, strict=True
    )
  ]
  text = "\n".join(lines) + "\n"
  artifacts.write_atomically(directory / "canaries.jsonl", text)


def _save_summary(directory: pathlib.Path, config, inserted, ranks, leaked):
  """Writes the inserted canaries beside the control group."""
  summary = {
    name: {
      "canaries": int(np.sum(group)),
      "leaked": int(np.sum(leaked[group])),
      **exposure.mean_rank(ranks[group], config.num_candidates)._asdict(),
    }
    for name, group in (("inserted", inserted), ("held_out", ~inserted))
    if group.any()
  }
  text = json.dumps(summary, indent=1) + "\n"
  artifacts.write_atomically(directory / "summary.json", text)
