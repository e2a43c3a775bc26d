"""Batches are what the accountant thinks they are."""

import dataclasses
import hashlib
import logging
import math
import pickle

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from synthq_jax.privacy import accounting, sampling

NUM, MEAN, STEPS = 200, 20, 2000


def memberships(sampler, steps=STEPS, seed=3):
  """Returns which record was in which batch, [steps, num_examples] bool."""
  found = np.zeros((steps, sampler.num_examples), bool)
  for step in range(steps):
    batch = sampler.batch(seed, step)
    found[step, batch.indices[~batch.is_padding]] = True
  return found


@pytest.fixture(scope="module")
def roomy():
  return memberships(
    sampling.Poisson(
      num_examples=NUM, expected_batch_size=MEAN, max_batch_size=80
    )
  )


def z_of_rate(found, probability):
  trials = found.size
  scale = np.sqrt(trials * probability * (1 - probability))
  return (found.sum() - trials * probability) / scale


def test_records_are_drawn_with_the_claimed_probability(roomy):
  assert abs(z_of_rate(roomy, 0.1)) < 4
  assert abs(z_of_rate(roomy, 0.11)) > 10
  assert abs(z_of_rate(roomy, 0.09)) > 10


def test_every_record_has_the_same_probability(roomy):
  def p_value(found):
    scaled = (found.sum(0) - STEPS * 0.1) ** 2 / (STEPS * 0.1 * 0.9)
    return stats.chi2.sf(scaled.sum(), NUM)

  assert p_value(roomy) > 1e-4
  favoured = roomy.copy()
  favoured[: STEPS // 10, :5] = True
  assert p_value(favoured) < 1e-8


def test_batch_sizes_vary_as_a_binomial_does(roomy):
  ratio = roomy.sum(1).var() / (NUM * 0.1 * 0.9)
  assert abs(ratio - 1) < 0.15
  fixed = sampling.FixedOrder(num_examples=NUM, batch_size=MEAN)
  assert memberships(fixed, steps=20).sum(1).var() == 0


def z_of_repeats(found):
  """How far repeats in consecutive steps are from those of independence."""
  repeats = found[1:] & found[:-1]
  return z_of_rate(repeats, 0.01)


def test_consecutive_steps_are_independent(roomy):
  assert abs(z_of_repeats(roomy)) < 4
  fixed = sampling.FixedOrder(num_examples=NUM, batch_size=MEAN)
  assert abs(z_of_repeats(memberships(fixed, steps=500))) > 20


@pytest.mark.parametrize("size", [1, 3])
def test_a_unit_of_several_records_moves_by_as_many_as_coins_draw(size):
  """What is drawn of it at once may move a sum past the end of its noise."""
  sampler = sampling.Poisson(
    num_examples=60, expected_batch_size=6, max_batch_size=60, group_size=size
  )
  expected = {
    drawn: 7 * math.comb(size, drawn) * 0.1**drawn * 0.9 ** (size - drawn)
    for drawn in range(1, size + 1)
  }
  assert sampler.uses(7) == pytest.approx(expected)


def test_a_batch_depends_on_seed_and_step_alone():
  def make():
    return sampling.Poisson(
      num_examples=1000, expected_batch_size=50, max_batch_size=100
    )

  uninterrupted = make()
  drawn = [uninterrupted.batch(11, step).indices for step in range(6)]
  assert make().batch(11, 5).indices == drawn[5]
  assert drawn[4] != drawn[5]
  assert make().batch(12, 5).indices != drawn[5]
  several = make().batch((11, 0), 5).indices
  assert make().batch((11, 0), 5).indices == several


def test_an_empty_batch_is_all_padding():
  sampler = sampling.Poisson(
    num_examples=50, expected_batch_size=1, max_batch_size=8
  )
  empty = [sampler.batch(0, step).is_padding.all() for step in range(200)]
  assert 0.25 < np.mean(empty) < 0.5  # (1 - 1/50)^50 = 0.364


def test_an_overfull_batch_keeps_a_uniform_subset():
  tight = sampling.Poisson(
    num_examples=NUM, expected_batch_size=MEAN, max_batch_size=MEAN
  )
  found = memberships(tight)
  sizes = found.sum(1)
  assert sizes.max() == MEAN
  overfull = stats.binom.sf(MEAN - 1, NUM, 0.1)
  assert stats.binomtest((sizes == MEAN).sum(), STEPS, overfull).pvalue > 1e-4
  counts = found[sizes == MEAN].sum(0)
  assert stats.chisquare(counts).pvalue > 1e-4
  biased = counts + 40 * (np.arange(NUM) < 9)
  assert stats.chisquare(biased).pvalue < 1e-4


@pytest.mark.parametrize("room", [20, 25, 60, 200, 201, 300])
def test_the_price_of_truncation_is_the_binomial_tail(room):
  sampler = sampling.Poisson(
    num_examples=NUM, expected_batch_size=MEAN, max_batch_size=room
  )
  expected = 30 * 0.1 * stats.binom.sf(room - 1, NUM, 0.1)
  np.testing.assert_allclose(
    sampler.overflow_delta(30), expected, rtol=1e-6, atol=1e-200
  )


@pytest.mark.parametrize(
  ("num", "mean"), [(532761, 1024), (6000, 256), (1000, 1)]
)
def test_the_margin_is_the_least_that_hardly_ever_overflows(num, mean):
  size = sampling.Poisson.with_margin(
    num_examples=num, expected_batch_size=mean
  ).max_batch_size
  assert stats.binom.sf(size, num, mean / num) <= 1e-12
  assert size == mean or stats.binom.sf(size - 1, num, mean / num) > 1e-12


@pytest.mark.parametrize(("num", "mean"), [(100, 100), (96, 88)])
def test_where_all_may_be_drawn_a_neighbours_record_has_room(num, mean):
  """Else it would be cut for sure, at four times the epsilon."""
  drawn = sampling.Poisson.with_margin(
    num_examples=num, expected_batch_size=mean
  )
  assert drawn.max_batch_size == num + 1
  known = {"noise_multiplier": 1.0, "delta": 1e-3, "steps": 3}
  enough, roomy, tight = (
    accounting.epsilon(
      sampler=dataclasses.replace(drawn, max_batch_size=size), **known
    )
    for size in (num + 1, 2 * num, mean)
  )
  assert enough == pytest.approx(roomy, rel=1e-3)
  assert tight > 1.5 * roomy


def test_a_fixed_order_visits_every_record_once_an_epoch():
  sampler = sampling.FixedOrder(num_examples=23, batch_size=5)
  assert sampler.steps_per_epoch == 4
  epochs = memberships(sampler, steps=12).reshape(3, 4, 23).sum(1)
  assert epochs.max() == 1
  assert (epochs.sum(1) == 20).all()
  first, second = sampler.batch(3, 0).indices, sampler.batch(3, 4).indices
  assert first != second
  assert sampler.batch(3, 0).indices == first


@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_fixed_order_pays_once_for_every_epoch_begun(steps, epochs):
  sampler = sampling.FixedOrder(num_examples=23, batch_size=5)
  assert sampler.event(2.0, steps).count == epochs


@pytest.mark.parametrize("relation", ["ADD_OR_REMOVE_ONE", "REPLACE_ONE"])
def test_a_fixed_order_claims_nothing_for_other_relations(relation):
  sampler = sampling.FixedOrder(num_examples=23, batch_size=5)
  sampler.check_relation(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
  with pytest.raises(ValueError, match="REPLACE_SPECIAL"):
    sampler.check_relation(relation)


@pytest.mark.parametrize(
  ("num", "mean", "room", "name"),
  [
    (0, 1, 1, "num_examples"),
    (10, 11, 12, "expected_batch_size"),
    (10, 0, 12, "expected_batch_size"),
    (10, 5, 4, "max_batch_size"),
    (10.0, 5, 8, "num_examples"),
    (2**31, 5, 8, "num_examples"),
  ],
)
def test_sizes_that_contradict_each_other_are_refused(num, mean, room, name):
  with pytest.raises(ValueError, match=f"integer {name}"):
    sampling.Poisson(
      num_examples=num, expected_batch_size=mean, max_batch_size=room
    )


def cyclic(**changes):
  values = {
    "num_examples": 60,
    "expected_batch_size": 6,
    "max_batch_size": 60,
    "cycle_length": 4,
  }
  return sampling.CyclicPoisson(**{**values, **changes})


def test_cyclic_batches_keep_the_steps_of_a_record_apart():
  sampler = cyclic()
  seen = {}
  for step in range(120):
    drawn = sampler.batch(seed=3, step=step)
    for record in drawn.indices[~drawn.is_padding].tolist():
      seen.setdefault(record, []).append(step)
  assert len(seen) == 60
  groups = [{step % 4 for step in steps} for steps in seen.values()]
  assert all(len(group) == 1 for group in groups)
  assert len(set().union(*groups)) == 4
  assert sampler.min_separation == 4


def test_cyclic_batches_draw_each_record_of_the_group_with_its_probability():
  sampler = cyclic()
  rounds = 4000
  counts = np.zeros(60)
  for step in range(4 * rounds):
    drawn = sampler.batch(9, step)
    counts[drawn.indices[~drawn.is_padding]] += 1
  share = counts / rounds
  error = np.sqrt(0.4 * 0.6 / rounds)
  assert sampler.probability == 0.4
  assert np.all(np.abs(share - 0.4) < 5 * error)
  assert abs(share.mean() - 0.4) < 5 * error / np.sqrt(60)
  assert abs(share.mean() - 0.44) > 5 * error / np.sqrt(60)  # 10% off


def test_the_groups_of_the_others_do_not_depend_on_a_record():
  fewer, more = (sampling._draw_groups(n, 4, (5,)) for n in (60, 61))
  for a, b in zip(fewer, more, strict=True):
    np.testing.assert_array_equal(a, b[b < 60])


@pytest.mark.parametrize(
  "change, message",
  [
    ({"cycle_length": 0}, "cycle_length=0"),
    ({"cycle_length": 11}, r"expected_batch_size in \[1, 5\]"),
    ({"max_batch_size": 5}, "max_batch_size=5"),
  ],
)
def test_cyclic_sizes_that_contradict_each_other_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    cyclic(**change)


def test_a_batch_carries_its_padding():
  records = {"x": np.arange(1.0, 11.0), "deep": {"y": np.ones((10, 2), int)}}
  sampler = sampling.Poisson(
    num_examples=10, expected_batch_size=4, max_batch_size=9
  )
  drawn = sampler.batch(0, 0)
  batch = sampler.take(records, drawn)
  real = ~drawn.is_padding
  assert 0 < real.sum() < 9
  np.testing.assert_array_equal(batch["is_padding_example"], drawn.is_padding)
  np.testing.assert_array_equal(batch["x"][real], drawn.indices[real] + 1.0)
  assert not batch["x"][~real].any() and not batch["deep"]["y"][~real].any()
  assert batch["deep"]["y"].shape == (9, 2)
  np.testing.assert_array_equal(records["x"], np.arange(1.0, 11.0))


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("rows", [9, 11])
def test_records_of_another_number_than_the_samplers_are_refused(array, rows):
  # JAX reads an index that is too large as the last row: that record would be in
  # a batch many times.
  records = {"y": array(np.ones((10, 2))), "x": array(np.arange(rows))}
  sampler = sampling.Poisson(
    num_examples=10, expected_batch_size=10, max_batch_size=11
  )
  drawn = sampler.batch(0, 0)
  message = rf"num_examples=10 rows .*, got {rows} in records\['x'\]"
  with pytest.raises(ValueError, match=message):
    sampler.take(records, drawn)
  if rows < 10:
    with pytest.raises(ValueError, match=r"every record, got 9 in records"):
      sampling.take(records, drawn)


@pytest.mark.parametrize("values", [[1, 2, 3], ["a", "b", "c"], 0.5])
def test_records_that_are_no_arrays_are_refused(values):
  sampler = sampling.Poisson(
    num_examples=3, expected_batch_size=3, max_batch_size=4
  )
  with pytest.raises(TypeError, match=r"records\['y'\].*make arrays of lists"):
    sampler.take({"y": values}, sampler.batch(0, 0))


class Labelled:
  """A column of pandas: `[rows]` reads by label, `iloc` by position."""

  def __init__(self, values, labels):
    self.iloc, self.labels = values, labels

  def __len__(self):
    return len(self.iloc)

  def __getitem__(self, rows):
    places = [self.labels.index(row) for row in rows]
    return self.iloc[places]


def test_columns_that_are_read_by_label_are_refused():
  """Of a shuffled table, person 0's text got person 2's label."""
  records = {
    "x": np.array([10, 11, 12]),
    "y": Labelled(np.array([0, 1, 2]), labels=[2, 0, 1]),
  }
  drawn = sampling.Batch(np.array([0, 1, 2]), np.zeros(3, bool))
  with pytest.raises(TypeError, match=r"records\['y'\] of Labelled.*to_numpy"):
    sampling.take(records, drawn)


class _Dataset:
  """Rows of a file, as h5py and pyarrow have them: read by slices alone."""

  def __len__(self):
    return 8

  def __getitem__(self, rows):
    raise TypeError("Indexing elements must be in increasing order")


@pytest.mark.parametrize(
  ("values", "message"),
  [
    (_Dataset(), "got _Dataset: read them into memory with numpy.asarray"),
    (
      np.ma.masked_array(np.ones(8), np.arange(8) > 3),
      r"mask.*filled\(VALUE\)",
    ),
  ],
)
def test_rows_of_a_file_and_masked_values_are_refused_in_one_line(
  values, message
):
  """JAX reads what lies below a mask: missing values became records'."""
  sampler = sampling.Poisson(
    num_examples=8, expected_batch_size=4, max_batch_size=8
  )
  with pytest.raises(TypeError, match=message):
    sampler.take({"x": values}, sampler.batch(3, 0))


@pytest.mark.parametrize(
  ("records", "error", "message"),
  [
    ((np.ones(3), np.ones(3)), TypeError, "mapping .*, got tuple"),
    (np.ones((3, 2)), TypeError, "mapping .*, got ndarray"),
    (
      {"x": np.ones(3), "is_padding_example": np.array([0, 0, 1], bool)},
      ValueError,
      "leave out the records that it marks",
    ),
  ],
)
def test_records_of_other_forms_are_one_line(records, error, message):
  """The mask of the records was replaced by that of the batch in silence."""
  sampler = sampling.Poisson(
    num_examples=3, expected_batch_size=3, max_batch_size=4
  )
  with pytest.raises(error, match=message):
    sampler.take(records, sampler.batch(0, 0))


@pytest.mark.parametrize("seed", [None, [], ()])
def test_a_seed_without_a_number_is_refused(seed):
  """None draws another batch in every call, [] the same one for everybody."""
  with pytest.raises(ValueError, match="secret integer"):
    sampling.Poisson(**SIZES).batch(seed, 0)


SIZES = dict(num_examples=1000, expected_batch_size=50, max_batch_size=60)


@pytest.mark.parametrize(
  ("sampler", "digest"),
  [
    (sampling.Poisson(**SIZES), "1eee4cd0d832d8ee"),
    (sampling.CyclicPoisson(**SIZES, cycle_length=4), "4d95af68bd2e46a6"),
    (
      sampling.FixedOrder(num_examples=1000, batch_size=50),
      "c4d6d2d8a1cce770",
    ),
  ],
)
def test_a_secret_and_a_step_draw_the_records_that_they_always_drew(
  sampler, digest
):
  """Recorded before batches carried their mask in one value."""
  content = hashlib.sha256()
  for step in range(30):
    drawn = sampler.batch([7, 1], step)
    real = drawn.indices[~drawn.is_padding]
    content.update(np.asarray(real, "<i4").tobytes())
  assert content.hexdigest()[:16] == digest


X = np.arange(4000.0).reshape(1000, 4)


@pytest.mark.parametrize(
  "use",
  [
    lambda drawn: X[drawn.indices],
    lambda drawn: jnp.asarray(X)[drawn.indices],
    lambda drawn: np.take(X, drawn.indices, axis=0),
    lambda drawn: jax.jit(lambda b: jnp.asarray(X)[b.indices])(drawn),
    lambda drawn: np.asarray(drawn.indices),
    lambda drawn: X[np.maximum(drawn.indices, 0)],
    lambda drawn: X[drawn.indices != -1],
    lambda drawn: [X[i] for i in drawn.indices],
    lambda drawn: drawn.indices.tolist(),
    lambda drawn: drawn.indices[0],
    lambda drawn: drawn.indices[drawn.is_padding],
    lambda drawn: drawn.indices[np.ones(len(drawn.indices), bool)],
    lambda drawn: 3 in drawn.indices,
    lambda drawn: int(drawn.indices),
  ],
)
def test_numbers_of_a_batch_are_of_no_use_without_its_mask(use):
  """records[drawn.indices] took the last record in 62 rows of padding."""
  sampler = sampling.Poisson.with_margin(
    num_examples=1000, expected_batch_size=50
  )
  drawn = sampler.batch([1], 0)
  assert drawn.is_padding.any()
  with pytest.raises((TypeError, IndexError, AttributeError)):
    use(drawn)


@pytest.mark.parametrize("array", [X, jnp.asarray(X)], ids=["numpy", "jax"])
def test_the_line_that_everybody_writes_is_answered_with_what_to_call(array):
  drawn = sampling.Poisson(**SIZES).batch([1], 0)
  for index in (drawn, drawn.indices):
    with pytest.raises(
      (TypeError, IndexError), match=r"sampler\.take\(records, drawn\)"
    ) as caught:
      array[index]
    assert "\n" not in str(caught.value)
  with pytest.raises(AttributeError, match=r"sampler\.take\(records, drawn\)"):
    drawn.indices.tolist()
  assert not any(c.isdigit() for c in repr(drawn) + repr(drawn.indices))


def test_numbers_and_mask_come_out_together():
  drawn = sampling.Batch(
    np.array([4, 2, -1, -1]), np.array([False, False, True, True])
  )
  for padding_index in (0, 7):
    indices, is_padding = drawn.to_arrays(padding_index=padding_index)
    assert indices.tolist() == [4, 2, padding_index, padding_index]
    assert indices.dtype == np.int32
    np.testing.assert_array_equal(is_padding, drawn.is_padding)
  assert drawn.indices[~drawn.is_padding].tolist() == [4, 2]
  indices, is_padding = drawn
  assert indices[~is_padding].tolist() == [4, 2]
  again = pickle.loads(pickle.dumps(drawn))
  assert again.indices == drawn.indices
  assert dataclasses.replace(drawn).indices == drawn.indices


def test_a_batch_whose_numbers_contradict_its_mask_is_refused():
  with pytest.raises(ValueError, match="mark the row in is_padding"):
    sampling.Batch(np.array([4, -1]), np.array([False, False]))
  with pytest.raises(ValueError, match=r"of one shape .*\(2,\) and \(3,\)"):
    sampling.Batch(np.array([4, 1]), np.zeros(3, bool))


def test_a_negative_step_is_refused():
  sampler = sampling.Poisson(
    num_examples=10, expected_batch_size=5, max_batch_size=8
  )
  with pytest.raises(ValueError, match="step"):
    sampler.batch(0, -1)


@pytest.mark.parametrize(
  "sampler",
  [
    sampling.FixedOrder(num_examples=400, batch_size=40),
    sampling.CyclicPoisson.with_margin(
      num_examples=400, expected_batch_size=40, cycle_length=10
    ),
  ],
)
def test_another_seed_in_the_middle_of_an_epoch_draws_records_twice(sampler):
  """The claim counts one draw, so a resumed training needs the seed it had."""

  def count_draws(seeds):
    counts = np.zeros(400)
    for step, seed in enumerate(seeds):
      drawn = sampler.batch(seed, step)
      counts[drawn.indices[~drawn.is_padding]] += 1
    return counts

  assert count_draws([7] * 10).max() == 1 == sampler.uses(10)[1]
  assert np.mean(count_draws([7] * 5 + [8] * 5) == 2) > 0.2


@pytest.mark.parametrize(
  ("seed", "logged"),
  [
    (0, True),
    (42, True),
    ([2**32 - 1, 1], True),
    (np.random.default_rng(0).integers(2**32), True),
    ([2**128 - 1, 1], False),
    ([7, 2**31, 2**30, 2**31], False),  # words of a secret
  ],
)
@pytest.mark.parametrize("kind", ["poisson", "cyclic", "fixed"])
def test_a_seed_of_batches_that_can_be_guessed_is_logged_once(
  kind, seed, logged, caplog
):
  sizes = {"num_examples": 40, "expected_batch_size": 8}
  sampler = {
    "poisson": lambda: sampling.Poisson.with_margin(**sizes),
    "cyclic": lambda: sampling.CyclicPoisson.with_margin(
      **sizes, cycle_length=2
    ),
    "fixed": lambda: sampling.FixedOrder(num_examples=40, batch_size=8),
  }[kind]()
  sampling._log_guessable.cache_clear()
  with caplog.at_level(logging.WARNING):
    for step in range(2):
      sampler.batch(seed, step)
  messages = [record.getMessage() for record in caplog.records]
  assert len(messages) == (logged and kind != "fixed")  # no amplification there
  assert all("below 2^32" in message for message in messages)
