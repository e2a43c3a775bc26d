"""Every promise of the project is the one that was recorded, byte by byte.

`recorded_claims.jsonl` holds, for settings of every private training that the
project offers, the noise and the line of the ledger, statement included. It was
written before all promises were made in one place (`privacy.claim`), and any
change of it changes what users were promised: say why in docs/changelog.md.

  python tests/privacy/recorded_claims_test.py    # writes the file again
"""

import itertools
import json
import math
import pathlib
import tempfile
import types

import made_up
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.backends.t5x import settings as t5x_settings
from synthq_jax.losses import contrastive
from synthq_jax.privacy import ledger, sampling
from synthq_jax.privacy import users as users_lib
from synthq_jax.runtime import private_training, workspace
from synthq_jax.stages import direct_dp
from synthq_jax.storage import artifacts
from synthq_jax.studies.images import training as image_training
from synthq_jax.training import dp_step

RECORDED = pathlib.Path(__file__).with_name("recorded_claims.jsonl")
N = 2_000
GENERATOR = {
  "epsilon": 8.0,
  "delta": None,
  "batch_size": 64,
  "steps": 90,
  "optimizer": "dp_adafactor",
  "learning_rate": 1e-3,
  "mechanism": "gradients of single pairs",
}
CONFIG = ("delta", "batch_size", "steps", "optimizer", "learning_rate")
DIRECT = (
  {"method": "logit"},
  {"method": "logit", "loss": "sigmoid", "norms": "bound"},
  {"method": "batch", "microbatch_size": 16},
  {"method": "group"},
  {"method": "row", "negatives": "public", "gradients": "query"},
  {"method": "row", "negatives": "batch", "unit": "query"},
  {"method": "row", "negatives": "public", "unit": "query"},
  {"method": "logit", "unit": "query"},
  {"method": "example"},
)


def training(settings, source="beir:folder", secret=None, grad_fn=None):
  """Returns sigma and the ledger of a training that takes no step."""
  clipped = types.SimpleNamespace(
    l2_clip_norm=0.1, sensitivity=lambda relation: 0.1
  )
  seen = []

  def take_no_step(training, mechanism, *others):
    seen.append(mechanism.noise_multiplier)
    return training.params

  with (
    pytest.MonkeyPatch.context() as patch,
    tempfile.TemporaryDirectory() as d,
  ):
    patch.setattr(dp_step, "train", take_no_step)
    space = workspace.Workspace(d, secret_seed=secret)
    private_training.train(
      made_up.task(
        space, settings.config, data=made_up.prepared(source=source)
      ),
      settings,
      dp_step.Training(
        grad_fn=grad_fn or clipped,
        params={},
        records={"record": np.arange(N)},
      ),
    )
    entry = artifacts.unsealed(space.private(ledger.NAME).read_text())
    line = json.dumps(entry, sort_keys=True) + "\n"
  if secret is None:  # the identifier ends with what was drawn
    name = json.loads(line)["identifier"]
    line = line.replace(name, name.partition("-")[0])
  return seen[0], line


def generator_settings(**changes):
  given = GENERATOR | changes
  config = private_training.Config(**{name: given.pop(name) for name in CONFIG})
  return private_training.Settings(config=config, **given)


def direct(**changes):
  config = direct_dp.Config(**changes)
  settings = direct_dp._settings(config, 8.0)
  sampler = private_training.sampler(settings, N)
  built = direct_dp.build(
    config, sampler.max_batch_size, lambda params, tokens: None
  )
  return training(settings, grad_fn=built)


def image(grad_fn, *, is_fixed=True, epsilon=2.0):
  sampler = sampling.Poisson.with_margin(
    num_examples=N, expected_batch_size=100
  )
  training = types.SimpleNamespace(
    is_private=grad_fn is not None,
    sampler=sampler,
    encoder=types.SimpleNamespace(steps=30),
    config=types.SimpleNamespace(epsilon=epsilon, delta=None),
    space=types.SimpleNamespace(is_fixed=is_fixed),
  )
  built = grad_fn and grad_fn(sampler.max_batch_size)
  made = image_training.Trainer.claim(training, built)
  return made.noise_multiplier, ledger.line(
    "images/row/0", made.statement("images/row/0")
  )


