"""Draws the shareable pages, the private one, and the table on the screen."""

from synthq_jax.pipeline import report as report_lib
from synthq_jax.pipeline import results
from synthq_jax.stages import stage

__all__ = ["STAGE", "run"]


def jobs(run):
  """Yields one report on everything that there is."""
  leakage = run.rows("query_leakage")
  groups = (
    run.generators,
    run.queries,
    run.retrievers,
    run.rows("evaluate"),
    run.rows("audit"),
    leakage,
  )
  digests = [made.digest for group in groups for made in group.values()]
  generators, queries, retrievers, scores, audits, searches = (
    [made.value for made in group.values()] for group in groups
  )
  yield stage.Job(
    depends=(run.config.report, *run.encoder_data, *digests),
    settings=run.config.report,
    inputs={
      "evaluations": scores,
      "synthetic": queries,
      "checkpoints": [*generators, *retrievers],
      "audits": audits,
      "leakage": next(iter(searches), None),
    },
  )


def run(task: stage.Task) -> results.Report:
  """Writes the pages of `pipeline.report` from its inputs."""
  return report_lib.run(task.settings, task.folders, task.digest, **task.inputs)


STAGE = stage.Stage(
  name="report",
  result=results.Report,
  needs=(
    "prepare_data",
    "prepare_test_set",
    "filter_queries",
    "query_leakage",
    "evaluate",
    "audit",
  ),
  config=report_lib.Config,
  reads=("prepared", "encoder"),
  jobs=jobs,
  run=run,
  place_of=lambda made: f"{results.PRIVATE}/report",
)
