"""Runs the whole pipeline: all settings of a run in one value.

The modules of `synthq_jax.stages` define the stages and their inputs. The
module `runner` makes and skips results.
"""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from synthq_jax import field_kinds
from synthq_jax import stages as stages_lib
from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.data import shipped, tokenizer_json
from synthq_jax.models import t5_config
from synthq_jax.runtime import (
  config_types,
  encoder_start,
  private_training,
  results,
  runner,
  workspace,
)
from synthq_jax.runtime import rows as rows_lib
from synthq_jax.stages import _checks, prepare_test_set
from synthq_jax.stages import audit as audit_lib
from synthq_jax.stages import compare_queries as compare_queries_lib
from synthq_jax.stages import direct_dp as direct_dp_lib
from synthq_jax.stages import encode_documents as encode_documents_lib
from synthq_jax.stages import evaluate as evaluate_lib
from synthq_jax.stages import filter_queries as filter_queries_lib
from synthq_jax.stages import finetune_dp as finetune_dp_lib
from synthq_jax.stages import fuse as fuse_lib
from synthq_jax.stages import generate as generate_lib
from synthq_jax.stages import learn_adapter as learn_adapter_lib
from synthq_jax.stages import learn_map as learn_map_lib
from synthq_jax.stages import learn_to_rank as learn_to_rank_lib
from synthq_jax.stages import prepare_data as prepare_data_lib
from synthq_jax.stages import query_leakage as query_leakage_lib
from synthq_jax.stages import release_scores as release_scores_lib
from synthq_jax.stages import report as report_lib
from synthq_jax.stages import static_encoder as static_encoder_lib
from synthq_jax.stages import train_retriever as train_retriever_lib
from synthq_jax.training import distributed, progress

__all__ = [
  "STAGES",
  "Canaries",
  "Outlook",
  "Rows",
  "RunConfig",
  "Training",
  "list_notes",
  "outlook",
  "plan_trainings",
  "run",
]