def contrastive_grad(method):
  def build(size):
    return optim.contrastive_clipped_grad(
      lambda params, tokens: None,
      lambda params, tokens: None,
      loss=contrastive.Softmax(temperature=0.2),
      l2_clip_norm=0.5,
      method=method,
      max_batch_size=size,
    )

  return build


def users(noise_multiplier=1.1):
  made = users_lib.claim(
    sampler=sampling.Poisson.with_margin(
      num_examples=N, expected_batch_size=64
    ),
    rounds=100,
    l2_clip_norm=0.5,
    noise_multiplier=noise_multiplier,
    delta=1e-5,
  )
  return noise_multiplier, ledger.line("users", made.statement("users"))


def t5x(**changes):
  known = {
    "num_examples": N,
    "expected_batch_size": 64,
    "max_batch_size": 104,
    "steps": 80,
    "epsilon": 8.0,
    "l2_clip_norm": 0.1,
  }
  made = t5x_settings.Settings(**(known | changes))
  statement = made.claim.statement("t5x/name")
  return made.claim.noise_multiplier, ledger.line("t5x/name", statement)


def cases():
  """Yields (name of the setting, noise multiplier, line of the ledger)."""
  generator = {
    "generator": {},
    "generator, epsilon 1": {"epsilon": 1.0},
    "generator, delta 1e-5, dropout": {"delta": 1e-5, "has_dropout": True},
    "generator, no noise": {"epsilon": math.inf},
  }
  for name, changes in generator.items():
    yield name, *training(generator_settings(**changes))
  settings = generator_settings()
  for source in ("jsonl:log", "environment_docs"):
    yield f"generator, from {source}", *training(settings, source=source)
  yield "generator, fixed secret", *training(settings, secret=7)
  for changes in DIRECT:
    yield f"direct {changes}", *direct(**changes)
  methods = {"logit": optim.Logit(), "batch": optim.Batch()}
  for (name, method), is_fixed in itertools.product(
    methods.items(), (True, False)
  ):
    made = image(contrastive_grad(method), is_fixed=is_fixed)
    yield f"images {name}, fixed secret {is_fixed}", *made
  yield "images, not private", *image(None)
  yield "users", *users()
  yield "users, no noise", *users(noise_multiplier=0.0)
  for changes in ({}, {"epsilon": math.inf, "unit": "query"}, {"delta": 1e-6}):
    yield f"t5x {changes}", *t5x(**changes)


def same(old, new) -> bool:
  """Numbers to eight digits: by FFTs of two processors 3e-10 was seen."""
  if isinstance(old, dict) and isinstance(new, dict):
    return old.keys() == new.keys() and all(same(old[k], new[k]) for k in old)
  if isinstance(old, list) and isinstance(new, list):
    return len(old) == len(new) and all(map(same, old, new))
  if isinstance(old, float) and isinstance(new, float):
    return math.isclose(old, new, rel_tol=1e-8)
  return type(old) is type(new) and old == new


@pytest.mark.slow
def test_promises_are_those_that_were_recorded():
  recorded = [json.loads(line) for line in RECORDED.open()]
  found = list(cases())
  assert [one["setting"] for one in recorded] == [name for name, *_ in found]
  for old, (name, sigma, line) in zip(recorded, found, strict=True):
    assert old["noise_multiplier"] == pytest.approx(sigma, rel=1e-8), name
    entry = artifacts.unsealed(line)
    assert same(old["ledger"], entry), name


if __name__ == "__main__":
  with RECORDED.open("w") as stream:
    for name, sigma, line in cases():
      row = {
        "setting": name,
        "noise_multiplier": float(sigma),
        "ledger": artifacts.unsealed(line),
      }
      stream.write(json.dumps(row, sort_keys=True) + "\n")
