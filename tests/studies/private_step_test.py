"""The study of the private step: its claims hold, and a broken one is seen."""

import dataclasses
import functools

import pytest

from synthq_jax import artifacts, optim
from synthq_jax.audit import mechanism
from synthq_jax.studies import frame, private_step

CONFIG = private_step.Config(epsilons=(4.0,), num_canaries=(400,), seeds=3)


def run(config, root):
  said = frame.run(private_step.STUDY, config, root, progress=False)
  return said, artifacts.load(root, private_step.Study).rows


def test_the_step_keeps_its_claim_and_one_without_noise_does_not(
  tmp_path, monkeypatch
):
  said, rows = run(CONFIG, tmp_path / "kept")
  assert [row.sampler for row in rows] == ["one sum", "poisson"]
  for row in rows:
    assert sum(bound > 4.0 for bound in row.bounds) <= 1
    assert row.bounds != (0.0, 0.0, 0.0)
  assert "Median bound" in said
  quiet = functools.partial(
    mechanism.Mechanism,
    privatize=lambda **named: optim.privatize(
      **(named | {"noise_multiplier": 0.0})
    ),
  )
  assert run(CONFIG, tmp_path / "kept") == (said, rows)
  monkeypatch.setattr(mechanism, "Mechanism", quiet)
  assert run(CONFIG, tmp_path / "kept") == (said, rows)  # read, not made
  _, [broken] = run(
    dataclasses.replace(CONFIG, samplers=("one sum",)), tmp_path / "broken"
  )
  assert min(broken.bounds) > 4.0


def test_settings_without_sense_are_refused():
  for change, words in (
    ({"num_canaries": (10,)}, "at least 100 each"),
    ({"samplers": ("cyclic",)}, "samplers must be of"),
    ({"seeds": 0}, "seeds must be at least 1"),
  ):
    with pytest.raises(ValueError, match=words):
      private_step.Config(**change)


@pytest.mark.parametrize("place", ["prepare_data", "private/prepare_data"])
def test_the_directory_of_a_run_is_left_alone(place, tmp_path):
  (tmp_path / place).mkdir(parents=True)
  accepted = []
  with pytest.raises(ValueError, match="got that of a run"):
    frame.run(
      private_step.STUDY,
      private_step.Config(),
      tmp_path,
      on_accepted=lambda: accepted.append(1),
    )
  assert not accepted
