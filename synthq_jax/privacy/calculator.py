"""Prints the noise for an epsilon and the epsilon of a noise: `synthq privacy`."""

import math

from synthq_jax import checks
from synthq_jax.privacy import accounting, reasons, rounding, sampling

__all__ = ["describe", "make_user_samplers"]

_REASON_OPTIONS = ("delta", "relation")
_FACTORS = (1 / 4, 1 / 2, 1, 2, 4)


def describe(
  *,
  num_examples: int,
  batch_size: int,
  epsilon: float | None = None,
  noise_multiplier: float | None = None,
  epochs: float | None = None,
  steps: int | None = None,
  delta: float | None = None,
  unit: str | None = None,
  queries_per_user: int | None = None,
) -> str:
  """Describes the noise that an epsilon needs, or the epsilon of a noise.

  Formal guarantee: the unit is the record that `num_examples` counts; for users
  it is the user. Printed values are rounded up, so a run with the printed noise
  keeps the printed epsilon. Claims for Poisson batches hold under
  ADD_OR_REMOVE_ONE. Batches in a fixed order get no amplification, and their
  claims hold under REPLACE_SPECIAL.

  >>> print(describe(num_examples=6000, batch_size=256, epochs=13,
  ...                epsilon=8))
  6000 records, batches of 256, 299 steps, delta 8.34e-05
  Poisson batches (ADD_OR_REMOVE_ONE): epsilon 8 takes noise multiplier 0.747
  no amplification (REPLACE_SPECIAL): epsilon 8 takes noise multiplier 1.976
  Other Poisson batches for epsilon 8 and as many records read:
    batch   steps   noise multiplier   noise per unit of signal
       64    1196              0.580                    0.00906
      128     598              0.650                    0.00508
      256     299              0.747                    0.00292
      512     150              0.885                    0.00173
     1024      75              1.084                    0.00106

  Args:
    num_examples: the number of private records.
    batch_size: records of a step; for Poisson batches the expected number.
    epsilon: the target; or
    noise_multiplier: noise standard deviation over the sensitivity.
    epochs: passes of num_examples // batch_size steps; or
    steps: the number of steps.
    delta: in (0, 1 / units); None: 1 / (2 units). Units are records, or users.
    unit: None or "query": one record. "user": records are queries, and all
      queries of a user are added or removed together.
    queries_per_user: the number of queries that every user is taken to have.

  Returns:
    Three lines. For an epsilon also a table of other batch sizes, which read the
    same number of records. For users, one line for trainings that draw users and
    one for trainings that draw queries (`make_user_samplers`). Noise per unit of
    signal is the standard deviation of a coordinate of the noisy mean, in clip
    norms.

  Raises:
    ValueError: if a value is out of range, or unless exactly one value of each
      pair is given.
  """
  _check_pair(epsilon=epsilon, noise_multiplier=noise_multiplier)
  _check_pair(epochs=epochs, steps=steps)
  if epochs is not None:
    checks.within("(0, inf)", epochs=epochs)
  checks.count("batch_size", batch_size, 1, num_examples)
  if unit not in (None, "query", "user") or (unit == "user") != bool(
    queries_per_user
  ):
    raise ValueError(
      "expected unit='user' with queries_per_user of at least 1, or unit='query'"
      f" without, got {unit=} and {queries_per_user=}"
    )
  if steps is None:
    assert epochs is not None  # one of the pair
    steps = round(epochs * (num_examples // batch_size))
  if unit == "user":
    assert queries_per_user is not None
    samplers = make_user_samplers(
      num_examples=num_examples,
      batch_size=batch_size,
      queries_per_user=queries_per_user,
    )
    return _describe_users(samplers, epsilon, noise_multiplier, steps, delta)
  poisson = sampling.Poisson.with_margin(
    num_examples=num_examples, expected_batch_size=batch_size
  )
  fixed = sampling.FixedOrder(num_examples=num_examples, batch_size=batch_size)
  if delta is None:
    delta = 1 / (2 * num_examples)
  lines = [
    f"{num_examples} records, batches of {batch_size}, {steps} steps,"
    f" delta {rounding.delta(delta)}"
  ]
  for words, sampler, relation in (
    ("Poisson batches", poisson, "ADD_OR_REMOVE_ONE"),
    ("no amplification", fixed, "REPLACE_SPECIAL"),
  ):
    settings = dict(
      sampler=sampler, steps=steps, delta=delta, relation=relation
    )
    text = _describe_tradeoff(epsilon, noise_multiplier, settings)
    lines.append(f"{words} ({relation}): {text}")
  if epsilon is not None:
    lines += _tabulate_batches(epsilon, delta, num_examples, batch_size, steps)
  return "\n".join(lines)


def make_user_samplers(
  *, num_examples: int, batch_size: int, queries_per_user: int
) -> dict[str, sampling.Poisson]:
  """Makes two samplers with equal mean batches: one of users, one of queries.

  Args:
    num_examples: the number of queries; every user has `queries_per_user`.
    batch_size: expected queries of a step.
    queries_per_user: K, the most queries that are read of a user.

  Returns:
    "users" draws users, whose queries are clipped as one vector, as generators
    do. "queries" draws each query independently and is accounted for in groups of
    K, as direct training is.
  """
  num_users = -(-num_examples // queries_per_user)
  return {
    "users": sampling.Poisson.with_margin(
      num_examples=num_users,
      expected_batch_size=max(1, round(batch_size / queries_per_user)),
    ),
    "queries": sampling.Poisson.with_margin(
      num_examples=num_examples,
      expected_batch_size=batch_size,
      group_size=queries_per_user,
      num_units=num_users,
    ),
  }


def _describe_users(
  samplers: dict[str, sampling.Poisson],
  epsilon: float | None,
  noise: float | None,
  steps: int,
  delta: float | None,
) -> str:
  """Describes noise or epsilon for sampling by user and for sampling by query."""
  users, queries = samplers.values()
  if delta is None:
    delta = 1 / (2 * users.units)
  lines = [
    f"{queries.num_examples} queries of {users.units} users, up to"
    f" {queries.group_size} each, {steps} steps, delta {rounding.delta(delta)}"
  ]
  for name, sampler in samplers.items():
    settings = dict(sampler=sampler, steps=steps, delta=delta)
    text = _describe_tradeoff(epsilon, noise, settings)
    lines.append(
      f"{sampler.expected_batch_size} {name} a step (ADD_OR_REMOVE_ONE): {text}"
    )
  lines.append("Generators draw users, direct training and rankings queries.")
  return "\n".join(lines)


def _tabulate_batches(
  epsilon: float, delta: float, num_examples: int, batch_size: int, steps: int
) -> list[str]:
  """Tabulates the noise of smaller and larger batches that read as many records."""
  lines = [
    f"Other Poisson batches for epsilon {rounding.epsilon(epsilon)} and as many"
    " records read:",
    "  batch   steps   noise multiplier   noise per unit of signal",
  ]
  sizes = [max(1, round(batch_size * factor)) for factor in _FACTORS]
  for size in dict.fromkeys(min(size, num_examples) for size in sizes):
    sampler = sampling.Poisson.with_margin(
      num_examples=num_examples, expected_batch_size=size
    )
    count = max(1, round(steps * batch_size / size))
    noise = accounting.noise_multiplier(
      epsilon=epsilon, delta=delta, sampler=sampler, steps=count
    )
    noise = float(rounding.up(noise, places=3))
    lines.append(f"{size:7}{count:8}{noise:19.3f}{noise / size:27.3g}")
  return lines


def _describe_tradeoff(
  epsilon: float | None, noise: float | None, settings: dict
) -> str:
  """Describes the noise for the epsilon, or the epsilon of the noise."""
  if epsilon is not None:
    return _describe_noise(epsilon, settings)
  assert noise is not None  # one of the pair
  return _describe_epsilon(noise, settings)


def _describe_noise(epsilon: float, settings: dict) -> str:
  noise = accounting.noise_multiplier(epsilon=epsilon, **settings)
  needed = float(rounding.up(noise, places=3))
  return (
    f"epsilon {rounding.epsilon(epsilon)} takes noise multiplier {needed:.3f}"
  )


def _describe_epsilon(noise: float, settings: dict) -> str:
  reached = accounting.epsilon(noise_multiplier=noise, **settings)
  reason = ""
  if reached == math.inf:
    run = accounting.Run(settings["sampler"], noise, settings["steps"])
    options = {
      name: settings[name] for name in settings if name in _REASON_OPTIONS
    }
    reason = f": {reasons.explain_infinite([run], **options)}"
  return (
    f"noise multiplier {noise:g} gives epsilon"
    f" {rounding.up(reached, places=2)}{reason}"
  )


def _check_pair(**pair: float | None) -> None:
  """Raises ValueError unless exactly one of two arguments is given."""
  if sum(value is not None for value in pair.values()) != 1:
    got = ", ".join(f"{name}={value}" for name, value in pair.items())
    raise ValueError(f"expected one of {' and '.join(pair)}, got {got}")
