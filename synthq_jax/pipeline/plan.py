"""The whole pipeline: which stages make which rows, in which order.

All settings of a run in one value. How they are carried out, and what is
skipped because it is finished, is in `execute`.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.models import prompt, t5_config
from synthq_jax.pipeline import (
  _auditing,
  _query_leakage_results,
  _query_stages,
  config_types,
  execute,
  results,
  runner,
  workspace,
)
from synthq_jax.pipeline import audit as audit_lib
from synthq_jax.pipeline import compare_queries as compare_queries_lib
from synthq_jax.pipeline import direct_dp as direct_dp_lib
from synthq_jax.pipeline import evaluate as evaluate_lib
from synthq_jax.pipeline import filter_queries as filter_queries_lib
from synthq_jax.pipeline import finetune_dp as finetune_dp_lib
from synthq_jax.pipeline import generate as generate_lib
from synthq_jax.pipeline import prepare_data as prepare_data_lib
from synthq_jax.pipeline import pretrain as pretrain_lib
from synthq_jax.pipeline import query_leakage as query_leakage_lib
from synthq_jax.pipeline import report as report_lib
from synthq_jax.pipeline import train_retriever as train_retriever_lib
from synthq_jax.training import distributed

__all__ = ["STAGES", "Canaries", "Rows", "RunConfig", "run"]

STAGES = (
  "prepare_data",
  "pretrain",
  "finetune_dp",
  "generate",
  "filter_queries",
  "train_retriever",
  "evaluate",
  "query_leakage",
  "audit",
  "compare_queries",
  "report",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
  """The rows of the table."""

  bm25: bool = True
  """BM25, which trains on nothing."""
  untrained: bool = True
  """The public checkpoint as a retriever, before any training of this run: what
  every other row has to beat."""
  public_only: bool = True
  """Synthetic queries of the public checkpoint, before any private step."""
  original: bool = True
  """The real queries, without privacy."""
  synthetic: tuple[float, ...] = (8.0,)
  """Synthetic queries of generators fine-tuned at these epsilons; inf: none."""
  direct_dp: tuple[float, ...] = (8.0,)
  """The real queries with DP directly, at these epsilons; inf is left out,
  since `original` is that row."""

  def __post_init__(self):
    for field in ("synthetic", "direct_dp"):
      for epsilon in getattr(self, field):
        if not epsilon > 0:
          raise ValueError(
            f"Rows.{field} must hold epsilons above 0, got epsilon={epsilon}:"
            " change EPSILON"
          )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Canaries:
  """Planted records whose secrets an audit asks the generator for."""

  number: int = 0
  """How many of each kind and number of repetitions are made; a fair coin
  decides which are planted. 0: no audit."""
  kinds: tuple[str, ...] = tuple(canaries_lib.KINDS)
  """Of `canaries.KINDS`."""
  repetitions: tuple[int, ...] = (1, 10, 100)
  """How often a planted one stands in the private data; each is a record, and
  counts in n."""
  digits: int = 6
  """Digits of a secret."""

  def __post_init__(self):
    config_types.at_least(self, 0, "number")
    config_types.at_least(self, 2, "digits")
    if self.digits > 18:
      raise ValueError(
        f"plan.Canaries.digits must be at most 18, got digits={self.digits}"
      )
    config_types.some_of(self, "kinds", tuple(canaries_lib.KINDS))
    if (
      not isinstance(self.repetitions, (tuple, list))
      or not self.repetitions
      or min(self.repetitions) < 1
    ):
      raise ValueError(
        "plan.Canaries.repetitions must be numbers above 0, got"
        f" repetitions={self.repetitions}"
      )


def _default(kind: type) -> Any:
  return dataclasses.field(default_factory=kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Everything that `synthq run` does."""

  checkpoint: str = ""
  """Public T5 that generator and retriever start from, in our own format, T5X's
  or Hugging Face's; empty: the shipped."""
  model: t5_config.T5Config | None = None
  """Shape that the checkpoint must have; None: whatever it has."""
  retriever_checkpoint: str = ""
  """Public T5 that retrievers start from, of the same vocabulary; empty: that of
  the generator."""
  prepare_data: prepare_data_lib.Config = _default(prepare_data_lib.Config)
  """Data, vocabulary, splits."""
  pretrain: pretrain_lib.Config = _default(pretrain_lib.Config)
  """Public pre-training on the run's own documents; skipped without phases."""
  finetune_dp: finetune_dp_lib.Config = _default(finetune_dp_lib.Config)
  """The generator's private fine-tuning, once for each synthetic row."""
  generate: generate_lib.Config = _default(generate_lib.Config)
  """Sampling of queries."""
  filter_queries: filter_queries_lib.Config = _default(
    filter_queries_lib.Config
  )
  """Which of them are kept; left out without a filter."""
  train_retriever: train_retriever_lib.Config = _default(
    train_retriever_lib.Config
  )
  """The retriever's recipe."""
  direct_dp: direct_dp_lib.Config = _default(direct_dp_lib.Config)
  """The retriever trained with DP, once for each direct row."""
  direct_dp_methods: tuple[direct_dp_lib.Config, ...] = ()
  """Several instead of that one, each with a label of its own."""
  evaluate: evaluate_lib.Config = _default(evaluate_lib.Config)
  """Measures."""
  test_sets: tuple[str, ...] = ()
  """Public collections on which every row is scored, too, e.g. "beir:DIR"; a
  folder of such folders stands for all of them (`prepare_test_set.expand`)."""
  query_leakage: query_leakage_lib.Config = _default(query_leakage_lib.Config)
  """The search for real queries among the synthetic ones."""
  canaries: Canaries = _default(Canaries)
  """What the audit plants."""
  audit: audit_lib.Config = _default(audit_lib.Config)
  """How the audit asks."""
  compare_queries: compare_queries_lib.Config = _default(
    compare_queries_lib.Config
  )
  """Which rows and queries the report sets side by side."""
  report: report_lib.Config = _default(report_lib.Config)
  """The pages."""
  rows: Rows = _default(Rows)
  """What the table compares."""
  seeds: tuple[int, ...] = ()
  """Everything trained or sampled is made once for each of these; the table
  shows means over them. Empty: once, with the seed of each stage. The data is
  prepared once, with the seed of that stage."""
  secret_seed: int | None = None
  """Fixes batches and noise, for demonstrations on public data only; None
  draws a secret that stays in the working directory's private folder."""
  public_data: bool = False
  """Whether the "private" queries are public, so that the secret may be fixed;
  the demo set's are."""

  def __post_init__(self):
    if len(set(self.seeds)) < len(self.seeds) or min(self.seeds, default=0) < 0:
      raise ValueError(
        "RunConfig.seeds must be different integers, 0 or above, got"
        f" seeds={self.seeds}"
      )
    self._check_audit()
    labels = [one.label for one in self.direct_dp_methods]
    if len(set(labels)) < len(labels):
      raise ValueError(
        "RunConfig.direct_dp_methods must have different labels, got"
        f" {', '.join(map(repr, labels))}: set direct_dp.Config.label"
      )
    is_demo = self.prepare_data.source == "environment_docs"
    if self.secret_seed is not None and not (is_demo or self.public_data):
      raise ValueError(
        "RunConfig.secret_seed must be None for private data, got a fixed one,"
        " from which anybody could recompute the noise: leave SECRET_SEED out"
        " (or say public_data=True if the queries are public)"
      )

  def _check_audit(self):
    """Refuses an audit that would lack what it compares with."""
    if not self.canaries.number:
      return
    lacking = {
      "synthetic": ("public_only", self.rows.public_only),
      "retriever": ("untrained", self.rows.untrained),
    }
    for attack in self.audit.attacks:
      row, is_there = lacking.get(attack, ("", True))
      if not is_there:
        raise ValueError(
          f"audit.Config.attacks has {attack!r}, which is measured against the"
          f" row {row}, got plan.Rows.{row}=False: set it, or leave the attack"
          " out"
        )
    has_prompt = isinstance(self.finetune_dp.adapter, prompt.Prompt)
    if has_prompt and "new_tokens" in self.canaries.kinds:
      raise ValueError(
        "plan.Canaries.kinds has 'new_tokens', whose embeddings a trained prompt"
        " may overwrite, got finetune_dp.Config.adapter=prompt.Prompt: leave"
        " that kind out"
      )


