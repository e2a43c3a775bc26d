import numpy as np
import pytest
from scipy import stats

from synthq_jax.retrieval import significance


def _paired(first, second):
  return significance.stratified_t_test([first], [second])


def test_the_interval_is_that_of_scipys_percentile_bootstrap():
  values = np.random.default_rng(0).exponential(size=80)
  ours = significance.bootstrap_interval(values, samples=20_000, seed=1)
  theirs = stats.bootstrap(
    (values,), np.mean, n_resamples=20_000, method="percentile"
  ).confidence_interval
  assert ours.mean == pytest.approx(values.mean())
  # The ends are quantiles of 20,000 draws: their error is about .002.
  assert abs(ours.low - theirs.low) < 0.015
  assert abs(ours.high - theirs.high) < 0.015
  assert ours.high - ours.low > 0.2


def test_pairs_are_matched_by_query_id():
  second = {f"q{i}": 0.1 * (i % 7) for i in range(20)}
  first = {query: second[query] + 0.1 for query in reversed(second)}
  interval = significance.paired_bootstrap(first, second, seed=0)
  np.testing.assert_allclose(
    [interval.mean, interval.low, interval.high], 0.1, rtol=1e-9
  )


def test_systems_equal_on_every_query_have_p_value_one():
  same = np.array([0.2, 0.8])
  assert _paired(same, same) == 1
  # Two signs that agree prove little, however little they vary.
  assert _paired(same, same + 0.5) == 0.5


def test_bonferroni_multiplies_by_the_number_of_tests_up_to_one():
  assert significance.bonferroni([0.01, 0.2, 0.5]) == [
    0.03,
    0.6000000000000001,
    1,
  ]
  assert significance.bonferroni([]) == []
  with pytest.raises(ValueError, match=r"p values in \[0, 1\]"):
    significance.bonferroni([1.5])


@pytest.mark.parametrize(
  "first, second, message",
  [
    ({"q1": 1.0}, {"q2": 1.0}, "got 2 of one system only; evaluate"),
    ([1.0, 2.0], [1.0], "got 2 and 1 values"),
    ({"q1": 1.0}, [1.0], "got one of each"),
    ([1.0, float("nan")], [1.0, 1.0], r"got first of shape \(2,\)"),
  ],
)
def test_systems_on_different_queries_are_not_compared(first, second, message):
  with pytest.raises(ValueError, match=message):
    significance.paired_bootstrap(first, second, seed=0)


def test_the_interval_of_a_difference_holds_it_as_often_as_its_level_says():
  rng = np.random.default_rng(7)

  def share(truth):
    held = 0
    for seed in range(300):
      hard = rng.normal(size=80)  # what both systems find hard
      first = hard + 0.5 + 0.3 * rng.normal(size=80)
      second = hard + 0.3 * rng.normal(size=80)
      gain = significance.paired_bootstrap(
        first, second, samples=400, seed=seed
      )
      held += gain.low <= truth <= gain.high
    return held / 300

  # Just below .05, which intervals that always hold the truth would miss by:
  # unpaired ones would be three times as wide. It is 3.9 standard deviations.
  assert abs(share(0.5) - 0.95) < 0.049
  assert share(0.65) < 0.5


SETS = ((12, 0.0, 0.2), (50, 0.3, 1.0), (200, 0.6, 0.1))  # size, mean, spread


def draw(rng, shift=0.0):
  """Two systems on three sets of different size, level and spread."""
  second = [mean + rng.normal(size=size) for size, mean, _ in SETS]
  first = [
    values + shift + spread * rng.normal(size=size)
    for values, (size, _, spread) in zip(second, SETS, strict=True)
  ]
  return first, second


def test_a_mean_over_sets_counts_each_set_once_whatever_its_size():
  interval = significance.stratified_interval([[1.0] * 99, [0.0]], seed=0)
  assert (interval.mean, interval.low, interval.high) == (0.5, 0.5, 0.5)
  weighted = significance.stratified_interval(
    [[1.0] * 99, [0.0]], [1, 3], seed=0
  )
  assert weighted.mean == 0.25