STAGES = tuple(stages_lib.SUMMARIES)
"""Names of the stages, in the order in which they run."""
_Settings = TypeVar("_Settings")
_TRAININGS = {"finetune_dp", "direct_dp", "train_retriever"}
_TRANSFORMERS = "--format=huggingface and sentence-transformers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
  """Rows of the table."""

  bm25: bool = True
  """Whether BM25 is a row; it trains on nothing."""
  untrained: bool = True
  """Whether the public encoder is a row, before any training on queries: every
  other row has to beat it."""
  public_only: bool = True
  """Whether synthetic queries of the public checkpoint, before any private
  step, train a row."""
  original: bool = True
  """Whether the real queries train a row, without privacy."""
  synthetic: tuple[float, ...] = (8.0,)
  """Epsilons of the generators whose synthetic queries train a row each; inf:
  without noise."""
  direct_dp: tuple[float, ...] = (8.0,)
  """Epsilons of the rows that train on the real queries with DP directly; inf
  is left out, since `original` is that row."""
  fused: bool = False
  """Whether each dense retriever gets another row, fused with BM25."""
  ltr: tuple[str, ...] = field_kinds.later(())
  """Names of dense retrievers' rows, or their beginnings, that get another row:
  their scores and BM25's with weights that private queries teach with DP
  (learning to rank)."""
  trained_part: str = field_kinds.later("encoder")
  """Part of a retriever that learns from queries without noise: the "encoder",
  or a "query_map" behind the public encoder (`learn_map`)."""
  adapted: tuple[float, ...] = field_kinds.later(())
  """Epsilons of the rows of a public encoder with a linear map of its query
  vectors that private queries teach. The encoder is that of the first row that is
  made, of "public_only" and "untrained"."""
  compared: tuple[str, ...] = ()
  """Names of rows with a finite epsilon that nobody will release, or their
  beginnings: "direct_dp", "synthetic_eps16", "adapter", "ltr_untrained". They
  lie under `private/`, and only the private page shows them. Every other row
  with a finite epsilon counts as released."""

  def __post_init__(self):
    for row in self.compared:
      kinds = ("synthetic", "direct_dp", "adapter", "ltr")
      if not rows_lib.begins_with(row, kinds):
        raise ValueError(
          f"plan.Rows.compared must hold rows that begin with {', '.join(kinds)}, as"
          f" direct_dp or synthetic_eps16, got {row!r}"
        )
    for field in ("fused", "ltr"):
      if getattr(self, field) and not self.bm25:
        raise ValueError(
          f"Rows.{field} needs the row that it is made of, got bm25=False: set"
          f" it, or leave {field} out"
        )
    config_types.one_of(self, "trained_part", ("encoder", "query_map"))
    if self.trained_part == "query_map" and not self.untrained:
      raise ValueError(
        "Rows.trained_part='query_map' needs the encoder whose vectors are mapped,"
        " got untrained=False: set it"
      )
    if self.adapted and self.adapter_base is None:
      raise ValueError(
        "Rows.adapted needs the encoder whose vectors are mapped, got"
        " public_only and untrained=False: set one, or leave adapted out"
        " (ADAPTED=())"
      )
    for field in ("synthetic", "direct_dp", "adapted"):
      names: dict[str, float] = {}
      for epsilon in getattr(self, field):
        if not epsilon > 0:
          raise ValueError(
            f"Rows.{field} must hold epsilons above 0, got epsilon={epsilon}:"
            " change EPSILON"
          )
        name = rows_lib.Row(epsilon=epsilon).queries
        if name in names:  # the second would overwrite the first, at a cost
          raise ValueError(
            f"plan.Rows.{field} must hold epsilons whose rows have different"
            f" names, got {names[name]!r} and {epsilon!r}, both called {name}:"
            " leave one out"
          )
        names[name] = epsilon

  @property
  def adapter_base(self) -> rows_lib.Row | None:
    """Retriever whose query vectors adapters map; None: it is not made."""
    if self.public_only and self.trained_part == "encoder":
      return rows_lib.PUBLIC_ONLY
    return rows_lib.UNTRAINED if self.untrained else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Canaries:
  """Planted records whose secrets an audit asks the generator for."""

  number: int = 0
  """Canaries of each kind and number of repetitions; a fair coin decides
  whether each is planted. 0: no audit."""
  kinds: tuple[str, ...] = tuple(canaries_lib.KINDS)
  """Kinds of canaries, of `canaries.KINDS`."""
  repetitions: tuple[int, ...] = (1, 10, 100)
  """Numbers of copies of a planted canary in the private data; each copy is a
  record, and counts in n."""
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
    times = self.repetitions
    if not (isinstance(times, (tuple, list)) and times and min(times) > 0):
      raise ValueError(
        "plan.Canaries.repetitions must be numbers above 0, got"
        f" repetitions={self.repetitions}"
      )


