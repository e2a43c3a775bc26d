"""Each example of the documentation runs as it stands, and does what it says."""

import dataclasses
import pathlib
import runpy

import jax
import jax.numpy as jnp
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "docs/examples"


def run(name):
  return runpy.run_path(str(EXAMPLES / name))


def learnt(names):
  assert names["accuracy"] > 0.8
  promise = names.get("promise") or names["toy"].promise(names["grad_fn"])
  assert promise.epsilon == pytest.approx(8.0, abs=0.01)


def sharded(names):
  learnt(names)
  assert names["mesh"].size == 8
  assert names["difference"] < 1e-5


def ported(names):
  assert names["last_loss"] < 0.75 * names["first_loss"]
  assert names["promise"].epsilon == pytest.approx(2.0, abs=0.01)
  lines = (EXAMPLES / "jax_privacy_port.py").read_text().splitlines()
  assert len(lines) <= 69  # half of theirs, 138 at commit 30f7a49


def scheduled(names):
  assert names["accuracy"] > 0.8
  constant = names["promise"].noise_multiplier(0)
  made = dataclasses.replace(names["promise"], noise_multiplier=constant)
  assert made.epsilon < names["promise"].epsilon < jnp.inf


def resumed(names):
  assert names["same"]
  assert jnp.abs(names["resumed"]["kernel"]).max() > 0.05


def contrasted(names):
  assert names["after"] < names["before"] - 0.2
  assert names["params"]["log_temperature"] != -1.0


CHECKS = {
  "accumulation.py": learnt,
  "contrastive_rows.py": contrasted,
  "equinox_module.py": learnt,
  "flax_linen.py": learnt,
  "flax_nnx.py": learnt,
  "frozen_and_lora.py": learnt,
  "jax_privacy_port.py": ported,
  "orbax_state.py": resumed,
  "plain_jax.py": learnt,
  "schedules.py": scheduled,
  "sharded_batches.py": sharded,
}


def test_every_example_is_run():
  scripts = {path.name for path in EXAMPLES.glob("*.py")}
  assert scripts - {"toy.py"} == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_an_example_runs_as_it_stands(name, monkeypatch):
  monkeypatch.syspath_prepend(EXAMPLES)
  with jax.numpy_rank_promotion("allow"):  # as users have it
    CHECKS[name](run(name))
