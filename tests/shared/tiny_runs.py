"""Settings of the smallest runs, and one stage of them alone."""

import dataclasses
from typing import Any

from synthq_jax.runtime import rows, stage
from synthq_jax.stages import (
  direct_dp,
  evaluate,
  finetune_dp,
  generate,
  plan,
  prepare_data,
  train_retriever,
)


def config(source: str, **changes: Any) -> plan.RunConfig:
  """Every stage with two steps, on public data."""
  base = plan.RunConfig(
    prepare_data=prepare_data.Config(
      source=source,
      document_length=16,
      query_length=12,
      public_test_documents=20,
    ),
    finetune_dp=finetune_dp.Config(steps=2, batch_size=16),
    generate=generate.Config(
      num_documents=24, max_length=8, gauge_queries=10, batch_size=24
    ),
    train_retriever=train_retriever.Config(
      steps=2, batch_size=8, warmup_steps=1
    ),
    direct_dp=direct_dp.Config(steps=2, batch_size=8),
    evaluate=evaluate.Config(bootstrap_samples=20),
    secret_seed=7,
    public_data=True,
  )
  return dataclasses.replace(base, **changes)


def make(
  one: stage.Stage,
  settings: Any,
  folders: Any,
  *,
  row: rows.Row | None = None,
  name: str = "",
  digest: str = "digest",
  inputs: Any = None,
) -> Any:
  """Makes one result of a stage, and saves it; its folder is called as its row."""
  name = name or str(row or "")
  task = stage.Task(
    result_path="/".join(filter(None, (one.folder or one.name, name))),
    row=row,
    digest=digest,
    settings=settings,
    folders=folders,
    inputs=inputs,
  )
  return one.make(task)
