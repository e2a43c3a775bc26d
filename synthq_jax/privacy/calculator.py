"""Noise from epsilon and back, in words: `synthq privacy` prints this."""

import math

from synthq_jax import checks
from synthq_jax.privacy import accounting, reasons, rounding, sampling

__all__ = ["describe", "of_users"]

_OF_REASONS = ("delta", "relation")
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
  """Says what noise an epsilon takes, or what epsilon a noise reaches.

  Formal guarantee: the unit is the record that `num_examples` counts. Values
  are rounded up to what is printed, so a run with the printed noise keeps the
  printed epsilon. Poisson batches hold under ADD_OR_REMOVE_ONE; batches in a
  fixed order get no amplification and hold under REPLACE_SPECIAL.

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
    num_examples: private records.
    batch_size: of a step; expected, where batches are Poisson.
    epsilon: the target; or
    noise_multiplier: noise standard deviation over the sensitivity.
    epochs: passes of num_examples // batch_size steps; or
    steps: the number of steps.
    delta: in (0, 1 / num_examples); None: 1 / (2 num_examples).
    unit: "user": records are queries, and all of a user's come or go together;
      None or "query": one record.
    queries_per_user: the most queries of a user, whose users have as many.

  Returns:
    Three lines; for an epsilon also a table of other batch sizes, which read as
    many records as the asked for one does. For users a line for trainings that draw
    users and one for those that draw queries (`of_users`). Noise per unit of signal
    is the standard deviation of a coordinate of the noisy mean, in clip norms.

  Raises:
    ValueError: if a value is out of range, or not one of each pair is given.
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
    samplers = of_users(
      num_examples=num_examples,
      batch_size=batch_size,
      queries_per_user=queries_per_user,
    )
    return _users(samplers, epsilon, noise_multiplier, steps, delta)
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
    known = dict(sampler=sampler, steps=steps, delta=delta, relation=relation)
    traded = _traded(epsilon, noise_multiplier, known)
    lines.append(f"{words} ({relation}): {traded}")
  if epsilon is not None:
    lines += _other_batches(epsilon, delta, num_examples, batch_size, steps)
  return "\n".join(lines)


def of_users(
  *, num_examples: int, batch_size: int, queries_per_user: int
) -> dict[str, sampling.Poisson]:
  """Returns how batches are drawn by users and by queries, as large in the mean.

  Args:
    num_examples: queries, of users who have as many as are read.
    batch_size: queries of a step, expected.
    queries_per_user: K, the most that are read of a user.

  Returns:
    "users": each with one coin, to be clipped as one, as a generator draws them;
    "queries": each with its own coin, accounted for groups of K, as direct training
    draws them.
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


def _users(
  samplers: dict[str, sampling.Poisson],
  epsilon: float | None,
  noise: float | None,
  steps: int,
  delta: float | None,
) -> str:
  """Says what a user costs where users are drawn, and where queries are."""
  users, queries = samplers.values()
  if delta is None:
    delta = 1 / (2 * users.units)
  lines = [
    f"{queries.num_examples} queries of {users.units} users, up to"
    f" {queries.group_size} each, {steps} steps, delta {rounding.delta(delta)}"
  ]
  for name, sampler in samplers.items():
    known = dict(sampler=sampler, steps=steps, delta=delta)
    traded = _traded(epsilon, noise, known)
    lines.append(
      f"{sampler.expected_batch_size} {name} a step (ADD_OR_REMOVE_ONE):"
      f" {traded}"
    )
  lines.append("Generators draw users, direct training and rankings queries.")
  return "\n".join(lines)


def _other_batches(
  epsilon: float, delta: float, num_examples: int, batch_size: int, steps: int
) -> list[str]:
  """Says what smaller and larger batches would take, at the same work."""
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


def _traded(epsilon: float | None, noise: float | None, known: dict) -> str:
  """Says what the given one of the pair takes or gives."""
  if epsilon is not None:
    return _noise_for(epsilon, known)
  assert noise is not None  # one of the pair
  return _epsilon_for(noise, known)


def _noise_for(epsilon: float, known: dict) -> str:
  noise = accounting.noise_multiplier(epsilon=epsilon, **known)
  needed = float(rounding.up(noise, places=3))
  return (
    f"epsilon {rounding.epsilon(epsilon)} takes noise multiplier {needed:.3f}"
  )


def _epsilon_for(noise: float, known: dict) -> str:
  reached = accounting.epsilon(noise_multiplier=noise, **known)
  reason = ""
  if reached == math.inf:
    run = accounting.Run(known["sampler"], noise, known["steps"])
    options = {name: known[name] for name in known if name in _OF_REASONS}
    reason = f": {reasons.explain_infinite([run], **options)}"
  return (
    f"noise multiplier {noise:g} gives epsilon"
    f" {rounding.up(reached, places=2)}{reason}"
  )


def _check_pair(**pair: float | None) -> None:
  """Refuses both of two arguments, and neither."""
  if sum(value is not None for value in pair.values()) != 1:
    got = ", ".join(f"{name}={value}" for name, value in pair.items())
    raise ValueError(f"expected one of {' and '.join(pair)}, got {got}")
