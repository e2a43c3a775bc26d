"""Claims and results that no run made, for tests that only read them."""

from typing import Any

from synthq_jax.pipeline import results
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import sampling, statement


def claim(identifier: str = "finetune_dp/1a2b", **changes: Any):
  """Returns the statement of a short private training."""
  settings = {
    "sampler": sampling.FixedOrder(num_examples=64, batch_size=16),
    "relation": "REPLACE_SPECIAL",
    "accountant": "rdp",
    "noise_multiplier": 4.0,
    "l2_clip_norm": 0.1,
    "steps": 8,
    "delta": 1 / 128,
  }
  made = claim_lib.Claim(**(settings | changes))
  return made.statement(identifier)


def checkpoint(**changes: Any) -> results.Checkpoint:
  settings = {
    "directory": "finetune_dp/eps8",
    "kind": "generator",
    "name": "eps8",
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
    "unit": "query",
    "num_documents": 9,
    "num_queries": {"train": 9},
    "num_pairs": {"train": 9},
    "max_positives": 1,
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
