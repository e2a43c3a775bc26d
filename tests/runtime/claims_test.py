"""Every text with a claim, against what dp_accounting says of the mechanisms.

The table holds runs: what was released, for whom, and what may be claimed of all
of it together. Truth is composed here from dp_accounting's events alone.
"""

import ast
import dataclasses
import functools
import pathlib
import re

import dp_accounting
import made_up
import pytest

from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import ledger, sampling, statement, terms
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.report import blocks, page
from synthq_jax.runtime import released_results
from synthq_jax.stages import report

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "synthq_jax"
NUM = 1000
GAUSSIAN = dp_accounting.GaussianDpEvent


UNITS = {
  "query": unit_lib.QUERY,
  "query text": unit_lib.QUERY_TEXT,
  "client": unit_lib.CLIENT,
  "pair": unit_lib.Unit(kind="pair"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Released:
  """Noisy sums of 1,000 records, in batches of 50 if they are sampled."""

  drawn: str = "poisson"
  noise: float = 1.0
  steps: int = 40
  unit: str = "query"
  relation: str = "ADD_OR_REMOVE_ONE"
  delta: float = 5e-4
  times: int = 1

  def sampler(self):
    sizes = {"num_examples": NUM, "expected_batch_size": 50}
    match self.drawn:
      case "poisson":
        return sampling.Poisson.with_margin(**sizes)
      case "cut":
        return sampling.Poisson(**sizes, max_batch_size=60)
      case "cyclic":
        return sampling.CyclicPoisson(
          **sizes, max_batch_size=200, cycle_length=4
        )
      case "ordered":
        return sampling.FixedOrder(num_examples=NUM, batch_size=50)
      case "all":
        return sampling.Poisson(
          num_examples=NUM, expected_batch_size=NUM, max_batch_size=NUM + 1
        )

  def event(self):
    """What dp_accounting calls these sums."""
    one = GAUSSIAN(self.noise)
    step, count = {
      "poisson": (dp_accounting.PoissonSampledDpEvent(0.05, one), self.steps),
      "cut": (
        dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(
          NUM + 1, 0.05, 60, self.noise
        ),
        self.steps,
      ),
      "cyclic": (
        dp_accounting.PoissonSampledDpEvent(0.2, one),
        -(-self.steps // 4),
      ),
      "ordered": (one, -(-self.steps // 20)),
      "all": (one, self.steps),
    }[self.drawn]
    return dp_accounting.SelfComposedDpEvent(step, count * self.times)

  def statements(self, name):
    """As many trainings as `times` says."""
    return [
      claim_lib.Claim(
        sampler=self.sampler(),
        noise_multiplier=self.noise,
        l2_clip_norm=0.1,
        steps=self.steps,
        delta=self.delta,
        relation=self.relation,
        words=terms.QUERIES.but(unit=UNITS[self.unit]),
      ).statement(f"{name}/{i}")
      for i in range(self.times)
    ]


QUERY = Released()
TEXT = Released(
  drawn="ordered", noise=2.0, unit="query text", relation="REPLACE_SPECIAL"
)
ORDERED = dataclasses.replace(TEXT, unit="query")
ALIKE = ("query", "ADD_OR_REMOVE_ONE")
EMPTIED = ("query text", "REPLACE_SPECIAL")
RUNS = {
  "one generator": ([QUERY], ALIKE),
  "three releases": ([dataclasses.replace(QUERY, times=3)], ALIKE),
  "two settings": ([QUERY, Released(noise=2.0, steps=100)], ALIKE),
  "replaced": (
    [Released(relation="REPLACE_ONE"), Released(relation="REPLACE_ONE")],
    ("query", "REPLACE_ONE"),
  ),
  "batches that are cut": ([Released(drawn="cut", steps=4)], ALIKE),
  "cyclic batches": ([Released(drawn="cyclic"), QUERY], ALIKE),
  "deltas that differ": ([QUERY, Released(delta=1e-5)], ALIKE),
  "epsilon 0, a hundred times": (
    [Released(drawn="all", noise=800.0, steps=1, times=100)],
    ALIKE,
  ),
  "texts alone": ([TEXT, dataclasses.replace(TEXT, noise=3.0)], EMPTIED),
  "a generator and a retriever of texts": ([QUERY, TEXT], EMPTIED),
  "three of each": (
    [dataclasses.replace(one, times=3) for one in (QUERY, TEXT)],
    EMPTIED,
  ),
  "epsilon 0 and a text": (
    [Released(drawn="all", noise=800.0, steps=1), TEXT],
    EMPTIED,
  ),
  "one unit, two relations": (
    [QUERY, Released(relation="REPLACE_ONE"), ORDERED],
    ("query", "REPLACE_SPECIAL"),
  ),
  "queries and clients": ([QUERY, Released(unit="client")], None),
  "texts and pairs": ([TEXT, Released(unit="pair")], None),
}


@functools.cache
def truth(released, relation, delta):
  """The epsilon of everything together, by dp_accounting alone."""
  accountant = dp_accounting.pld.PLDAccountant(
    dp_accounting.NeighboringRelation[relation]
  )
  for one in released:
    accountant.compose(one.event())
  return accountant.get_epsilon(delta)


def hold(released, epsilon, delta, relation):
  """Refuses a claim below the truth, and one far above it."""
  least = truth(tuple(released), relation, float(delta))
  assert least <= float(epsilon) <= 1.05 * least + 0.01


_CLAIM = re.compile(
  r"one ([\w ]+)\. This result is \(([\d.e-]+), ([\d.e-]+)\)-differentially"
  r" private:.*?Relation: (\w+)\."
)


def sections(checkpoints):
  """The headings of the shareable page with what stands below them."""
  private = made_up.private_values(
    prepared=made_up.prepared(num_queries={"train": NUM}),
    checkpoints=checkpoints,
    released=released_results.Released(
      shared={}, compared={}, started={}, unclaimed=()
    ).including(checkpoints),
  )
  values = report.select_shareable(private, curves={})
  parts = page.parts(report.SHAREABLE, values)
  shown = page.markdown(blocks.Page(title="title", parts=parts))
  text = shown.replace("*", "").replace("\\", "")
  parts = text.partition("## Privacy")[2].partition("\n## ")[0].split("### ")
  return {p.partition("\n")[0]: p.partition("\n")[2] for p in parts[1:]}


@functools.cache
def statements(run):
  """The claims of a run by name of the result, and the mechanism of each."""
  found = {}
  for at, released in enumerate(RUNS[run][0]):
    for i, claim in enumerate(released.statements(f"r{at}")):
      found[f"r{at}x{i}"] = (claim, released)
  return found


@pytest.mark.parametrize("run", RUNS)
def test_the_page_claims_no_less_than_the_truth(run):
  released, kind = RUNS[run]
  by_name = statements(run)
  claims = {name: claim for name, (claim, _) in by_name.items()}
  checkpoints = [
    made_up.checkpoint(
      directory=f"train_retriever/{name}",
      kind="retriever",
      row=made_up.row(name),
      statement=claim,
    )
    for name, claim in {**claims, "public_only": statement.none()}.items()
  ]
  shown = sections(checkpoints)
  together = shown.pop("Everything that is released together")
  claims = _CLAIM.findall(together)
  if kind is None:
    assert "No joint claim" in together and not claims
    assert "-differentially" not in together
  else:
    [(unit, epsilon, delta, relation)] = claims
    assert (unit, relation) == kind
    assert together.count("-differentially") == 1
    hold(released, epsilon, delta, relation)
  for title, text in shown.items():
    if "public only" in title:
      assert "No private record" in text
      continue
    name = re.search(r"r\d+x\d+", title).group()
    [(unit, epsilon, delta, relation)] = _CLAIM.findall(text)
    one = dataclasses.replace(by_name[name][1], times=1)
    assert (unit, relation) == (one.unit, one.relation)
    least = truth((one,), relation, float(delta))
    assert least <= float(epsilon) <= 1.4 * least + 0.01


@pytest.mark.parametrize("run", RUNS)
def test_the_lines_of_a_ledger_claim_no_less_than_the_truth(run, tmp_path):
  released, kind = RUNS[run]
  path = tmp_path / "ledger.jsonl"
  path.write_text(
    "".join(
      ledger.line(name, one) for name, (one, _) in statements(run).items()
    )
  )
  lines = ledger.describe(path).splitlines()
  found = {"together": [], "alone": []}
  pattern = r"(\w+) \(\d+\): epsilon (\S+), delta (\S+) for one (.+) \((\w+)\)"
  for line in lines:
    if match := re.fullmatch(pattern, line):
      word, epsilon, delta, unit, relation = match.groups()
      found[word].append((unit, relation))
      covered = [
        one
        for one in released
        if word == "together" or (one.unit, one.relation) == (unit, relation)
      ]
      hold(covered, epsilon, delta, relation)
  assert found["together"] == ([kind] if kind else [])
  assert any(x.startswith("no joint claim") for x in lines) == (kind is None)
  alone = {(one.unit, one.relation) for one in released}
  assert set(found["alone"]) == (alone if len(alone) > 1 else set())
  for name, (_, one) in statements(run).items():
    [line] = [x for x in lines if x.startswith(f"{name}: ")]
    epsilon, delta = re.search(
      r"epsilon (\S+), delta ([\d.e-]+)", line
    ).groups()
    one = dataclasses.replace(one, times=1)
    assert float(epsilon) >= truth((one,), one.relation, float(delta))


def asks_epsilon_whether_public(node):
  """Whether a piece of code takes epsilon for a truth value, or holds it to 0."""

  def is_epsilon(part):
    name = getattr(part, "attr", getattr(part, "id", ""))
    return name == "epsilon"

  match node:
    case ast.BoolOp(values=parts):
      return any(map(is_epsilon, parts))
    case (
      ast.If(test=part)
      | ast.IfExp(test=part)
      | ast.UnaryOp(op=ast.Not(), operand=part)
    ):
      return is_epsilon(part)
    case ast.Compare(left=ast.Attribute(), comparators=[ast.Constant(0)]):
      return is_epsilon(node.left)
  return False


def test_the_reader_of_code_sees_every_form():
  for text in (
    "x.epsilon > 0", "x.epsilon == 0.0", "y if x.epsilon else z",
    "a and epsilon", "not x.epsilon", "x.statement.epsilon or None",
  ):  # fmt: skip
    nodes = ast.walk(ast.parse(text))
    assert any(map(asks_epsilon_whether_public, nodes)), text
  for text in ("0 < x.epsilon < y", "x.epsilon is None", "x.is_public"):
    nodes = ast.walk(ast.parse(text))
    assert not any(map(asks_epsilon_whether_public, nodes)), text


@functools.cache
def places():
  """Returns where the package does either, in one reading of its code."""
  found = {asks_epsilon_whether_public: [], writes_epsilon_its_own_way: []}
  for path in PACKAGE.rglob("*.py"):
    name = path.relative_to(PACKAGE).as_posix()
    for node in ast.walk(ast.parse(path.read_text())):
      for is_fault, where in found.items():
        if is_fault(node):
          where.append((name, node.lineno))
  return found


def test_what_is_public_is_asked_of_the_ledger_and_not_of_epsilon():
  found = places()[asks_epsilon_whether_public]
  assert {name for name, _ in found} == {"privacy/statement.py"}, found


def writes_epsilon_its_own_way(node):
  """Whether an f-string rounds an epsilon or a delta by a format of its own."""
  if not isinstance(node, ast.FormattedValue) or node.format_spec is None:
    return False
  name = getattr(node.value, "attr", getattr(node.value, "id", ""))
  return name.removeprefix("claimed_") in ("epsilon", "delta")


def test_all_epsilons_and_deltas_are_written_by_one_function():
  for text in ('f"{x.delta:.3g}"', 'f"{epsilon:g}"', 'f"{x.claimed_delta:g}"'):
    assert any(map(writes_epsilon_its_own_way, ast.walk(ast.parse(text))))
  found = places()[writes_epsilon_its_own_way]
  assert {name for name, _ in found} == {"runtime/rows.py"}, found  # eps8
