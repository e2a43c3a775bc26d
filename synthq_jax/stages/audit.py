"""Asks a fine-tuned generator for the secrets of its canaries.

Ranks and exposure of the secrets, leaks in written queries, and lower bounds on
epsilon from what three attackers learn of the coins.

Formal guarantee: none; everything here is private. An audit reads the canaries'
secrets and coins, so its numbers are no post-processing of the generator alone.
It can show that a claim is wrong (`lower_bound` exceeds a true claim with
probability at most 1 - confidence), never that it is right.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from synthq_jax import field_kinds
from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.audit import candidates as candidates_lib
from synthq_jax.audit import exposure, lower_bounds
from synthq_jax.generation import decoding
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import (
  config_types,
  inputs,
  results,
  rows,
  runner,
  stage,
)
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.stages import _audit_scores
from synthq_jax.storage import artifacts
from synthq_jax.training import progress

__all__ = ["STAGE", "Config", "Inputs", "run"]

_MATERIAL = {
  "likelihood": (),
  "synthetic": ("generate", "filter_queries"),
  "retriever": ("generate", "filter_queries", "train_retriever"),
}
"""The stages whose results each attack reads, beside finetune_dp."""
_LEAST = 2
"""Canaries of each side that a bound needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How canaries are scored; who made them says how many there are."""

  num_candidates: int = 10_000
  """Secrets among which exposure is measured, the true one included."""
  num_ranked: int = 100
  """Secrets among which ranks are, as in the papers."""
  queries_per_canary: int = 10
  """Queries written for each canary's document, to find leaks."""
  attacks: tuple[str, ...] = _audit_scores.ATTACKS
  """What attackers are given: the generator ("likelihood"), its synthetic
  queries alone ("synthetic"), a retriever trained on them ("retriever")."""
  confidence: float = 0.95
  """Of the lower bounds, all attacks together."""
  p: float = 0.8
  """Nucleus of the queries that are written for canaries; at temperature 1,
  whatever the generate stage takes."""
  batch_size: int = field_kinds.speed_only(256)
  """Records scored at once."""

  def __post_init__(self):
    config_types.at_least(self, 2, "num_candidates", "num_ranked")
    config_types.at_least(self, 1, "queries_per_canary", "batch_size")
    config_types.some_of(self, "attacks", _audit_scores.ATTACKS)
    config_types.within(self, "(0.5, 1)", "confidence")
    config_types.within(self, "(0, 1]", "p")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
  """What was found for each canary."""

  ranks: Int[np.ndarray, " canary"]
  exposure: Float[np.ndarray, " canary"]  # nan: not measured
  written: list[list[str]]
  leaked: Bool[np.ndarray, " canary"]
  num_searched: int
  public_ranks: Int[np.ndarray, " asked"]  # of secrets in queries: the others
  # take fifty times as long
  scores: dict[str, Float[np.ndarray, " canary"]]


def needs(config) -> tuple[str, ...]:
  """Returns the stages that the attacks of a run's audit read."""
  read = [name for one in config.audit.attacks for name in _MATERIAL[one]]
  return ("finetune_dp", *dict.fromkeys(read))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """What was planted, where, and what was made of it; None: it is not there."""

  prepared: results.PreparedData
  start: pathlib.Path
  """The folder of the public checkpoint that fine-tuning started from."""
  prefix: str  # what stood before each document in fine-tuning
  canaries: Sequence[canaries_lib.Canary]  # inserted and held out
  generator: results.Checkpoint
  """Fine-tuned with the inserted ones among its private records."""
  written: results.SyntheticQueries | None = None
  """All queries of the generator."""
  synthetic: results.SyntheticQueries | None = None  # those that filters kept
  public_synthetic: results.SyntheticQueries | None = None
  """The same of the public checkpoint."""
  retriever: results.Checkpoint | None = None  # trained on `synthetic`
  public_retriever: results.Checkpoint | None = None  # the untrained one


