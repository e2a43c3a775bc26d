"""Audits a fine-tuned generator with the secrets of its canaries.

The audit computes ranks and exposure of the secrets, leaks in written queries,
and lower bounds on epsilon from the guesses of an attacker about the coins, who
has the generator.

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
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from synthq_jax import field_kinds, typing
from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.audit import candidates as candidates_lib
from synthq_jax.audit import exposure, lower_bounds, membership
from synthq_jax.generation import decoding
from synthq_jax.models import t5_checkpoints, t5_config
from synthq_jax.models import token_ids as token_ids_lib
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import (
  config_types,
  prepared_files,
  results,
  rows,
  runner,
  stage,
)
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.storage import artifacts
from synthq_jax.training import progress

__all__ = ["STAGE", "Config", "Inputs", "run"]

_MIN_CANARIES = 2
"""Canaries of each side that a bound needs."""
_Model = tuple[typing.Params, t5_config.T5Config]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings of scoring canaries; `plan.Canaries` sets their number."""

  GONE: ClassVar[Mapping[str, Any]] = {
    "attacks": ("likelihood", "synthetic", "retriever")
  }

  num_candidates: int = 10_000
  """Secrets among which exposure is measured, the true one included."""
  num_ranked: int = 100
  """Secrets among which ranks are measured, as in the papers."""
  queries_per_canary: int = 10
  """Queries written for each canary's document, to find leaks."""
  confidence: float = 0.95
  """Confidence of the lower bounds."""
  p: float = 0.8
  """Nucleus mass of the queries that are written for canaries; their
  temperature is 1, whatever the generate stage uses."""
  batch_size: int = field_kinds.speed_only(256)
  """Records scored at once."""

  def __post_init__(self):
    config_types.at_least(self, 2, "num_candidates", "num_ranked")
    config_types.at_least(self, 1, "queries_per_canary", "batch_size")
    config_types.within(self, "(0.5, 1)", "confidence")
    config_types.within(self, "(0, 1]", "p")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Findings:
  """Measurements of each canary."""

  ranks: Int[np.ndarray, " canary"]
  exposure: Float[np.ndarray, " canary"]  # nan: not measured
  written: list[list[str]]
  leaked: Bool[np.ndarray, " canary"]
  num_searched: int
  # Of secrets in queries alone: the others take fifty times as long.
  public_ranks: Int[np.ndarray, " asked"]
  scores: Float[np.ndarray, " canary"]  # likelihood; the higher, the surer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Canaries, the generator and its queries."""

  prepared: results.PreparedData
  start: pathlib.Path
  """Folder of the public checkpoint that fine-tuning started from."""
  prefix: str  # text before each document in fine-tuning
  canaries: Sequence[canaries_lib.Canary]  # inserted and held out
  generator: results.Checkpoint
  """Generator that was fine-tuned with the inserted canaries among its
  records."""
  written: results.SyntheticQueries | None = None
  """All queries of the generator, if the run wrote some."""


def plan_rows(plan: rows.Plan) -> dict[str, rows.Row]:
  """Plans an audit of each generator, if canaries are planted."""
  is_wanted = plan.config.canaries.number
  return {row.queries: row for row in plan.generators if is_wanted}


def make_job(run: runner.Run, row: rows.Row) -> stage.Job[Inputs]:
  """Returns the audit of one generator."""
  config, generator = run.config, run.generators[row]
  written = run.get_results("generate").get(row)  # searched for secrets
  return stage.Job(
    row=row,
    depends=(
      config.audit,
      config.canaries,
      generator.digest,
      {"written": written.digest} if written else {},
    ),
    settings=config.audit,
    inputs=Inputs(
      prepared=run.prepared,
      start=run.start,
      prefix=config.finetune_dp.prefix,
      canaries=run.canaries,
      generator=generator.value,
      written=written.value if written else None,
    ),
  )


