"""How many clients user-level privacy takes, and the refusal of fewer."""

import math

from synthq_jax.federated import cohorts
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import rounding, terms

__all__ = ["check_meaningful", "clients_needed", "signal_to_noise"]

_MAX_EPSILON = 10.0
_MAX_DELTA = 1e-3


def signal_to_noise(privacy: claim_lib.Claim, num_parameters: int) -> float:
  """Returns how far clients can move the model, over how far noise moves it.

  With clip norm C, m clients expected in a round, noise multiplier s, T rounds
  and d parameters: the mean update of a round has a norm of at most about C,
  reached if all clients send the same. So all rounds together move the model by
  at most T C, reached if no round contradicts another. The noise of a round has
  standard deviation s C / m in each coordinate; that of T rounds adds up to a
  vector of norm sqrt(T d) s C / m. The ratio is sqrt(T / d) m / s.

  It is the best case: clients of different data disagree, and directions change
  from round to round.

  Args:
    privacy: settings.
    num_parameters: that are trained and sent.
  """
  noise = privacy.noise_multiplier * math.sqrt(num_parameters)
  if noise == 0:
    return math.inf
  clients = privacy.sampler.expected_batch_size
  return math.sqrt(privacy.steps) * clients / noise


def check_meaningful(privacy: claim_lib.Claim, num_parameters: int) -> None:
  """Refuses settings whose claim would be true and yet say nothing.

  The mathematics holds for any number of clients. But a claim is worth making
  if three things hold:

  1. delta <= min(1 / (2 n), 1e-3). Handing out one client's data whole, drawn
     at random, with probability n delta, is (0, delta)-DP: on average
     n delta clients may be laid bare. Half a client is the
     bound of this project's examples, too; with few clients it would still be
     a large chance for each, hence the second number, a convention.
  2. epsilon <= 10: again a convention, the end of the second of three tiers in
     Ponomareva et al. (2023).
  3. `signal_to_noise` >= 1: otherwise noise moves the model farther than the
     clients could even if they all agreed in all rounds.

  With few clients the second and the third exclude each other, since the noise
  is divided by the number of clients of a round: the shipped encoder in 100
  rounds of all of 9 clients, epsilon 8, delta 1e-3, has a ratio of 1/52. How
  many clients epsilon 8, delta n^-1.1 and 100 rounds take (`clients_needed`;
  1,024 is what the first asks for), if a round has all of them, or 1 in 10, or
  1 in 50:

    parameters                                  all   1 in 10   1 in 50
    16,384 (a projection of the encoder)      1,024     1,024     1,024
    951,040 (the shipped encoder)             1,024     1,024     2,362
    1,902,080 (one encoder for each side)     1,024     1,117     3,394
    60,000,000 (about T5 Small)               4,213     6,824    20,406

  Args:
    privacy: settings.
    num_parameters: that are trained and sent.

  Raises:
    ValueError: saying which of the three fails and what to do.

  References:
    Ponomareva et al. (2023), How to DP-fy ML, arXiv:2303.00654.
  """
  n = privacy.sampler.num_examples
  start = f"user-level privacy of {n:,} clients would not be meaningful: "
  end = "; claim privacy for the examples inside of each client, or "
  limit = min(1 / (2 * n), _MAX_DELTA)
  if privacy.delta > limit * (1 + 1e-9):
    raise ValueError(
      f"{start}delta={rounding.delta(privacy.delta)} lets {n * privacy.delta:.2g} of them"
      f" be laid bare, expected at most min(1/(2n), {_MAX_DELTA:g}) ="
      f" {limit:.3g}{end}take a smaller delta"
    )
  if privacy.epsilon > _MAX_EPSILON:
    raise ValueError(
      f"{start}epsilon={rounding.epsilon(privacy.epsilon)} at"
      f" delta={rounding.delta(privacy.delta)}, expected at most {_MAX_EPSILON:g}{end}take more noise and more clients"
    )
  signal = signal_to_noise(privacy, num_parameters)
  if signal < 1:
    drawn = privacy.sampler.expected_batch_size
    raise ValueError(
      f"{start}in {privacy.steps} rounds noise would move the"
      f" {num_parameters:,} parameters {1 / signal:.3g} times as far as clients"
      f" could that all agree{end}have about {math.ceil(drawn / signal):,} of"
      f" them in a round, not {drawn:,}, for this noise"
    )


def clients_needed(
  *,
  epsilon: float,
  rounds: int,
  share: float,
  num_parameters: int,
  delta_exponent: float = 1.1,
) -> int:
  """Returns about how many clients `check_meaningful` asks for.

  Args:
    epsilon: of the claim, at most 10.
    rounds: of the training.
    share: of the clients, expected in a round, in (0, 1].
    num_parameters: that are trained and sent.
    delta_exponent: delta is n to the power of minus this, above 1.

  Returns:
    The number, to about 1%.
  """
  # n^-exponent <= 1/(2n) and <= 1e-3.
  least = max(
    2 ** (1 / (delta_exponent - 1)), _MAX_DELTA ** (-1 / delta_exponent)
  )
  clients = math.ceil(least - 1e-6)
  while True:
    sampler = cohorts.poisson(
      num_clients=clients, clients_per_round=max(1, round(share * clients))
    )
    privacy = claim_lib.calibrated(
      epsilon=epsilon,
      sampler=sampler,
      steps=rounds,
      l2_clip_norm=1.0,
      delta=clients**-delta_exponent,
      words=terms.CLIENT,
    )
    signal = signal_to_noise(privacy, num_parameters)
    if signal >= 1:
      return clients
    # At one noise the ratio grows as n does, and the noise grows slowly.
    clients = math.ceil(1.003 * clients / signal)
