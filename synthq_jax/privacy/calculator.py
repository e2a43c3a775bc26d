"""Noise from epsilon and back, in words: `synthq privacy` prints this."""

from synthq_jax.privacy import accounting, rounding, sampling, selection

__all__ = ["describe"]

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
  trials: int | None = None,
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
    trials: of a grid, each a training with Poisson batches and this noise.

  Returns:
    Three lines; for trials what the best of them costs (`selection.prices`); for an epsilon also a table of other batch sizes, which read
    as many records as the asked for one does. Noise per unit of signal is the
    standard deviation of a coordinate of the noisy mean, in clip norms.

  Raises:
    ValueError: if a value is out of range, or not one of each pair is given.
  """
  _check_pair(epsilon=epsilon, noise_multiplier=noise_multiplier)
  _check_pair(epochs=epochs, steps=steps)
  poisson = sampling.Poisson.with_margin(
    num_examples=num_examples, expected_batch_size=batch_size
  )
  fixed = sampling.FixedOrder(num_examples=num_examples, batch_size=batch_size)
  if steps is None:
    steps = round(epochs * fixed.steps_per_epoch)
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
    if epsilon is not None:
      traded = _noise_for(epsilon, known)
    else:
      traded = _epsilon_for(noise_multiplier, known)
    lines.append(f"{words} ({relation}): {traded}")
  if trials is not None:
    noise = noise_multiplier
    if noise is None:
      noise = accounting.noise_multiplier(
        epsilon=epsilon, delta=delta, sampler=poisson, steps=steps
      )
    lines += _trials(accounting.Run(poisson, noise, steps), trials, delta)
  if epsilon is not None:
    lines += _other_batches(epsilon, delta, num_examples, batch_size, steps)
  return "\n".join(lines)


def _trials(run: accounting.Run, trials: int, delta: float) -> list[str]:
  """Says what the best of several trainings costs, and which way is cheapest."""
  prices = selection.prices(run, trials, delta=delta)
  lines = [
    f"The best of {trials} trainings with noise multiplier"
    f" {run.noise_multiplier:.3f}: composition lets all be seen, a law draws a",
    f"  secret number of them, {trials} on average, and lets the best alone be"
    " seen:",
  ]
  for name, value in prices.items():
    words = ""
    if name in selection.LAWS:
      number = selection.Trials(mean=trials, law=name).distribution()
      words = f" (chance of one at most: {number.cdf(1):.0%})"
    lines.append(f"  {name}: epsilon {rounding.up(value, places=2)}{words}")
  return [*lines, f"  cheapest: {min(prices, key=prices.get)}"]


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


def _noise_for(epsilon: float, known: dict) -> str:
  noise = accounting.noise_multiplier(epsilon=epsilon, **known)
  needed = float(rounding.up(noise, places=3))
  return (
    f"epsilon {rounding.epsilon(epsilon)} takes noise multiplier {needed:.3f}"
  )


def _epsilon_for(noise: float, known: dict) -> str:
  reached = accounting.epsilon(noise_multiplier=noise, **known)
  return (
    f"noise multiplier {noise:g} gives epsilon {rounding.up(reached, places=2)}"
  )


def _check_pair(**pair: float | None) -> None:
  """Refuses both of two arguments, and neither."""
  if sum(value is not None for value in pair.values()) != 1:
    got = ", ".join(f"{name}={value}" for name, value in pair.items())
    raise ValueError(f"expected one of {' and '.join(pair)}, got {got}")