def check(run: runner.Run) -> None:
  """Refuses settings that the audit would refuse after all training.

  Raises:
    ValueError: if a coin has fallen to one side only, a secret does not fit the
      lengths, or there are fewer secrets than candidates.
  """
  config, prepared = run.config, run.prepared
  if not config.canaries.number:
    return
  vocabulary = prepared_files.vocabulary(run.folders, prepared)
  rng = np.random.default_rng(0)  # a trial draw of candidates
  _check_coins(run.canaries)
  each = tuple({canary.kind: canary for canary in run.canaries}.values())
  _tokenize(each, vocabulary, config.finetune_dp.prefix, prepared)
  symbols = canaries_lib.alphabets((c.kind for c in each), vocabulary)
  for canary in each:
    own = symbols[canary.kind]
    candidates_lib.draw(canary, own, config.audit.num_ranked, rng)
    if canaries_lib.KINDS[canary.kind].side == "query":
      candidates_lib.draw(canary, own, config.audit.num_candidates, rng)


def _check_coins(canaries: Sequence[canaries_lib.Canary]) -> None:
  """Refuses canaries without a control group, or without an inserted one."""
  inserted = sum(canary.inserted for canary in canaries)
  if not 0 < inserted < len(canaries):
    raise ValueError(
      f"expected inserted and held-out canaries, got {inserted} inserted of"
      f" {len(canaries)}: set a greater plan.Canaries.number"
    )


def _tokenize(canaries, vocabulary, prefix: str, prepared):
  return canaries_lib.tokenize(
    canaries,
    vocabulary,
    prefix=prefix,
    document_length=prepared.document_length,
    query_length=prepared.query_length,
  )


def run(task: stage.Task[Config, Inputs]) -> results.AuditReport:
  """Ranks the secrets, searches written queries for them, and bounds epsilon.

  Writes private/audit/NAME/canaries.jsonl next to the result.

  Args:
    task: with the working directory's secret.

  Returns:
    The report, with the claim that the bounds are compared with.

  Raises:
    ValueError: if no canary was inserted, a secret does not fit the lengths, or
      there are fewer secrets than candidates.
  """
  config, space = task.settings, task.space
  canaries, checkpoint = task.inputs.canaries, task.inputs.generator
  _check_coins(canaries)
  inserted = np.array([canary.inserted for canary in canaries], bool)
  findings = _find(task)
  directory = task.folder(private=True)
  _save_lines(directory, canaries, findings)
  claim, delta = checkpoint.statement, checkpoint.statement.delta
  if not 0 < delta < 1:  # without a claim, the default
    records = task.inputs.prepared.num_queries["train"]
    delta = 1 / (2 * (records + len(canaries_lib.repeated(canaries))))
  bounds, lowest, ceiling = _compute_bounds(
    claim,
    canaries,
    findings.scores,
    delta=delta,
    confidence=config.confidence,
    seed=space.seed(f"audit ties {checkpoint.name}"),
  )
  return results.AuditReport(
    directory=space.relative(directory),
    row=checkpoint.row,
    cells=_make_cells(canaries, findings),
    bounds=bounds,
    num_candidates=config.num_candidates,
    num_ranked=config.num_ranked,
    num_searched=findings.num_searched,
    confidence=config.confidence,
    claimed_epsilon=claim.epsilon,
    claimed_delta=delta,
    lower_bound=lowest,
    ceiling=ceiling,
    control=_test_control(findings, inserted, config.num_ranked),
  )


