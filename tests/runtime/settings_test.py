"""Settings of stages that make no sense: refused in one line that names them."""

import math

import pytest

from synthq_jax.models import lora
from synthq_jax.runtime import config_types
from synthq_jax.stages import (
  audit,
  compare_queries,
  direct_dp,
  evaluate,
  filter_queries,
  finetune_dp,
  fuse,
  generate,
  learn_adapter,
  learn_map,
  learn_to_rank,
  plan,
  prepare_data,
  query_leakage,
  release_scores,
  static_encoder,
  train_retriever,
)

REFUSED = {
  plan.Rows: [
    ({"synthetic": (0.0,)}, "epsilons above 0"),
    ({"synthetic": (-1.0,)}, "epsilons above 0"),
    ({"direct_dp": (float("nan"),)}, "epsilons above 0"),
    ({"direct_dp": (2.0, 2.0)}, "direct_dp must hold epsilons whose"),
    ({"adapted": (0.0,)}, "adapted must hold epsilons above 0"),
    ({"adapted": (8.0, 8)}, "different names"),
    (
      {"adapted": (8.0,), "untrained": False, "public_only": False},
      "public_only and untrained=False: set one, or leave",
    ),
    ({"ltr": ("original",), "bm25": False}, "Rows.ltr needs the row"),
    ({"fused": True, "bm25": False}, "Rows.fused needs the row"),
  ],
  plan.RunConfig: [
    ({"direct_dp_methods": (direct_dp.Config(),) * 2}, "different labels"),
    (
      {"rows": plan.Rows(fused=True), "evaluate": evaluate.Config(depth=10)},
      r"at least fuse\.Config\.depth, .* 10 and 100",
    ),
    (
      {
        "rows": plan.Rows(ltr=("original",)),
        "learn_to_rank": learn_to_rank.Config(depth=1000),
      },
      r"at least learn_to_rank\.Config\.depth, .* 100 and 1000",
    ),
  ],
  prepare_data.Config: [
    (
      {"unit": "user", "queries_per_user": 0},
      "queries_per_user must be at",
    ),
    ({"unit": "person"}, "unit must be"),
    ({"document_length": 1}, "document_length must be at least 2"),
    ({"queries_per_user": 4}, "set UNIT='user'"),
    ({"written_for": "train"}, "must be 'all' for the demo set"),
    ({"shared_in": "gs://b/prepared"}, "shared_in must be a folder, got gs://"),
  ],
  finetune_dp.Config: [
    ({"clip_norm": math.inf}, "clip_norm must be above 0, got inf"),
    ({"steps": 0}, "finetune_dp.Config.steps must be at least 1"),
    ({"delta": 0.5}, "delta must be above 0 and below 1/n"),
    ({"delta": 0.0}, "finetune_dp.Config.delta must be above 0"),
    ({"learning_rate": -1.0}, "learning_rate must be above 0"),
    ({"optimizer": "sgd"}, "one of dp_adam, dp_adafactor"),
    ({"adapter": lora.LoRA(rank=2), "trained": "x"}, r"TRAINED='\.\*'"),
  ],
  compare_queries.Config: [
    ({"measures": ()}, "compare_queries.Config"),
    ({"num_similar": 0}, "compare_queries.Config"),
  ],
  fuse.Config: [({"weight": 1.5}, r"fuse\.Config\.weight")],
  static_encoder.Config: [
    ({"steps": 20}, "more than warmup_steps=30, got 20"),
    ({"dim": -1}, r"static_encoder.Config.dim must"),
  ],
  learn_adapter.Config: [
    ({"candidates": 4, "most_relevant": 4}, "candidates must be above"),
    ({"temperature": 0.0}, "temperature"),
    ({"pool": -1}, "pool"),
    ({"optimizer": "sgd"}, "optimizer"),
  ],
  learn_map.Config: [
    ({"share": 0.0}, "share"),
    ({"share": 1.5}, "at most 1"),
    ({"candidates": 4}, "above most_relevant=4"),
    ({"steps": 4}, "more than warmup_steps=4"),
  ],
  release_scores.Config: [
    ({"epsilon": math.inf}, "release_scores"),
    ({"epsilon": 0.0}, "release_scores"),
    ({"measures": ()}, "release_scores"),
    ({"delta": 0.0}, "release_scores"),
  ],
  generate.Config: [
    ({"temperature": 0.0}, "generate.Config.temperature must be above 0"),
    ({"p": 1.5}, "generate.Config.p must be at most 1"),
  ],
  plan.Canaries: [
    ({"repetitions": 10}, "repetitions=10"),
    ({"repetitions": (0,)}, r"repetitions=\(0,\)"),
    ({"digits": 19}, "digits=19"),
    ({"digits": 1}, "digits"),
    ({"kinds": ("secret",)}, "kinds=.'secret'"),
  ],
  audit.Config: [
    ({"num_candidates": 1}, "num_candidates"),
    ({"p": 1.5}, "p=1.5|got 1.5"),
    ({"num_ranked": 1}, "num_ranked"),
    ({"queries_per_canary": 0}, "queries_per_canary"),
    ({"batch_size": 0}, "batch_size"),
    ({"confidence": 0.4}, "confidence=0.4"),
  ],
  direct_dp.Config: [
    ({"method": "rows"}, "direct_dp.Config.method must be one of"),
    ({"loss": "hinge"}, "direct_dp.Config.loss must be one of"),
    ({"method": "row", "loss": "sigmoid"}, "losses.contrastive.Soft"),
    ({"method": "row", "gradients": "none"}, "expected gradients among"),
    ({"method": "logit", "norms": "rough"}, "expected norms among"),
    ({"unit": "document"}, "direct_dp.Config.unit must be one of"),
    ({"method": "row", "negatives": "batch"}, "that of method='example'"),
    ({"method": "example", "gradients": "none"}, "expected gradients among"),
    ({"label": "a/b"}, "direct_dp.Config.label must be letters"),
    ({"group_size": 1}, "direct_dp.Config.group_size must be at least 2"),
    (
      {"method": "logit", "unit": "query", "batch_size": 1},
      "batch_size must be at least 2",
    ),
    ({"clip_norm": 0.0}, "direct_dp.Config.clip_norm must be above 0"),
    (
      {"method": "batch", "unit": "query", "microbatch_size": 3},
      "batch_size must be a multiple of microbatch_size",
    ),
  ],
  train_retriever.Config: [
    ({"steps": 30}, "steps must be more than warmup_steps=30, got 30"),
    ({"batch_size": 10, "microbatch_size": 4}, "must divide batch_size=10"),
  ],
  filter_queries.Config: [
    ({name: value}, f"filter_queries.Config.{name}")
    for name, value in (("top_k", -1),)
  ],
  query_leakage.Config: [
    ({name: value}, rf"query_leakage\.Config\.{name}")
    for name, value in (
      ("detectors", ()), ("detectors", ("exact", "smell")), ("token_set", 0.0),
      ("containment", 1.5), ("confidence", 0.4), ("max_real", 1),
      ("max_written", 0),
    )
  ],
}  # fmt: skip


@pytest.mark.parametrize(
  ("kind", "changes", "message"),
  [(kind, *row) for kind, rows in REFUSED.items() for row in rows],
)
def test_settings_that_make_no_sense_are_refused(kind, changes, message):
  with pytest.raises(ValueError, match=message) as caught:
    kind(**changes)
  assert "\n" not in str(caught.value)


def test_whole_numbers_become_floats():
  config = config_types.conform(
    query_leakage.Config(token_set=1),
    query_leakage.Config,
    "query_leakage.Config",
  )
  assert config.token_set == 1.0
