"""User-level privacy: noise that hides whole clients.

DP-FedAvg: each client's update is clipped, the sum gets noise and is divided by
a fixed number. `fedavg` trains so, and `UserPrivacy.statement` says what it
earns. Ask `few_clients.check_meaningful` first: there is a number of clients
below which the claim would be true and say nothing.
"""

import dataclasses
import math

import dp_accounting
import jax
import optax

from synthq_jax import optim
from synthq_jax.federated import aggregation, local_training
from synthq_jax.federated import fedavg as fedavg_lib
from synthq_jax.privacy import accounting, sampling
from synthq_jax.privacy import statement as statement_lib

__all__ = [
  "ASSUMPTIONS",
  "NOT_PROTECTED",
  "PUBLIC",
  "UserPrivacy",
  "fedavg",
]

PUBLIC = (
  "The number of clients.",
  "The settings: model, vocabulary, where training starts, learning rates, "
  "clip norm, clients per round, local steps, number of rounds and noise.",
)
ASSUMPTIONS = (
  "A client is one record with everything it holds, and takes part in a round "
  "once at most.",
  "What a client sends depends on the published models, its own data and its "
  "own key, not on who else takes part.",
  "Whether a client drops out, is late or fails does not depend on another "
  "client's data, and no round is repeated, prolonged or given up because of "
  "it: a client that is missing adds zero to a sum whose denominator is fixed.",
  "The sums are made by somebody whom the clients trust, or by a protocol that "
  "shows no more than the noisy sum.",
  "Who took part in a round, who dropped out and the norms of updates stay "
  "secret; every intermediate model may be published.",
  statement_lib.SECRET_SEEDS,
  "The settings were chosen without looking at the clients' data; trials that "
  "did look are listed as releases of their own.",
  statement_lib.IDEAL_NUMBERS,
)
NOT_PROTECTED = (
  "How many clients there are.",
  "What many clients have in common: learning that is the purpose.",
)

_RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserPrivacy:
  """The public settings of DP-FedAvg.

  Formal guarantee:
    Unit: one client, with everything it holds. Relation: ADD_OR_REMOVE_ONE.
    `epsilon` at `delta`, for everybody who sees all models of `rounds` rounds
    of `fedavg` whose cohorts `sampler` drew, each a new draw. Public: these
    settings. Assumes `ASSUMPTIONS`.

    Dropping out. A client that is drawn and sends nothing, or nan, adds zero,
    whose norm is below the clip norm as that of any update is, and the divisor
    is no count of those who answered. So it may drop out for reasons that lie
    in its own data: that is one more way for its update to depend on them. It
    is another matter if it makes OTHERS drop out, by keeping the server busy or
    since a round with few answers is thrown away: then one client moves the sum
    by more than the clip norm, and nothing is claimed. A client that is drawn
    and stays away is still counted as drawn.

    Padding. Rows of a cohort that no client fills add zero, too.

  >>> sampler = sampling.Poisson.with_margin(
  ...     num_examples=10_000, expected_batch_size=500)
  >>> privacy = UserPrivacy(sampler=sampler, rounds=100, l2_clip_norm=0.5,
  ...                       noise_multiplier=1.0, delta=1e-5)
  >>> round(privacy.epsilon, 2)
  3.5
  """

  sampler: sampling.Poisson
  """Draws the clients of a round, which are its records."""
  rounds: int
  """Of the whole training."""
  l2_clip_norm: float
  """Of a client's update, over all parameters."""
  noise_multiplier: float
  """Noise standard deviation over the clip norm."""
  delta: float
  """Of the claim, below 1 / num_clients; see `few_clients`."""

  def __post_init__(self):
    """Refuses draws that nothing is claimed for, and no clipping."""
    if not isinstance(self.sampler, sampling.Poisson):
      raise ValueError(
        "expected a privacy.sampling.Poisson as UserPrivacy.sampler, got"
        f" {type(self.sampler).__name__}: draw clients with"
        " federated.sampling.poisson"
      )
    if not (self.l2_clip_norm > 0 and math.isfinite(self.l2_clip_norm)):
      raise ValueError(
        "expected UserPrivacy.l2_clip_norm > 0 and finite, got l2_clip_norm="
        f"{self.l2_clip_norm}"
      )

  @property
  def aggregation(self) -> aggregation.Sum:
    """The clipped sum, before the denominator."""
    return aggregation.Sum(l2_clip_norm=self.l2_clip_norm)

  @property
  def epsilon(self) -> float:
    """Of the whole training, at `delta`; infinite without noise."""
    return accounting.epsilon(
      noise_multiplier=self.noise_multiplier,
      delta=self.delta,
      sampler=self.sampler,
      steps=self.rounds,
      relation=_RELATION,
    )

  def statement(self, identifier: str) -> statement_lib.PrivacyStatement:
    """Returns the claim, to be entered into a ledger before the first round.

    Args:
      identifier: names this run and no other.

    Raises:
      ValueError: if accounting refuses the settings.
    """
    return statement_lib.training(
      identifier=identifier,
      sampler=self.sampler,
      noise_multiplier=self.noise_multiplier,
      l2_clip_norm=self.l2_clip_norm,
      l2_sensitivity=self.aggregation.sensitivity(_RELATION),
      steps=self.rounds,
      delta=self.delta,
      relation=_RELATION,
      unit="client",
      mechanism="per-client updates, clipped, summed, Gaussian noise",
      public=PUBLIC,
      assumptions=ASSUMPTIONS,
      not_protected=NOT_PROTECTED,
    )