def test_one_set_is_the_plain_interval_and_the_plain_test():
  rng = np.random.default_rng(8)
  first, second = rng.uniform(size=(2, 40))
  plain = significance.bootstrap_interval(first, seed=3)
  wide = significance.stratified_interval([first], seed=3)
  assert wide.mean == plain.mean
  for end in ("low", "high"):  # the spread of a sample is divided by n - 1
    ratio = (getattr(wide, end) - wide.mean) / (getattr(plain, end) - wide.mean)
    assert ratio == pytest.approx(np.sqrt(40 / 39))
  ours = significance.stratified_t_test([first], [second], [0.2])
  scipys = stats.ttest_rel(first, second)
  assert ours == pytest.approx(scipys.pvalue, rel=1e-9)


def test_two_sets_of_opposite_sign_are_welchs_test():
  rng = np.random.default_rng(9)
  a, b = rng.normal(size=15), 3 * rng.normal(size=40) + 1
  # The mean of a and -b is half the difference of the means of a and b.
  ours = significance.stratified_t_test(
    [a, -b], [np.zeros(15), np.zeros(40)], [0.5, 0.5]
  )
  welch = stats.ttest_ind(a, b, equal_var=False)
  assert ours == pytest.approx(welch.pvalue, rel=1e-9)


def test_the_interval_over_sets_holds_the_mean_as_often_as_its_level_says():
  rng = np.random.default_rng(10)
  truth = 0.3  # of the sets' means; over all queries it would be about .52

  def share(truth):
    intervals = [
      significance.stratified_interval(draw(rng)[1], samples=300, seed=seed)
      for seed in range(300)
    ]
    return np.mean([one.low <= truth <= one.high for one in intervals])

  assert abs(share(truth) - 0.95) < 0.049
  assert share(0.52) < 0.8


def test_the_interval_over_sets_of_few_queries_is_not_too_narrow():
  rng = np.random.default_rng(14)
  holds = []
  for seed in range(400):
    sets = [rng.normal(size=3) for _ in range(12)]
    one = significance.stratified_interval(sets, samples=400, seed=seed)
    holds.append(one.low <= 0 <= one.high)
  assert np.mean(holds) > 0.92  # .88 as they are drawn


def test_p_values_over_sets_are_uniform_where_systems_are_equal():
  rng = np.random.default_rng(11)

  def p_values(shift):
    return [
      significance.stratified_t_test(*draw(rng, shift)) for _ in range(400)
    ]

  assert stats.kstest(p_values(0.0), "uniform").pvalue > 1e-4
  assert stats.kstest(p_values(0.1), "uniform").pvalue < 1e-6


def test_differences_that_cancel_exactly_are_no_difference():
  up, down = np.full(3, 0.1), np.full(4, -0.1)
  zeros = [np.zeros(3), np.zeros(4)]
  cancel = significance.stratified_t_test([up, down], zeros)
  assert cancel == 1
  up_only = significance.stratified_t_test([up, up], [zeros[0]] * 2)
  assert up_only == 2**-5


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, np.nan], []])
def test_weights_that_fit_no_sets_are_refused(weights):
  strata = [[1.0, 2.0], [3.0, 4.0]]
  for call in (
    lambda: significance.stratified_interval(strata, weights, seed=0),
    lambda: significance.stratified_t_test(strata, strata, weights),
  ):
    with pytest.raises(ValueError, match="a weight above 0 for each, got 2"):
      call()
  with pytest.raises(ValueError, match="got 0 sets"):
    significance.stratified_interval([], seed=0)


def test_a_share_of_a_gain_covers_the_truth_as_often_as_it_says():
  rng, hits, tries = np.random.default_rng(0), 0, 400
  for _ in range(tries):
    nothing = rng.normal(0.2, 0.3, 300)
    whole = nothing + rng.normal(0.1, 0.3, 300)
    row = nothing + rng.normal(0.06, 0.2, 300) + 0.2 * (whole - nothing - 0.1)
    found = significance.share_of_gain(row, nothing, whole)
    hits += found is None or found.low <= 0.6 <= found.high
  assert 0.92 <= hits / tries <= 0.98  # 3 standard deviations of .95