def _find(task: stage.Task[Config, Inputs]) -> _Findings:
  config, space, task_inputs = task.settings, task.space, task.inputs
  prepared, canaries, generator = (
    task_inputs.prepared,
    task_inputs.canaries,
    task_inputs.generator,
  )
  model = _load(space.root / generator.directory)
  public = _load(task_inputs.start, token_ids=prepared.token_ids)
  vocabulary = prepared_files.vocabulary(space, prepared)
  records = _tokenize(canaries, vocabulary, task_inputs.prefix, prepared)
  rng = np.random.default_rng(space.seed("audit candidates"))
  symbols = canaries_lib.alphabets((c.kind for c in canaries), vocabulary)
  few = _draw(canaries, symbols, config.num_ranked, rng)
  every = np.arange(len(canaries))
  in_query = every[
    [canaries_lib.KINDS[c.kind].side == "query" for c in canaries]
  ]
  # Exposure is measured for inserted secrets that a query can repeat.
  in_query_inserted = in_query[[canaries[i].inserted for i in in_query]]
  planted = [canaries[i] for i in in_query_inserted]
  many = dict(
    zip(
      in_query_inserted.tolist(),
      _draw(planted, symbols, config.num_candidates, rng),
      strict=True,
    )
  )
  bits = np.full(len(canaries), math.nan)
  total = 2 * len(every) + len(in_query) + len(in_query_inserted)
  with progress.bar(f"audit {generator.name}", total, unit="question") as bar:
    ask = functools.partial(
      _compute_ranks, config, canaries, records, bar.update
    )
    if len(in_query_inserted):
      bits[in_query_inserted] = exposure.exposure(
        ask(model, in_query_inserted, many), config.num_candidates
      )
    ranks = ask(model, every, few)
    public_ranks = ask(public, in_query, few)
    written = _write(
      config, model, records, vocabulary, prepared, space, bar.update
    )
  texts = []  # all queries of the generator, also those that filters dropped
  if task_inputs.written:
    texts = queries_lib.texts(space.root / task_inputs.written.directory)
  ours, reference = (
    membership.log_likelihoods(
      *source,
      records["inputs"],
      records["targets"],
      batch_size=config.batch_size,
    )
    for source in (model, public)
  )
  return _Findings(
    ranks=ranks,
    exposure=bits,
    written=written,
    leaked=_leaked(canaries, written, texts),
    num_searched=len(texts),
    public_ranks=public_ranks,
    scores=ours - reference,
  )


def _load(
  directory: Any, *, token_ids: token_ids_lib.TokenIds | None = None
) -> _Model:
  """Reads parameters and shape; `token_ids` are the vocabulary's, if they may be
  lacking."""
  params, config = t5_checkpoints.load(directory, token_ids=token_ids)
  return params, t5_config.require(config, directory)