def plan_rows(plan: rows.Plan) -> dict[str, rows.Row]:
  """Plans an audit of each generator, if canaries are planted."""
  is_wanted = plan.config.canaries.number
  return {row.queries: row for row in plan.generators if is_wanted}


def make_job(run: runner.Run, row: rows.Row) -> stage.Job[Inputs]:
  """Returns the audit of one generator."""
  config, attacks = run.config, {*run.config.audit.attacks}
  written, queries = run.get_results("generate"), run.queries
  generator = run.generators[row]
  given: dict[str, stage.Made | None]
  given = {"written": written.get(row)}  # searched for secrets
  if "synthetic" in attacks:
    given["public_synthetic"] = queries.get(rows.PUBLIC_ONLY)
  if {"synthetic", "retriever"} & attacks:
    given["synthetic"] = queries.get(row)
  if "retriever" in attacks:
    given["retriever"] = run.retrievers.get(row)
    given["public_retriever"] = run.retrievers.get(rows.UNTRAINED)
  there = {key: made for key, made in given.items() if made}
  return stage.Job(
    row=row,
    depends=(
      config.audit,
      config.canaries,
      generator.digest,
      {key: made.digest for key, made in there.items()},
    ),
    settings=config.audit,
    inputs=Inputs(
      prepared=run.prepared,
      start=run.start,
      prefix=config.finetune_dp.prefix,
      canaries=run.canaries,
      generator=generator.value,
      **{key: made.value for key, made in there.items()},
    ),
  )


def check(run: runner.Run) -> None:
  """Refuses what the audit would refuse once everything is trained.

  Raises:
    ValueError: if a coin has fallen to one side only, a secret does not fit the
      lengths, or there are fewer secrets than candidates.
  """
  config, prepared = run.config, run.prepared
  if not config.canaries.number:
    return
  vocabulary = inputs.vocabulary(run.folders, prepared)
  rng = np.random.default_rng(0)  # to see whether it can be done
  _check_coins(run.canaries)
  each = tuple({canary.kind: canary for canary in run.canaries}.values())
  _tokenized(each, vocabulary, config.finetune_dp.prefix, prepared)
  symbols = canaries_lib.alphabets((c.kind for c in each), vocabulary)
  for canary in each:
    own = symbols[canary.kind]
    candidates_lib.draw(canary, own, config.audit.num_ranked, rng)
    if canaries_lib.KINDS[canary.kind].side == "query":
      candidates_lib.draw(canary, own, config.audit.num_candidates, rng)


def _check_coins(canaries: Sequence[canaries_lib.Canary]) -> None:
  """Refuses canaries without a control group, or without anything to find."""
  inserted = sum(canary.inserted for canary in canaries)
  if not 0 < inserted < len(canaries):
    raise ValueError(
      f"expected inserted and held-out canaries, got {inserted} inserted of"
      f" {len(canaries)}: set a greater plan.Canaries.number"
    )


def _tokenized(canaries, vocabulary, prefix: str, prepared):
  return canaries_lib.tokenize(
    canaries,
    vocabulary,
    prefix=prefix,
    document_length=prepared.document_length,
    query_length=prepared.query_length,
  )


