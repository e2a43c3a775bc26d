"""Ledgers: entered once, read back, added up, refused where they are broken."""

import math

import pytest

from synthq_jax.cli import main
from synthq_jax.privacy import ledger, sampling, statement
from tests.privacy import statements

SAMPLER = sampling.Poisson.with_margin(
  num_examples=6000, expected_batch_size=256
)


def made(identifier, **changes):
  settings = {
    "sampler": SAMPLER,
    "noise_multiplier": 1.0,
    "l2_clip_norm": 0.1,
    "steps": 300,
    "delta": 1 / 12000,
  }
  return statements.made(identifier, **(settings | changes))


@pytest.fixture(name="path")
def fixture_path(tmp_path):
  path = tmp_path / "private" / "ledger.jsonl"
  for name in ("finetune_dp/a", "tuning/b"):
    ledger.enter(path, name, made(name))
  ledger.enter(path, "finetune_dp/inf", statement.non_private())
  return path


def test_what_was_entered_is_read_back_in_order(path):
  found = ledger.read(path)
  assert list(found) == ["finetune_dp/a", "tuning/b", "finetune_dp/inf"]
  assert found["tuning/b"] == made("tuning/b")
  assert found["finetune_dp/inf"].epsilon == math.inf


def test_a_resumed_training_is_entered_once(path):
  before = path.read_text()
  ledger.enter(path, "tuning/b", made("tuning/b"))
  assert path.read_text() == before


def numbers(text):
  (line,) = [x for x in text.splitlines() if x.startswith("together")]
  return line.split("epsilon ")[1].split(",")[0]


def test_all_trainings_together_cost_what_their_composition_does(path, capsys):
  whole = statement.compose([made("finetune_dp/a"), made("tuning/b")])
  assert main.main(["privacy", f"--ledger={path}"]) == 0
  printed = capsys.readouterr().out
  assert whole.epsilon <= float(numbers(printed)) <= whole.epsilon + 1.1e-3
  assert "together (2)" in printed and "not counted: 1" in printed
  assert "finetune_dp/inf: no claim" in printed
  one = made("finetune_dp/a").epsilon
  line = printed.splitlines()[0]
  assert line.startswith("finetune_dp/a: epsilon ")
  assert one <= float(line.split()[2].strip(",")) <= one + 1.1e-3


def test_a_smaller_delta_costs_epsilon(path):
  loose = float(numbers(ledger.describe(path)))
  assert float(numbers(ledger.describe(path, delta=1e-6))) > loose


def test_different_units_are_not_added_up(path):
  queries_alone = numbers(ledger.describe(path))
  ledger.enter(path, "clients", made("clients", unit="client", steps=100))
  printed = ledger.describe(path).splitlines()
  queries, clients = (x for x in printed if x.startswith("alone"))
  assert f"alone (2): epsilon {queries_alone}," in queries
  assert queries.endswith("for one query (ADD_OR_REMOVE_ONE)")
  assert clients.startswith("alone (1)")
  assert clients.endswith("for one client (ADD_OR_REMOVE_ONE)")
  assert float(clients.split()[3].strip(",")) < float(queries_alone)
  assert not [x for x in printed if x.startswith("together")]
  assert any(x.startswith("no joint claim") for x in printed)


@pytest.mark.parametrize(
  "line", ["{", "[]", "{}", '{"identifier": "a", "statement": {}}']
)
def test_a_broken_line_is_named(path, line):
  path.write_text(path.read_text() + line + "\n")
  with pytest.raises(ValueError, match=r"ledger\.jsonl:4: expected an entry"):
    ledger.read(path)