def _default(kind: type[_Settings]) -> _Settings:
  """Makes a field whose default is a `kind` with its own defaults."""
  return dataclasses.field(default_factory=kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Settings of `synthq run`: a field for each stage's Config, and more."""

  checkpoint: str = ""
  """Public T5 that generators start from, and retrievers if they are no static
  vectors, in our own format, T5X's or Hugging Face's; empty: the shipped
  one."""
  model: str | t5_config.T5Config | None = None
  """Shape that the checkpoint must have, or its name, such as "t5_1_1_base";
  None: any shape."""
  encoder: encoder_start.EncoderStart = _default(encoder_start.EncoderStart)
  """Public encoder that retrievers start from."""
  direct_dp_methods: tuple[direct_dp_lib.Config, ...] = ()
  """Several methods instead of `direct_dp`, each with a label of its own."""
  test_sets: tuple[str, ...] = ()
  """Public collections on which every row is scored as well, e.g. "beir:DIR"; a
  folder of such folders stands for all of them (`prepare_test_set.expand`)."""
  canaries: Canaries = _default(Canaries)
  """Canaries that the audit plants."""
  rows: Rows = _default(Rows)
  """Rows of the table."""
  secret_seed: int | None = None
  """Seed that fixes batches and noise, for demonstrations on public data only;
  None draws a secret that stays in the working directory's private folder."""
  public_data: bool = False
  """Whether the "private" queries are public, so that the secret may be fixed;
  the demo set's are."""

  prepare_data: prepare_data_lib.Config = _default(prepare_data_lib.Config)
  finetune_dp: finetune_dp_lib.Config = _default(finetune_dp_lib.Config)
  generate: generate_lib.Config = _default(generate_lib.Config)
  static_encoder: static_encoder_lib.Config = _default(
    static_encoder_lib.Config
  )
  filter_queries: filter_queries_lib.Config = _default(
    filter_queries_lib.Config
  )
  query_leakage: query_leakage_lib.Config = _default(query_leakage_lib.Config)
  train_retriever: train_retriever_lib.Config = _default(
    train_retriever_lib.Config
  )
  direct_dp: direct_dp_lib.Config = _default(direct_dp_lib.Config)
  encode_documents: encode_documents_lib.Config = _default(
    encode_documents_lib.Config
  )
  fuse: fuse_lib.Config = _default(fuse_lib.Config)
  learn_to_rank: learn_to_rank_lib.Config = _default(learn_to_rank_lib.Config)
  learn_map: learn_map_lib.Config = _default(learn_map_lib.Config)
  learn_adapter: learn_adapter_lib.Config = _default(learn_adapter_lib.Config)
  evaluate: evaluate_lib.Config = _default(evaluate_lib.Config)
  audit: audit_lib.Config = _default(audit_lib.Config)
  compare_queries: compare_queries_lib.Config = _default(
    compare_queries_lib.Config
  )
  release_scores: release_scores_lib.Config = _default(
    release_scores_lib.Config
  )
  report: report_lib.Config = _default(report_lib.Config)

  def __post_init__(self):
    if isinstance(self.model, str):
      object.__setattr__(self, "model", t5_config.get(self.model))
    folder = self.encoder.folder
    if folder and self.static_encoder.dim:
      raise ValueError(
        "static_encoder.Config.dim must be 0 for retrievers that start from"
        f" ENCODER, got {self.static_encoder.dim} and {folder}: set STATIC_DIM=0"
      )
    read, written = self.finetune_dp.prefix, self.generate.prefix
    if self.rows.synthetic and read != written:
      raise ValueError(
        "generate.Config.prefix must be finetune_dp.Config.prefix, which the"
        f" generator is trained to read, got {written!r} and {read!r}: set PREFIX"
      )
    self._check_depth(self.rows.fused, "fuse")
    self._check_depth(bool(self.rows.ltr), "learn_to_rank")
    labels = [method.label for method in self.direct_dp_methods]
    if len(set(labels)) < len(labels):
      raise ValueError(
        "RunConfig.direct_dp_methods must have different labels, got"
        f" {', '.join(map(repr, labels))}: set direct_dp.Config.label"
      )
    if self.secret_seed is not None and not self.has_public_queries:
      raise ValueError(
        "RunConfig.secret_seed must be None for private data, got a fixed one,"
        " from which anybody could recompute the noise: leave SECRET_SEED out,"
        " or give --gin.SECRET_SEED=None (or say public_data=True if the queries"
        " are public)"
      )

  @property
  def has_public_queries(self) -> bool:
    """Whether the "private" queries are public: the demo's, or by
    `public_data`."""
    return self.public_data or self.prepare_data.source == "environment_docs"

  def _check_depth(self, is_made: bool, name: str):
    """Refuses a system that reranks more results than the search returns."""
    taken = getattr(self, name).depth
    if is_made and self.evaluate.depth < taken:
      raise ValueError(
        f"evaluate.Config.depth must be at least {name}.Config.depth, whose"
        " first results are put into a new order, got"
        f" {self.evaluate.depth} and {taken}"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
  """One private training of a plan; a None becomes known once the data is
  read."""

  stage: str
  """Name of the stage."""
  result_path: str
  """Folder of the result, e.g. "finetune_dp/eps8"."""
  row: rows_lib.Row
  """Row of the table."""
  is_released: bool
  """Whether the row counts as released; if not, it is only compared."""
  epsilon: float
  """Target epsilon of this training alone."""
  delta: float | None
  """Target delta; None: 1 / (2n), n the number of queries, or of users if these
  are the unit."""
  num_records: int | None
  """Private records to draw from: queries, or users."""
  num_users: int | None = None
  """Users of the train queries, if these are the unit: n of `delta`."""
  batch_size: int | None
  """Expected records of a batch; None: all records."""
  max_batch_size: int | None
  """Maximum records of a batch."""
  steps: int
  """Optimizer steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
  """The plan of a run, and its finished part."""

  progress: Sequence[tuple[str, Mapping[str, bool] | None]]
  """Stages, each with its rows and whether they are finished; None: an earlier
  stage is not finished (`runner.Run.survey`)."""
  rows: Mapping[str, tuple[str, ...]]
  """Folders of the results of each stage; "" is the folder of a single
  result."""
  trainings: tuple[Training, ...]
  """Private trainings, finished ones included."""


def run(
  config: RunConfig,
  workdir: str | os.PathLike,
  *,
  stages: Sequence[str] | None = None,
  on_accepted: Callable[[], None] = lambda: None,
  on_finished: Callable[[Mapping[str, Sequence[Any]]], None] = lambda _: None,
) -> results.Report | None:
  """Runs the pipeline, or some of its stages.

  Args:
    config: all settings.
    workdir: the working directory; its finished results are used.
    stages: names of stages, of `STAGES`; the stages that they need run too.
      None: all.
    on_accepted: called once the working directory is locked and holds no
      results of other data, before anything else is written to it.
    on_finished: called with the results of each stage after the last one.

  Returns:
    The report, or None if it is not among the stages.

  Raises:
    ValueError: if a setting or the data cannot be used, or another run is in
      the working directory.
  """
  stage_names = stages_lib.with_needs(stages or STAGES)
  _checks.check_rows(config)
  _checks.check_size(config, stage_names)
  _checks.check_t5(config)
  _checks.check_checkpoints(config, stage_names)
  _checks.check_test_sets(config)
  notes = list_notes(config, stage_names)
  with contextlib.ExitStack() as stack:
    stack.enter_context(progress.shown(distributed.is_main()))
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
    is_main = distributed.is_main()
    this = runner.Run(
      _plan_rows(config, stage_names),
      space,
      [*map(stages_lib.get, stage_names)],
      say=functools.partial(print, flush=True) if is_main else _do_nothing,
    )
    for note in notes:
      this.say(note)
    this.execute(on_accepted if is_main else _do_nothing)
    finished = {
      name: [item.value for item in rows.values()]
      for name, rows in this.made.items()
    }
    on_finished(finished)
    return next(iter(finished.get("report", ())), None)


def _plan_rows(
  config: RunConfig, stage_names: tuple[str, ...]
) -> rows_lib.Plan:
  """Plans the rows of a run; opens the test sets if a stage reads them."""
  names = config.test_sets if "prepare_test_set" in stage_names else ()
  test_sets = {item.name: item for item in prepare_test_set.expand(names)}
  return rows_lib.Plan(config=config, stages=stage_names, test_sets=test_sets)


def outlook(
  config: RunConfig, workdir: str | os.PathLike, stage_names: Sequence[str]
) -> Outlook:
  """Plans a run, and finds its finished results; makes nothing.

  Args:
    config: all settings.
    workdir: the working directory, which may be missing.
    stage_names: names of stages, of `STAGES`; the list includes the stages that
      they need.

  Returns:
    The rows of every stage, the finished ones, and the private trainings.

  Raises:
    ValueError: if a setting names missing files, as `run` would find.
  """
  stage_names = stages_lib.with_needs(stage_names)
  stages = [*map(stages_lib.get, stage_names)]
  _checks.check_rows(config)
  _checks.check_named(config, stage_names)
  _checks.check_size(config, stage_names)
  _checks.check_batches(config, stage_names)
  names = prepare_test_set.list_names(config.test_sets)
  planned = rows_lib.Plan(
    config=config, stages=stage_names, test_sets=dict.fromkeys(names)
  )
  prepared = None
  if config.secret_seed is None:
    workspace.check_lost(workspace.Folders(workdir))
  try:
    space = workspace.Workspace(workdir, config.secret_seed, may_draw=False)
  except ValueError:  # without a secret there is no result
    first, *later = stage_names
    stages_done: list[tuple[str, Mapping[str, bool] | None]] = [
      (first, {"": False}),
      *((name, None) for name in later),
    ]
  else:
    planned = _plan_rows(config, stage_names)
    this = runner.Run(planned, space, stages, say=_do_nothing)
    stages_done = list(this.survey())
    prepared = this.prepared if this.get_results("prepare_data") else None
  return Outlook(
    progress=stages_done,
    rows={item.name: tuple(item.plan(planned)) for item in stages},
    trainings=tuple(plan_trainings(planned, prepared)),
  )


def plan_trainings(
  plan: rows_lib.Plan, prepared: results.PreparedData | None = None
) -> Iterator[Training]:
  """Plans the trainings with noise.

  Args:
    plan: the rows of the run.
    prepared: the data; None: it is not read yet.

  Yields:
    Each training, in the order of the stages.

  Raises:
    ValueError: if a training would be refused, such as one whose batch is larger
      than the data.
  """
  for stage in map(stages_lib.get, plan.stages):
    for name, row in stage.plan(plan).items():
      planned = stage.training(plan, row)
      if planned is None or math.isinf(planned.epsilon):
        continue
      yield Training(
        stage=stage.name,
        result_path=f"{stage.folder or stage.name}/{name}",
        row=row,
        is_released=not plan.is_compared(row),
        epsilon=planned.epsilon,
        steps=planned.config.steps,
        **_sizes(planned, prepared if planned.is_counted else None),
      )


def _sizes(
  planned: private_training.Planned, prepared: results.PreparedData | None
) -> dict[str, Any]:
  """Returns the sizes of a training that follow from the number of records.

  Raises:
    ValueError: if the data is known and the training would be refused.
  """
  config = planned.config
  if prepared is None:
    return {
      "delta": config.delta,
      "num_records": None,
      "batch_size": config.batch_size or None,
      "max_batch_size": None,
    }
  users = prepared.num_users.get("train")
  draws_users = planned.draws_users(prepared)
  config.check(prepared, draws_users=draws_users)
  config = planned.get_settings(prepared)
  number = users if draws_users else prepared.num_queries["train"]
  assert number is not None  # users are drawn only if their number is known
  sampler = private_training.sampler(
    private_training.Settings(
      config=config,
      epsilon=planned.epsilon,
      mechanism="",
      num_users=None if draws_users else users,
      fixed_order=planned.fixed_order,
    ),
    number,
    prepared.queries_per_user,
  )
  return {
    "delta": config.delta or 1 / (2 * prepared.units("train")),
    "num_records": number,
    "num_users": users,
    "batch_size": config.batch_size,
    "max_batch_size": sampler.max_batch_size,
  }


def list_notes(config: RunConfig, stage_names: Sequence[str]) -> Sequence[str]:
  """Returns notes on tokens, exports and prompts, which a dry run prints, too.

  Args:
    config: all settings.
    stage_names: names of the stages, with the stages that they need.

  Raises:
    ValueError: if the vocabulary cannot be used, or its end-of-text id differs
      from a checkpoint's.
  """
  vocabulary, added = _checks.load_vocabulary(config)
  prompts = _checks.describe_prompts(config, stage_names)
  if vocabulary is None or not _TRAININGS & set(stage_names):
    return prompts
  notes = []
  if added:
    notes.append(
      f"note: {shipped.checkpoint(config.checkpoint)}: tokens that were added to its"
      f" tokenizer are read as text: {' '.join(added[:5])}; use none of them in a"
      " prefix"
    )
  try:
    tokenizer_json.check(vocabulary.path)
  except ValueError as error:
    notes.append(
      f"note: `synthq export` to {_TRANSFORMERS} would be refused: {error}"
    )
  return notes + prompts


def _do_nothing(*messages: str) -> None:
  del messages