def run(task: stage.Task[Config, Inputs]) -> results.AuditReport:
  """Ranks the secrets, looks for them in written queries, bounds epsilon.

  Writes private/audit/NAME/canaries.jsonl beside the result.

  Args:
    task: with the working directory's secret.

  Returns:
    The report, with the claim beside what was found.

  Raises:
    ValueError: if no canary was inserted, a secret does not fit the lengths, or
      there are fewer secrets than candidates.
  """
  config, space = task.settings, task.space
  canaries, checkpoint = task.inputs.canaries, task.inputs.generator
  _check_coins(canaries)
  inserted = np.array([canary.inserted for canary in canaries], bool)
  found = _find(task)
  directory = task.folder(private=True)
  _save_lines(directory, canaries, found)
  delta = _delta(checkpoint.statement, task.inputs.prepared, canaries)
  bounds = _bounds(
    checkpoint.statement,
    canaries,
    found.scores,
    delta=delta,
    confidence=config.confidence,
    seed=space.seed(f"audit ties {checkpoint.name}"),
  )
  return results.AuditReport(
    directory=space.relative(directory),
    row=checkpoint.row,
    cells=_cells(canaries, found),
    bounds=bounds.made,
    num_candidates=config.num_candidates,
    num_ranked=config.num_ranked,
    num_searched=found.num_searched,
    confidence=config.confidence,
    claimed_epsilon=checkpoint.statement.epsilon,
    claimed_delta=delta,
    lower_bound=bounds.lowest,
    ceiling=bounds.ceiling,
    control=_control(found, inserted, config.num_ranked),
  )


def _find(task: stage.Task[Config, Inputs]) -> _Found:
  config, space, given = task.settings, task.space, task.inputs
  prepared, canaries, generator = (
    given.prepared,
    given.canaries,
    given.generator,
  )
  model = _audit_scores.load(
    space.root / generator.directory, prompt_tokens=generator.prompt_tokens
  )
  public = _audit_scores.load(given.start, token_ids=prepared.token_ids)
  vocabulary = inputs.vocabulary(space, prepared)
  records = _tokenized(canaries, vocabulary, given.prefix, prepared)
  rng = np.random.default_rng(space.seed("audit candidates"))
  symbols = canaries_lib.alphabets((c.kind for c in canaries), vocabulary)
  few = _draw(canaries, symbols, config.num_ranked, rng)
  every = np.arange(len(canaries))
  in_query = every[
    [canaries_lib.KINDS[c.kind].side == "query" for c in canaries]
  ]
  # Exposure: of what was planted where it can come out.
  asked = in_query[[canaries[i].inserted for i in in_query]]
  planted = [canaries[i] for i in asked]
  many = dict(
    zip(
      asked.tolist(),
      _draw(planted, symbols, config.num_candidates, rng),
      strict=True,
    )
  )
  bits = np.full(len(canaries), math.nan)
  total = 2 * len(every) + len(in_query) + len(asked)
  with progress.bar(
    f"audit {generator.name}", total, task.progress, unit="question"
  ) as bar:
    ask = functools.partial(_ranks, config, canaries, records, bar.update)
    if len(asked):
      bits[asked] = exposure.exposure(
        ask(model, asked, many), config.num_candidates
      )
    ranks = ask(model, every, few)
    public_ranks = ask(public, in_query, few)
    written = _write(
      config, model, records, vocabulary, prepared, space, bar.update
    )
  texts = _synthetic_texts(task)
  return _Found(
    ranks=ranks,
    exposure=bits,
    written=written,
    leaked=_leaked(canaries, written, texts),
    num_searched=len(texts),
    public_ranks=public_ranks,
    scores=_audit_scores.scores(
      space,
      prepared,
      config.attacks,
      config.batch_size,
      models=(model, public),
      records=records,
      written=(given.synthetic, given.public_synthetic),
      retrievers=(given.retriever, given.public_retriever),
    ),
  )


def _ranks(
  config, canaries, records, progress, model, rows, candidates
) -> Int[np.ndarray, " asked"]:
  """Returns the ranks of some canaries' secrets among their candidates."""
  if not len(rows):  # secrets in documents alone
    return np.zeros(0, np.int64)
  likelihoods = candidates_lib.likelihoods(
    model.params,
    model.config,
    [canaries[i] for i in rows],
    {
      "inputs": model.read(records["inputs"][rows]),
      "targets": records["targets"][rows],
    },
    [candidates[i] for i in rows],
    batch_size=config.batch_size,
    progress=progress,
  )
  return exposure.ranks(likelihoods)