def _compute_ranks(
  config, canaries, records, progress, model: _Model, rows, candidates
) -> Int[np.ndarray, " asked"]:
  """Returns the ranks of some canaries' secrets among their candidates."""
  if not len(rows):  # secrets in documents alone
    return np.zeros(0, np.int64)
  likelihoods = candidates_lib.likelihoods(
    *model,
    [canaries[i] for i in rows],
    {
      "inputs": records["inputs"][rows],
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
  config, model: _Model, records, vocabulary, prepared, space, progress
) -> list[list[str]]:
  """Writes queries for the canaries' documents, as the generate stage does."""
  tokens = decoding.generate(
    *model,
    records["inputs"],
    ids=[f"canary {index}" for index in range(len(records["inputs"]))],
    key=space.key("audit queries"),
    sampler=decoding.Nucleus(p=config.p),
    max_length=prepared.query_length,
    num_samples=config.queries_per_canary,
    forbidden=queries_lib.get_forbidden_ids(vocabulary, model[1].vocab_size),
    batch_size=config.batch_size,
    progress=progress,
  )
  return [
    [queries_lib.decode(vocabulary, row) for row in rows] for rows in tokens
  ]


def _leaked(canaries, written, synthetic) -> Bool[np.ndarray, " canary"]:
  """Checks whose secret occurs in queries for its document, or in the set."""
  shared = canaries_lib.Written.of(synthetic)
  return np.array(
    [
      canaries_lib.KINDS[canary.kind].can_leak
      and (shared.tell(canary) or canaries_lib.Written.of(texts).tell(canary))
      for canary, texts in zip(canaries, written, strict=True)
    ],
    bool,
  )


def _make_cells(canaries, findings: _Findings) -> tuple[results.AuditCell, ...]:
  groups: dict[tuple[str, int], list[int]] = {}
  for index, canary in enumerate(canaries):
    groups.setdefault((canary.kind, canary.repetitions), []).append(index)
  cells = []
  for (kind, repetitions), positions in groups.items():
    inside = [i for i in positions if canaries[i].inserted]
    outside = [i for i in positions if not canaries[i].inserted]
    can_leak = canaries_lib.KINDS[kind].can_leak
    cells.append(
      results.AuditCell(
        kind=kind,
        repetitions=repetitions,
        ranks=tuple(findings.ranks[inside].tolist()),
        held_out_ranks=tuple(findings.ranks[outside].tolist()),
        exposure=tuple(
          bits for bits in findings.exposure[inside].tolist() if bits == bits
        ),
        leaked=int(findings.leaked[inside].sum()) if can_leak else None,
        leaked_held_out=int(findings.leaked[outside].sum())
        if can_leak
        else None,
      )
    )
  return tuple(cells)


def _test_control(findings: _Findings, inserted, num_ranked: int) -> float:
  """Tests that no one could know the secrets; corrects for two tests."""
  groups = (findings.ranks[~inserted], findings.public_ranks)
  tested = [ranks for ranks in groups if len(ranks)]
  values = [
    exposure.uniform_ranks_p_value(group, num_ranked) for group in tested
  ]
  return min(1.0, len(values) * min(values))


def _save_lines(directory: pathlib.Path, canaries, findings: _Findings) -> None:
  lines = [
    json.dumps(
      {
        **dataclasses.asdict(canary),
        "rank": int(findings.ranks[i]),
        "exposure": None if math.isnan(bits := findings.exposure[i]) else bits,
        "leaked": bool(findings.leaked[i]),
        "score": float(findings.scores[i]),
        "written": findings.written[i],
      }
    )
    for i, canary in enumerate(canaries)
  ]
  text = "\n".join(lines) + "\n"
  artifacts.write_atomically(directory / "canaries.jsonl", text)


def _compute_bounds(
  statement: statement_lib.PrivacyStatement,
  canaries: Sequence[canaries_lib.Canary],
  scores: Float[np.ndarray, " canary"],
  *,
  delta: float,
  confidence: float,
  seed: Sequence[int],
) -> tuple[tuple[results.AuditBound, ...], float | None, float]:
  """Returns the bounds by repetitions, the bound that tests the claim, and its
  value if every guess were right.

  Formal guarantee:
    The second exceeds a true claim with probability at most 1 - confidence: it is
    the one-run bound from canaries that are one record each, None without such.
    Canaries that are k records audit the claim for groups of k. As in every claim
    of the pipeline, n, which counts the inserted canaries, is treated as fixed.

  Args:
    statement: statement of the audited generator.
    canaries: inserted and held out.
    scores: scores of the canaries.
    delta: delta of the claim.
    confidence: confidence of each bound.
    seed: drawn for this audit alone; breaks ties.
  """
  bounds, lowest, ceiling = [], None, 0.0
  for repetitions in sorted({canary.repetitions for canary in canaries}):
    sides = [
      np.array(
        [c.inserted is side and c.repetitions == repetitions for c in canaries],
        bool,
      )
      for side in (True, False)
    ]
    if min(map(np.sum, sides)) < _MIN_CANARIES:
      continue
    epsilon, group_delta = statement_lib.group(statement, repetitions)
    if math.isinf(statement.epsilon) or group_delta >= 1:
      epsilon, group_delta = math.inf, delta
    bound = lower_bounds.audit(
      *(scores[side] for side in sides),
      delta=group_delta if 0 < group_delta < 1 else delta,
      confidence=confidence,
      seed=seed,
    )
    if repetitions == 1:
      lowest = bound.epsilon_one_run
      ceiling = lower_bounds.ceiling(
        int(sum(map(np.sum, sides))),
        delta=delta,
        confidence=confidence,
      )
    bounds.append(
      results.AuditBound(
        attack="likelihood",
        repetitions=repetitions,
        claimed_epsilon=epsilon,
        num_inserted=bound.num_inserted,
        num_held_out=bound.num_held_out,
        epsilon_one_run=bound.epsilon_one_run,
        epsilon_one_run_fdp=bound.epsilon_one_run_fdp,
        auroc=dataclasses.astuple(bound.auroc),
        tpr_at_1_fpr=dataclasses.astuple(bound.tpr_at_1_fpr),
      )
    )
  return tuple(bounds), lowest, ceiling


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
  needs=("finetune_dp", "generate"),
  starts_from="checkpoint",
  needs_secret=True,
  screen=_screen,
)
