"""A host's rows of a Poisson batch, and ids: no T5X is needed."""

import numpy as np
import pytest

from synthq_jax.backends.t5x import batches
from synthq_jax.privacy import sampling

RECORDS = batches.with_ids(
  {
    "tokens": np.arange(1, 61, dtype=np.int32).reshape(20, 3),
    "weights": np.ones((20, 2), np.int32),
  }
)
SAMPLER = sampling.Poisson(
  num_examples=20, expected_batch_size=6, max_batch_size=12
)


def parts(num_shards, step=3):
  drawn = SAMPLER.batch(7, step)
  parts = sampling.split(drawn, num_shards)
  rows = [sampling.take(RECORDS, part) for part in parts]
  return drawn, rows


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_the_hosts_parts_are_together_the_batch(num_shards):
  drawn, rows = parts(num_shards)
  whole = {k: np.concatenate([part[k] for part in rows]) for k in rows[0]}
  real = ~whole[sampling.IS_PADDING]
  np.testing.assert_array_equal(real, ~drawn.is_padding)
  chosen = drawn.indices[real]
  assert 0 < len(chosen) < 12
  for name, values in RECORDS.items():
    np.testing.assert_array_equal(whole[name][real], values[chosen])
    assert not whole[name][~real].any(), "padding carries a record"
    assert whole[name].dtype == values.dtype


def test_an_id_follows_from_the_records_features_alone():
  features = {name: RECORDS[name] for name in ("weights", "tokens")}
  ids = RECORDS[batches.EXAMPLE_ID]
  assert ids.dtype == np.int32 and len(set(ids.tolist())) == 20
  for rows in (np.arange(1, 20), np.arange(19, -1, -1), np.array([7])):
    some = batches.with_ids({k: x[rows] for k, x in features.items()})
    np.testing.assert_array_equal(some[batches.EXAMPLE_ID], ids[rows])
  for name in features:
    other = {**features, name: features[name] + 1}
    assert not set(batches.with_ids(other)[batches.EXAMPLE_ID]) & set(ids)
  twice = {k: np.repeat(x[:1], 2, axis=0) for k, x in features.items()}
  assert (batches.with_ids(twice)[batches.EXAMPLE_ID] == ids[0]).all()


def test_the_order_of_a_source_moves_no_batch():
  """A preprocessor may shuffle otherwise on every machine."""
  features = {name: RECORDS[name] for name in ("weights", "tokens")}
  features["tokens"] = features["tokens"].copy()
  features["tokens"][4] = features["tokens"][9]  # two equal ones
  first, digest = batches.in_order(features)
  for seed in range(5):
    other = np.random.default_rng(seed).permutation(20)
    given = {name: values[other] for name, values in features.items()}
    again, same = batches.in_order(given)
    assert same == digest
    np.testing.assert_array_equal(
      again[batches.EXAMPLE_ID],
      batches.with_ids({k: again[k] for k in features})[batches.EXAMPLE_ID],
    )
    for name in features:
      np.testing.assert_array_equal(again[name], first[name])
  kept = sorted(map(tuple, first["tokens"].tolist()))
  assert kept == sorted(map(tuple, features["tokens"].tolist()))
  features["tokens"][7, 0] += 1
  assert batches.in_order(features)[1] != digest