def fedavg(
  update: local_training.ClientUpdate,
  privacy: UserPrivacy,
  *,
  noise_key: jax.Array,
  server: optax.GradientTransformation | None = None,
  clients_at_once: int = 1,
  mesh: jax.sharding.Mesh | None = None,
) -> fedavg_lib.FedAvg:
  """Builds federated averaging that hides whole clients.

  Formal guarantee: that of `UserPrivacy`, if `apply` is called at most
  `privacy.rounds` times, each time with the clients that `privacy.sampler` drew
  for that round, `is_dropped` where it drew padding. What `server` does to the
  noisy mean is post-processing. The metrics are private.

  The noise is a function of the key and `State.round`. Whoever goes on from
  parameters alone has to set that number, and whoever makes a round again (with
  other devices or other code, which round otherwise) has to take another key,
  as another training: the noise of a round that was drawn twice falls out of
  the difference of two models.

  Args:
    update: what a client does.
    privacy: clip norm, noise, denominator.
    noise_key: secret key for the noise, and for nothing else. A key of
      `jax.random.key(number)` has 32 bits: make it with
      `jax.random.wrap_key_data` from two secret words.
    server: an optimizer that takes less the noisy mean update for a gradient;
      None: `optax.sgd(1.0)`, which adds that mean.
    clients_at_once: as in `fedavg.fedavg`.
    mesh: as in `fedavg.fedavg`.

  Returns:
    The functions; `apply` and `add` refuse weights.

  References:
    McMahan et al. (2018), arXiv:1710.06963, algorithm 1 with the estimator
    that divides by a fixed number.
  """
  sums = privacy.aggregation
  private_mean = optim.privatize(
    l2_sensitivity=sums.sensitivity(_RELATION),
    noise_multiplier=privacy.noise_multiplier,
    denominator=privacy.sampler.expected_batch_size,
    key=noise_key,
  )
  found = fedavg_lib.fedavg(
    update,
    server=optax.chain(
      private_mean, optax.sgd(1.0) if server is None else server
    ),
    aggregation=sums,
    clients_at_once=clients_at_once,
    mesh=mesh,
  )

  def finish(
    state: fedavg_lib.State, total: aggregation.Total
  ) -> tuple[fedavg_lib.State, dict[str, jax.Array]]:
    noise, *rest = state.server_state
    noise = noise._replace(step=state.round)
    return found.finish(state._replace(server_state=(noise, *rest)), total)

  def apply(
    state: fedavg_lib.State, cohort: fedavg_lib.Cohort, key: jax.Array
  ) -> tuple[fedavg_lib.State, dict[str, jax.Array]]:
    return finish(state, found.add(found.begin(state), state, cohort, key))

  return found._replace(apply=apply, finish=finish)
