"""Claims and results that no run made, for tests that only read them."""

import dataclasses
import re
from typing import Any

from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import sampling, statement, terms
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.report import values as report_values
from synthq_jax.runtime import (
  comparison_results,
  private_training,
  released_results,
  results,
  rows,
  stage,
)


def claim(identifier: str = "finetune_dp/1a2b", **changes: Any):
  """Returns the statement of a short private training."""
  settings = {
    "sampler": sampling.FixedOrder(num_examples=64, batch_size=16),
    "relation": "REPLACE_SPECIAL",
    "noise_multiplier": 4.0,
    "l2_clip_norm": 0.1,
    "steps": 8,
    "delta": 1 / 128,
    "words": terms.QUERIES,
  }
  made = claim_lib.Claim(**(settings | changes))
  return made.statement(identifier)


def promise(epsilon: float | None):
  """Returns a statement of an epsilon; None for None."""
  return (
    None if epsilon is None else dataclasses.replace(claim(), epsilon=epsilon)
  )


def row(name: str) -> rows.Row:
  """Returns the row of a name, such as "fused_synthetic_eps8"."""
  if name == rows.LEXICAL:
    return rows.BM25
  system, middle, epsilon = re.fullmatch(
    r"(fused_|ltr_)?(.+?)(_eps[\d.]+|_inf)?", name
  ).groups()
  pairs, method = middle, ""
  if middle.startswith(f"{rows.DIRECT_DP}_"):
    pairs, method = rows.DIRECT_DP, middle.removeprefix(f"{rows.DIRECT_DP}_")
  return rows.Row(
    system=(system or rows.DENSE).rstrip("_"),
    pairs=pairs,
    method=method,
    epsilon=epsilon and float(epsilon.lstrip("_eps")),
  )


def checkpoint(**changes: Any) -> results.Checkpoint:
  settings = {
    "directory": "finetune_dp/eps8",
    "kind": "generator",
    "row": row("synthetic_eps8"),
    "statement": statement.non_private(),
    "steps": 1,
    "batch_size": 1,
    "num_parameters": 1,
    "metrics": "private/metrics.jsonl",
    "seconds": 1.0,
  }
  return results.Checkpoint(**(settings | changes))


def prepared(**changes: Any) -> results.PreparedData:
  settings = {
    "directory": "prepare_data",
    "private_directory": "private/prepare_data",
    "source": "beir:b",
    "digest": "d",
    "versions": "",
    "unit": unit_lib.QUERY,
    "num_documents": 9,
    "num_queries": {"train": 9},
    "num_pairs": {"train": 9},
    "test_split": "test",
    "num_public_test": 1,
    "cut_documents": 0.0,
    "vocabulary": "v",
    "vocab_size": 9,
    "extra_ids": 0,
    "document_length": 9,
    "query_length": 24,
    "seconds": 1.0,
  }
  return results.PreparedData(**(settings | changes))


def comparison(**changes: Any) -> comparison_results.QueryComparison:
  """Returns a comparison without rows, but for changes."""
  settings = {
    "directory": "",
    "measures": ("nDCG@10",),
    "test_set": "test",
    **dict.fromkeys(
      ("rows", "differences", "side_by_side", "shareable_side_by_side"), ()
    ),
    **dict.fromkeys(("generators", "asked", "similarity"), ()),
  }
  return comparison_results.QueryComparison(**(settings | changes))


def _page_values(changes: dict[str, Any]) -> dict[str, Any]:
  names = (
    "evaluations",
    "further_evaluations",
    "side_by_side",
    "released_scores",
  )
  names += ("synthetic", "checkpoints", "weights", "shipped", "result_folders")
  settings = {
    "measures": ("nDCG@10",),
    **dict.fromkeys(names, ()),
    "curves": {},
    "released": released_results.Released(
      shared={}, compared={}, started={}, unclaimed=()
    ),
    "public_data": False,
    "audited": False,
  }
  return settings | changes


def shareable_values(**changes: Any) -> report_values.Shareable:
  """Returns the values of a shareable page without results, but for changes."""
  settings = {
    "public_rows": (),
    "documents": results.public_documents(prepared()),
    "source": "beir",
    "unit": "query",
    "versions": "",
  }
  return report_values.Shareable(**_page_values(settings | changes))


def private_values(**changes: Any) -> report_values.Private:
  """Returns the values of a private page without results, but for changes."""
  settings = {
    "main": (),
    "comparison": comparison(),
    "audits": (),
    "leakage": None,
    "prepared": prepared(),
  }
  return report_values.Private(**_page_values(settings | changes))


def task(folders: Any, settings: Any, *, data: Any = None, **fields: Any):
  """Returns the task of a private training."""
  named = {"result_path": "stage/name", "digest": "digest", **fields}
  return stage.Task(
    folders=folders,
    settings=settings,
    inputs=private_training.Inputs(prepared=data or prepared()),
    **named,
  )


def audit(
  cell: Any = (), bound: Any = (), **changes: Any
) -> results.AuditReport:
  """Returns the audit of one kind of canary by one attack, but for changes."""
  cells = {
    "kind": "own_query",
    "repetitions": 1,
    "ranks": (1, 40),
    "held_out_ranks": (50, 70),
    "exposure": (13.3, 1.0),
    "leaked": 1,
    "leaked_held_out": 0,
  }
  bounds = {
    "attack": "likelihood",
    "repetitions": 1,
    "claimed_epsilon": 8.0,
    "num_inserted": 2,
    "num_held_out": 2,
    "epsilon_one_run": 2.5,
    "epsilon_one_run_fdp": 3.5,
    "auroc": (0.75, 0.2, 1.0),
    "tpr_at_1_fpr": (0.5, 0.0, 1.0),
  }
  settings = {
    "directory": "private/audit/eps8",
    "row": row("synthetic_eps8"),
    "cells": (results.AuditCell(**(cells | dict(cell))),),
    "bounds": (results.AuditBound(**(bounds | dict(bound))),),
    "num_candidates": 10_000,
    "num_ranked": 100,
    "confidence": 0.95,
    "claimed_epsilon": 8.0,
    "claimed_delta": 1e-5,
    "lower_bound": 2.5,
    "ceiling": 9.0,
    "num_searched": 0,
    "control": 0.5,
    "seconds": 1.0,
  }
  return results.AuditReport(**(settings | changes))