def test_a_share_of_no_gain_is_no_number():
  rng = np.random.default_rng(2)
  nothing = rng.normal(size=50)
  for whole in (nothing, nothing + rng.normal(0, 1, 50), nothing - 1):
    assert significance.share_of_gain(nothing, nothing, whole) is None
  with pytest.raises(ValueError, match="at least 2 queries"):
    significance.share_of_gain([1.0], [0.0], [1.0])


@pytest.mark.parametrize("wins", [1, 5])
def test_a_few_lucky_queries_are_no_win(wins):
  one, other = np.zeros(1000), np.zeros(1000)
  one[:wins] = 1.0
  won = significance.paired_bootstrap(one, other, seed=0)
  lost = significance.paired_bootstrap(other, one, seed=0)
  assert won.low <= 0 < won.mean < won.high
  assert won.mean == -lost.mean
  np.testing.assert_allclose(
    (won.low, won.high), (-lost.high, -lost.low), atol=2e-4
  )


def of_users(rng, queries):
  """Values of two systems with equal means, and who asked; users are alike."""
  number = rng.integers(1, queries + 1, 60)
  owners = np.repeat(np.arange(60), number)
  rates = rng.beta(0.3, 0.3, (2, 60))[:, owners]
  first, second = 1.0 * (rng.random(rates.shape) < rates)
  return first, second, owners


def test_users_who_ask_alike_are_drawn_whole():
  """Taken for independent queries, .24 to .42 of such pairs were significant."""
  rng, missed = np.random.default_rng(6), []
  for seed in range(200):
    first, second, owners = of_users(rng, 8)
    mean = significance.bootstrap_interval(
      first, owners, samples=200, seed=seed
    )
    [one] = significance.compare(
      {"": (first, second)}, owners, samples=200, seed=seed
    )
    whole = 0.7 + 0.3 * first
    share = significance.share_of_gain(
      (whole + 0.1 * second) / 2, 0.1 * second, whole, owners
    )
    missed.append(
      [
        not mean.low <= 0.5 <= mean.high,
        not one.difference.low <= 0 <= one.difference.high,
        one.is_significant,
        not share.low <= 0.5 <= share.high,
      ]
    )
  # Three standard deviations of .05 in 200 are .046.
  assert (np.mean(missed, axis=0) < 0.1).all()
  again = [
    significance.compare({"": of_users(rng, 8)[:2]}, samples=9, seed=0)[0]
    for _ in range(100)
  ]
  assert np.mean([one.is_significant for one in again]) > 0.15


def test_clusters_have_the_variance_of_their_sums():
  """By hand: three users of 1, 2 and 3 queries."""
  first, owners = np.array([1.0, 2, 4, 3, 5, 9]), np.array([0, 1, 1, 2, 2, 2])
  found = significance.stratified_t_test(
    [first], [np.zeros(6)], owners=[owners]
  )
  left = [1 - 4, 6 - 8, 17 - 12]
  error = (3 / 2 * sum(x**2 for x in left)) ** 0.5 / 6
  assert found == pytest.approx(2 * stats.t.sf(4 / error, 2))


def test_a_query_without_an_owner_is_refused():
  with pytest.raises(ValueError, match="the owner of every query, got 1 quer"):
    significance.bootstrap_interval({"a": 1.0, "b": 0.0}, {"a": 1}, seed=0)
  with pytest.raises(ValueError, match="the owner of every query, got 1 for 2"):
    significance.bootstrap_interval([1.0, 0.0], [3], seed=0)


def test_sets_whose_differences_are_constant_get_a_sign_test_of_those_that_differ():
  """All queries were counted: two gains beside 30 ties had p = 5e-10."""
  two_gains = [[1.0] * 2, [0.3] * 30], [[0.5] * 2, [0.3] * 30]
  assert significance.stratified_t_test(*two_gains) == 0.5
  both_ways = [[1.0] * 20, [0.0] * 20], [[0.9] * 20, [0.05] * 20]
  assert significance.stratified_t_test(*both_ways) == 1.0
  gains = [[1.0] * 4, [0.5] * 3], [[0.9] * 4, [0.2] * 3]
  assert significance.stratified_t_test(*gains) == pytest.approx(2**-6)