def _draw(canaries, symbols, num, rng) -> list[candidates_lib.Candidates]:
  return [
    candidates_lib.draw(canary, symbols[canary.kind], num, rng)
    for canary in canaries
  ]


def _write(
  config, model, records, vocabulary, prepared, space, progress
) -> list[list[str]]:
  """Writes queries for the canaries' documents, as the generate stage does."""
  tokens = decoding.generate(
    model.params,
    model.config,
    model.read(records["inputs"]),
    ids=[f"canary {index}" for index in range(len(records["inputs"]))],
    key=space.key("audit queries"),
    sampler=decoding.Nucleus(p=config.p),
    max_length=prepared.query_length,
    num_samples=config.queries_per_canary,
    forbidden=queries_lib.get_forbidden_ids(
      vocabulary, model.config.vocab_size
    ),
    batch_size=config.batch_size,
    progress=progress,
  )
  return [
    [queries_lib.decode(vocabulary, row) for row in rows] for rows in tokens
  ]


def _synthetic_texts(task: stage.Task[Config, Inputs]) -> list[str]:
  """Returns all queries written, whatever for, those that filters drop too."""
  sets = filter(None, (task.inputs.written, task.inputs.synthetic))
  return [
    text
    for directory in dict.fromkeys(one.directory for one in sets)
    for text in queries_lib.texts(task.folders.root / directory)
  ]


def _leaked(canaries, written, synthetic) -> Bool[np.ndarray, " canary"]:
  """Says whose secret stands in queries for its document, or in the set."""
  shared = canaries_lib.Written.of(synthetic)
  return np.array(
    [
      canaries_lib.KINDS[canary.kind].can_leak
      and (shared.tell(canary) or canaries_lib.Written.of(texts).tell(canary))
      for canary, texts in zip(canaries, written, strict=True)
    ],
    bool,
  )


def _cells(canaries, found: _Found) -> tuple[results.AuditCell, ...]:
  groups: dict[tuple[str, int], list[int]] = {}
  for index, canary in enumerate(canaries):
    groups.setdefault((canary.kind, canary.repetitions), []).append(index)
  made = []
  for (kind, repetitions), positions in groups.items():
    inside = [i for i in positions if canaries[i].inserted]
    outside = [i for i in positions if not canaries[i].inserted]
    can_leak = canaries_lib.KINDS[kind].can_leak
    made.append(
      results.AuditCell(
        kind=kind,
        repetitions=repetitions,
        ranks=tuple(found.ranks[inside].tolist()),
        held_out_ranks=tuple(found.ranks[outside].tolist()),
        exposure=tuple(
          bits for bits in found.exposure[inside].tolist() if bits == bits
        ),
        leaked=int(found.leaked[inside].sum()) if can_leak else None,
        leaked_held_out=int(found.leaked[outside].sum()) if can_leak else None,
      )
    )
  return tuple(made)


def _control(found: _Found, inserted, num_ranked: int) -> float:
  """Tests that nobody knew the secrets who cannot have; two tests, so twice."""
  groups = (found.ranks[~inserted], found.public_ranks)
  tested = [ranks for ranks in groups if len(ranks)]
  values = [exposure.uniform_ranks_p_value(one, num_ranked) for one in tested]
  return min(1.0, len(values) * min(values))


def _save_lines(directory: pathlib.Path, canaries, found: _Found) -> None:
  lines = [
    json.dumps(
      {
        **dataclasses.asdict(canary),
        "rank": int(found.ranks[i]),
        "exposure": None if math.isnan(bits := found.exposure[i]) else bits,
        "leaked": bool(found.leaked[i]),
        "scores": {k: float(v[i]) for k, v in found.scores.items()},
        "written": found.written[i],
      }
    )
    for i, canary in enumerate(canaries)
  ]
  text = "\n".join(lines) + "\n"
  artifacts.write_atomically(directory / "canaries.jsonl", text)


