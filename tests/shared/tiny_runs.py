"""Data and settings of the smallest runs."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from synthq_jax.pipeline import plan
from synthq_jax.stages import (
  direct_dp,
  evaluate,
  finetune_dp,
  generate,
  prepare_data,
  stage,
  train_retriever,
)


def write_lines(path: pathlib.Path, rows: Iterable[Any]) -> None:
  """Writes JSONL."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_qrels(
  folder: pathlib.Path, split: str, numbers: Iterable[int], grade: int = 1
) -> None:
  """Judges the document of each query's own number."""
  path = folder / "qrels" / f"{split}.tsv"
  path.parent.mkdir(parents=True, exist_ok=True)
  rows = "".join(f"q{i}\td{i}\t{grade}\n" for i in numbers)
  path.write_text(f"query-id\tcorpus-id\tscore\n{rows}")


def write_beir(
  folder: pathlib.Path,
  numbers: Iterable[int],
  splits: Mapping[str, Iterable[int]],
  *,
  document: Callable[[int], str],
  query: Callable[[int], str],
) -> None:
  """Writes a BEIR folder in which query i asks for document i."""
  numbers = list(numbers)
  for name, letter, text in (
    ("corpus", "d", document),
    ("queries", "q", query),
  ):
    rows = ({"_id": f"{letter}{i}", "text": text(i)} for i in numbers)
    write_lines(folder / f"{name}.jsonl", rows)
  for split, judged in splits.items():
    write_qrels(folder, split, judged)


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
  name: str = "",
  digest: str = "digest",
  **inputs: Any,
) -> Any:
  """Makes one result of a stage, and saves it."""
  task = stage.Task(
    place="/".join(filter(None, (one.folder or one.name, name))),
    name=name,
    digest=digest,
    settings=settings,
    folders=folders,
    inputs=inputs,
    progress=False,
  )
  return one.make(task)