def run(
  config: RunConfig,
  workdir: str | os.PathLike,
  *,
  stages: Sequence[str] | None = None,
  progress: bool = True,
  on_accepted: Callable[[], None] = lambda: None,
  on_audited: Callable[[Sequence[results.AuditReport]], None] = lambda _: None,
  on_searched: Callable[
    [_query_leakage_results.QueryLeakage | None], None
  ] = lambda _: None,
) -> results.Report | None:
  """Runs the pipeline, or its first stages.

  Args:
    config: all settings.
    workdir: the working directory; finished results in it are used.
    stages: what is wanted, of `STAGES`; what it needs is run too. None: all.
    progress: whether bars are shown.
    on_accepted: called once the working directory is ours and holds no results
      of other data, before anything else is written to it.
    on_audited: called with the audits once all is done.
    on_searched: called with what was found of real queries among the synthetic
      ones; None: nothing was looked for.

  Returns:
    The report, or None where it was not wanted.

  Raises:
    ValueError: if a setting or the data cannot be used, or another run is in
      the working directory.
  """
  unknown = set(stages or ()) - set(STAGES)
  if unknown:
    raise ValueError(f"expected stages of {STAGES}, got {sorted(unknown)}")
  wanted = _wanted(config, stages or STAGES)
  progress = progress and distributed.is_main()
  config = _with_progress(config, progress)
  with contextlib.ExitStack() as stack:
    if distributed.is_main():
      stack.enter_context(workspace.locked(workdir))
    space = distributed.main_first(
      "workspace",
      lambda: workspace.Workspace(
        workdir, config.secret_seed, may_draw=distributed.is_main()
      ),
    )
    distributed.check_same(
      "working directory",
      space.seed("the same in all processes"),
      f"give all of them one --workdir, not a {workdir} of their own",
    )
    make = runner.Runner(space, _say if distributed.is_main() else _nothing)
    pipeline = execute.Pipeline(config, space, make, wanted, progress)
    report = pipeline.run(on_accepted if distributed.is_main() else _nothing)
    on_audited(pipeline.audits)
    on_searched(pipeline.leakage)
    return report


def _say(text: str) -> None:
  print(text, flush=True)


def _nothing(*told: str) -> None:
  del told


def _wanted(config: RunConfig, stages: Sequence[str]) -> tuple[str, ...]:
  """Returns the stages up to the last wanted, without what it does not read."""
  last = max(STAGES.index(stage) for stage in stages)
  wanted = STAGES[: last + 1]
  needs = {
    "audit": _auditing.needed(config.audit),
    "query_leakage": _query_stages.LEAKAGE_NEEDS,
  }
  if wanted[-1] not in needs:
    return wanted
  read = {*needs[wanted[-1]], *stages}
  return tuple(stage for stage in wanted if stage in read)


def _with_progress(config: RunConfig, progress: bool) -> RunConfig:
  """Hands the choice of progress bars to every loop."""

  def chosen(stage):
    if isinstance(stage, tuple):
      return tuple(chosen(one) for one in stage)
    settings = dataclasses.replace(stage.settings, progress=progress)
    return dataclasses.replace(stage, settings=settings)

  names = (
    *("pretrain", "finetune_dp", "train_retriever"),
    *("direct_dp", "direct_dp_methods"),
  )
  return dataclasses.replace(
    config, **{name: chosen(getattr(config, name)) for name in names}
  )