class _Bounds(NamedTuple):
  """What an audit shows about epsilon."""

  made: tuple[results.AuditBound, ...]
  """By repetitions and attack."""
  lowest: float | None
  """Of all attacks together, from canaries that stand there once, or None."""
  ceiling: float
  """What it would be if every guess were right."""


def _delta(
  statement: statement_lib.PrivacyStatement,
  prepared: results.PreparedData,
  canaries: Sequence[canaries_lib.Canary],
) -> float:
  """Returns the claim's delta, or what it would be: 1 / (2n)."""
  if 0 < statement.delta < 1:
    return statement.delta
  records = prepared.num_queries["train"] + len(canaries_lib.repeated(canaries))
  return 1 / (2 * records)


def _bounds(
  statement: statement_lib.PrivacyStatement,
  canaries: Sequence[canaries_lib.Canary],
  scores: Mapping[str, Float[np.ndarray, " canary"]],
  *,
  delta: float,
  confidence: float,
  seed: Sequence[int],
) -> _Bounds:
  """Returns each attack's bounds, and the one that the claim has to stand.

  Formal guarantee:
    `lowest` exceeds a true claim with probability at most 1 - confidence: it is
    the largest one-run bound of all attacks, each at a significance divided by
    their number, from canaries that are one record each. Canaries that are k
    records audit the claim for groups of k. As in every claim of the pipeline,
    n, which counts the inserted canaries, is treated as fixed.

  Args:
    statement: of the audited generator.
    canaries: inserted and held out.
    scores: of each attack.
    delta: of the claim.
    confidence: of all attacks together.
    seed: drawn for this audit alone; breaks ties.
  """
  made, lowest, ceiling = [], None, 0.0
  for repetitions in sorted({canary.repetitions for canary in canaries}):
    sides = [
      np.array(
        [c.inserted is side and c.repetitions == repetitions for c in canaries],
        bool,
      )
      for side in (True, False)
    ]
    if min(map(np.sum, sides)) < _LEAST:
      continue
    epsilon, group_delta = statement_lib.group(statement, repetitions)
    if math.isinf(statement.epsilon) or group_delta >= 1:
      epsilon, group_delta = math.inf, delta
    joint = lower_bounds.audit_several(
      {k: (v[sides[0]], v[sides[1]]) for k, v in scores.items()},
      delta=group_delta if 0 < group_delta < 1 else delta,
      confidence=confidence,
      seed=seed,
    )
    if repetitions == 1:
      lowest = joint.epsilon_one_run
      ceiling = lower_bounds.ceiling(
        int(sum(map(np.sum, sides))),
        delta=delta,
        confidence=1 - (1 - confidence) / len(scores),
      )
    made += [
      results.AuditBound(
        attack=attack,
        repetitions=repetitions,
        claimed_epsilon=epsilon,
        num_inserted=one.num_inserted,
        num_held_out=one.num_held_out,
        epsilon_one_run=one.epsilon_one_run,
        epsilon_one_run_fdp=one.epsilon_one_run_fdp,
        auroc=dataclasses.astuple(one.auroc),
        tpr_at_1_fpr=dataclasses.astuple(one.tpr_at_1_fpr),
      )
      for attack, one in joint.attacks.items()
    ]
  return _Bounds(tuple(made), lowest, ceiling)


def _screen(audits: Sequence[results.AuditReport]) -> str:
  from synthq_jax.report import audit

  return (
    "\nPRIVATE: computed from secrets and coins. Do not share these tables.\n\n"
    f"{audit.text(audits)}\n\n"
  )


STAGE = stage.Stage(
  name="audit",
  result=results.AuditReport,
  config=Config,
  check=check,
  plan=plan_rows,
  job=make_job,
  run=run,
  needs=("finetune_dp", "generate", "filter_queries", "train_retriever"),
  starts_from="checkpoint",
  narrowed=needs,
  needs_secret=True,
  screen=_screen,
)
