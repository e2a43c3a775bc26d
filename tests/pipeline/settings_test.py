"""Settings of stages that make no sense are refused where they are made."""

import pytest

from synthq_jax.pipeline import config_types, plan
from synthq_jax.stages import audit, direct_dp, filter_queries, query_leakage

ROW = {"method": "row"}
WRONG = (
  (plan.Canaries, {"repetitions": 10}, "repetitions=10"),
  (plan.Canaries, {"repetitions": (0,)}, r"repetitions=\(0,\)"),
  (plan.Canaries, {"digits": 19}, "digits=19"),
  (plan.Canaries, {"digits": 1}, "digits"),
  (plan.Canaries, {"kinds": ("secret",)}, "kinds=.'secret'"),
  (audit.Config, {"num_candidates": 1}, "num_candidates"),
  (audit.Config, {"num_ranked": 1}, "num_ranked"),
  (audit.Config, {"queries_per_canary": 0}, "queries_per_canary"),
  (audit.Config, {"batch_size": 0}, "batch_size"),
  (audit.Config, {"attacks": ("guess",)}, "attacks=.'guess'"),
  (audit.Config, {"attacks": ()}, "attacks=."),
  (audit.Config, {"confidence": 0.4}, "confidence=0.4"),
  (filter_queries.Config, {"top_k": -1}, "Config.top_k"),
  (filter_queries.Config, {"ranker": "luck"}, "Config.ranker must be one of"),
  (filter_queries.Config, {"copied_share": 1.5}, "Config.copied_share"),
  (filter_queries.Config, {"copied_share": 0.0}, "Config.copied_share"),
  (filter_queries.Config, {"steps": 0}, "Config.steps"),
  (filter_queries.Config, {"copied_words": 0}, "Config.copied_words"),
  (query_leakage.Config, {"detectors": ()}, "Config.detectors"),
  (query_leakage.Config, {"detectors": ("exact", "smell")}, "Config.detectors"),
  (query_leakage.Config, {"token_set": 0.0}, "Config.token_set"),
  (query_leakage.Config, {"containment": 1.5}, "Config.containment"),
  (query_leakage.Config, {"embedding": 1.01}, "Config.embedding"),
  (query_leakage.Config, {"confidence": 0.4}, "Config.confidence"),
  (query_leakage.Config, {"max_real": 1}, "Config.max_real"),
  (query_leakage.Config, {"max_written": 0}, "Config.max_written"),
  (query_leakage.Config, {"num_examples": -1}, "Config.num_examples"),
  (direct_dp.Config, {"method": "rows"}, "Config.method must be one of"),
  (direct_dp.Config, {"loss": "hinge"}, "Config.loss must be one of"),
  (direct_dp.Config, {**ROW, "loss": "sigmoid"}, "expected losses.contrastive"),
  (direct_dp.Config, {**ROW, "gradients": "none"}, "expected gradients among"),
  (direct_dp.Config, {"method": "logit", "norms": "rough"}, "expected norms"),
  (direct_dp.Config, {"unit": "document"}, "Config.unit must be one of"),
  (direct_dp.Config, {**ROW, "negatives": "batch"}, "document moves all rows"),
  (direct_dp.Config, {"label": "a/b"}, "Config.label must be letters"),
  (direct_dp.Config, {"group_size": 1}, "Config.group_size must be at least 2"),
  (direct_dp.Config, {"clip_norm": 0.0}, "Config.clip_norm must be above 0"),
  (
    direct_dp.Config,
    {"method": "batch", "unit": "query", "microbatch_size": 3},
    "batch_size must be a multiple of microbatch_size",
  ),
)


@pytest.mark.parametrize(("kind", "settings", "words"), WRONG)
def test_settings_that_make_no_sense_are_refused(kind, settings, words):
  with pytest.raises(ValueError, match=words) as caught:
    kind(**settings)
  assert "\n" not in str(caught.value)


def test_whole_numbers_become_floats_where_these_are_due():
  config = config_types.conform(
    query_leakage.Config(token_set=1), query_leakage.Config, "x"
  )
  assert type(config.token_set) is float
