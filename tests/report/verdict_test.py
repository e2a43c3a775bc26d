"""The verdict: yes or no, which, at which epsilon, and what voids it."""

import dataclasses

import made_up
import pytest
from scipy import stats

from synthq_jax import intervals
from synthq_jax.privacy import statement
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.report import blocks, verdict
from synthq_jax.report import scores as report_scores
from synthq_jax.runtime import (
  comparison_results,
  noisy_results,
  released_results,
  results,
)

CLAIM = made_up.claim()
SHARED = {"finetune_dp/eps8": CLAIM, "generate/public_only": statement.none()}


def found(**changes):
  settings = {
    "shared": SHARED,
    "compared": {},
    "started": {"finetune_dp/1a2b": CLAIM},
    "unclaimed": (),
  }
  return released_results.Released(**(settings | changes))


def queries(name="eps8", claim=CLAIM, directory="generate/eps8"):
  return results.SyntheticQueries(
    directory=directory, row=made_up.row(name), statement=claim, prefix="", sampler="",
    num_documents=1, queries_per_document=1, num_queries=1, removed={},
    gauge=0.1, copy_rate=0.1, mean_words=1.0, examples=(),
  )  # fmt: skip


def row(name, over, epsilon=None, level=()):
  mean = 0.47 + (over or 0)
  measured = intervals.Interval(mean=mean, low=mean - 0.1, high=mean + 0.1)
  made = results.Evaluation(
    directory="", row=made_up.row(name), label="", test_set="test", private=True,
    statement=made_up.promise(epsilon), measures={"nDCG@10": measured},
    num_queries=1234, traps=(),
  )  # fmt: skip
  return comparison_results.ScoredRow(
    evaluation=made,
    level=level,
    over_bm25=over
    and intervals.Interval(mean=over, low=over - 0.01, high=over + 0.01),
  )


def said(
  claims=None, synthetic=None, *, rows=(), shipped=(), public_data=False,
  scores=(), audited=False,
):  # fmt: skip
  """The lines of the shareable page."""
  return verdict.as_text(
    verdict.SHAREABLE.build(
      made_up.shareable_values(
        released=claims or found(),
        synthetic=[queries()] if synthetic is None else synthetic,
        public_rows=rows,
        shipped=shipped,
        public_data=public_data,
        result_folders=list(SHARED),
        released_scores=scores,
        audited=audited,
      )
    )
  ).splitlines()


def test_queries_with_a_claim_are_released():
  lines = said()
  assert lines[1].startswith(
    "Queries: Yes: 1 synthetic queries. Queries of eps8."
  )
  titles = [line.partition(":")[0] for line in lines]
  assert titles == ["Ship", "Queries", "Privacy"]
  assert "query is replaced by an empty record" in lines[2]


FIXED = dataclasses.replace(CLAIM, secret_is_fixed=True)
CLIENT = dataclasses.replace(CLAIM, unit=unit_lib.CLIENT)


@pytest.mark.parametrize(
  ("changes", "synthetic", "words"),
  [
    ({}, [], "No queries of a privately"),
    ({}, [queries("public_only", statement.none())], "No queries of a priv"),
    ({}, [queries(directory="private/generate/eps8")], "No queries of a priv"),
    ({"unclaimed": ("generate/x",)}, None, "generate/x outside of private/"),
    ({"shared": {**SHARED, "a/b": CLIENT}}, None, "No claim covers all"),
    (
      {"shared": {**SHARED, "a/b": statement.non_private()}},
      None,
      "made without privacy",
    ),
    ({"shared": {**SHARED, "a/b": FIXED}}, None, "The secret is fixed"),
  ],
)
def test_a_reason_against_it_is_named(changes, synthetic, words):
  lines = said(found(**changes), synthetic)
  [line] = [one for one in lines if one.startswith("Queries: ")]
  assert line.startswith("Queries: No. ") and words in line


def test_an_audit_is_named_and_what_it_found_is_not():
  assert said(audited=True)[-1].startswith("Audit: Canaries were planted")
  assert not any("Audit" in line for line in said())


def test_what_voids_the_claims_is_red():
  claims = found(
    shared={**SHARED, "a/b": FIXED, "generate/eps3": CLAIM},
    started={"1": CLAIM, "2": made_up.claim("finetune_dp/tried")},
  )
  built = verdict.SHAREABLE.build(
    made_up.shareable_values(
      released=claims,
      synthetic=[queries()],
      public_data=True,
      result_folders=list(SHARED),
    )
  )
  alerts = [one for one in built if isinstance(one, blocks.Alert)]
  # One grey box above the tiles has the conditions of the whole run.
  [note] = [one.text for one in alerts if one.is_calm]
  assert built[0].text == note and isinstance(built[1], blocks.Tiles)
  assert "queries are public, and fix the secret" in note
  assert "protect nobody" in note
  red = [one.text for one in alerts if not one.is_calm]
  for words in (
    "1 private trainings were started here of which no result is left",
    "these settings do not write: a/b, generate/eps3",
  ):
    assert sum(words in one for one in red) == 1, words
  assert len(red) == 2
  assert not any(line.startswith("WARNING") for line in said())


def test_the_epsilon_of_everything_stands_beside_that_of_what_is_released():
  other = made_up.claim("train_retriever/1")
  lines = said(found(compared={"x": other}, started={"1": CLAIM, "2": other}))
  both = statement.compose([CLAIM, other], delta=CLAIM.delta).epsilon
  assert both > CLAIM.epsilon
  shown = lines[2].split()
  assert shown[:2] == ["Privacy:", "epsilon"]
  assert float(shown[2]) == pytest.approx(CLAIM.epsilon, abs=2e-3)
  assert float(lines[2].partition("them: epsilon ")[2].split()[0]) >= both


def test_a_training_without_privacy_is_not_among_those_of_the_epsilon():
  """It was counted, beside an epsilon that does not cover it."""
  without = dataclasses.replace(CLAIM, epsilon=float("inf"))
  lines = said(found(started={"1": CLAIM, "learn_to_rank/original": without}))
  assert "All trainings with noise ever started here (1)," in lines[2]


ROWS = (
  row("bm25", None),
  row("synthetic_eps8", -0.2, 8.0),
  row("fused_untrained", 0.02, level=("synthetic_eps8",)),
  row("fused_synthetic_eps8", 0.03, 8.0, level=("synthetic_eps8",)),
  row("fused_original", 0.5, float("inf")),
  row("fused_direct_dp_eps8", 0.4, 8.0),
)
SHIPPED = ("synthetic_eps8", "fused_untrained", "fused_synthetic_eps8")


def test_the_best_row_that_may_be_shipped_is_named():
  (line,) = [x for x in said(rows=ROWS, shipped=SHIPPED) if "Ship" in x]
  assert line.startswith(
    "Ship: BM25 + retriever, synthetic queries (epsilon 8)."
    " fused_synthetic_eps8: nDCG@10 0.500, +0.030 [+0.020, +0.040] over BM25, on"
    " 1,234 public pseudo-queries."
  )
  assert "3 rows" in line and "ties" not in line
  assert line.endswith("scores on private queries were not released.")


def level_rows(*level):
  """Returns the rows, the best of which ties with others."""
  return [
    dataclasses.replace(one, level=level)
    if one.evaluation.name == "fused_synthetic_eps8"
    else one
    for one in ROWS
  ]


def test_of_rows_that_tie_with_the_best_the_cheapest_is_shipped():
  rows = level_rows("fused_untrained", "synthetic_eps8")
  (line,) = [x for x in said(rows=rows, shipped=SHIPPED) if "Ship" in x]
  assert line.startswith("Ship: BM25 + retriever, untrained. fused_untrained:")
  assert (
    "It ties with BM25 + retriever, synthetic queries (0.500), which costs epsilon 8."
  ) in line
  assert "It used no private query." in line
  # A row that is not clear of BM25 replaces none that is.
  rows = level_rows("synthetic_eps8")
  (line,) = [x for x in said(rows=rows, shipped=SHIPPED) if "Ship" in x]
  assert line.startswith(
    "Ship: BM25 + retriever, synthetic queries (epsilon 8)"
  )


@pytest.mark.parametrize(
  ("untrained", "level", "shareable", "exact"),
  [
    (
      0.01,
      ("fused_untrained",),
      "fused_synthetic_eps8",
      "fused_synthetic_eps8",
    ),
    (0.0999, ("fused_untrained",), "fused_untrained", "fused_untrained"),
    (0.0999, (), "fused_untrained", "fused_synthetic_eps8"),  # beyond chance
  ],
)
def test_the_private_page_names_the_row_of_the_shareable_one_where_they_tie(
  untrained, level, shareable, exact
):
  over = {
    "fused_synthetic_eps8": (0.1, 8.0),
    "fused_untrained": (untrained, None),
  }
  scores = (noisy(over),)
  assert f" {shareable}: " in said(shipped=SHIPPED, scores=scores)[0]
  assert f" {exact}: " in private(rows=level_rows(*level), scores=scores)[0]


def noisy(over, noise=0.001, number=100_000):
  """Scores as they are released, of BM25 at a half and of rows beside it."""
  known = {"noise": noise, "number": number, "confidence": 0.95}
  rows = [
    results.ReleasedRow(
      row=made_up.row(name), label="", epsilon=epsilon,
      means={"nDCG@10": noisy_results.mean(0.5 + more, **known)},
      over_bm25={"nDCG@10": noisy_results.difference(0.5 + more, 0.5, **known)},
    )
    for name, (more, epsilon) in over.items()
  ]  # fmt: skip
  lexical = results.ReleasedRow(
    row=made_up.row("bm25"), label="", epsilon=None, over_bm25={},
    means={"nDCG@10": noisy_results.mean(0.5, **known)},
  )  # fmt: skip
  return results.ReleasedScores(
    directory="release_scores", statement=CLAIM, num_queries=number,
    confidence=0.95, noise=noise, rows=(lexical, *rows),
  )  # fmt: skip


@pytest.mark.parametrize(
  ("more", "number", "begins", "holds"),
  [
    (
      0.1,
      100_000,
      "retriever, eps8 (epsilon 8). eps8: nDCG@10 0.600 on 100,000 private",
      "and +0.100 [+0.092, +0.108] for other queries of the same kind.",
    ),
    (
      0.02,
      900,
      "retriever, eps8 (epsilon 8). eps8: nDCG@10 0.520 on 900 private",
      "other queries of the same kind, where the gain is not certain.",
    ),
    (0.001, 900, "None. No row that may be shipped is seen", "+0.001 [-0.00"),
  ],
)
def test_released_scores_decide_what_is_shipped(more, number, begins, holds):
  scores = noisy({"eps8": (more, 8.0), "hidden": (0.4, 8.0)}, number=number)
  # The pseudo-queries say otherwise, and do not count.
  lines = said(rows=ROWS, shipped=("eps8", *SHIPPED), scores=(scores,))
  assert lines[0].startswith(f"Ship: {begins}")
  assert holds in lines[0]
  assert "pseudo" not in lines[0].lower() and "hidden" not in lines[0]


def test_a_row_without_private_queries_is_named_beside_released_scores_too():
  for more, told in ((0.095, True), (0.0, False)):
    scores = noisy({"eps8": (0.1, 8.0), "untrained": (more, None)})
    line = said(shipped=("eps8", "untrained"), scores=(scores,))[0]
    assert ("untrained used none, and" in line) == told
  best = noisy({"eps8": (0.1, 8.0), "untrained": (0.2, None)})
  line = said(shipped=("eps8", "untrained"), scores=(best,))[0]
  assert "It used no private query." in line


def test_of_rows_within_noise_of_the_best_the_least_epsilon_is_shipped():
  """Epsilon 8.04 and .55079 was shipped for .5 and .55075, at a noise of .0058."""
  over = {
    "ltr_synthetic_eps8": (0.05079, 8.04),
    "ltr_public_only": (0.05075, 0.5),
    "synthetic_eps4": (0.04, 4.0),
    "public_only": (0.001, None),
  }
  shipped = tuple(over)
  scores = noisy(over, noise=0.0058)
  line = said(shipped=shipped, scores=(scores,))[0]
  assert line.startswith(
    "Ship: BM25 + weights, public model (epsilon 0.5). ltr_public_only: nDCG@10"
    " 0.551 on"
  )
  assert (
    "It ties with BM25 + weights, synthetic queries (0.551), which costs epsilon 8.04."
  ) in line
  # Where noise does not hide that it is better, the best is shipped.
  line = said(shipped=shipped, scores=(noisy(over, noise=1e-6),))[0]
  assert " ltr_synthetic_eps8: nDCG@10 0.551" in line
  assert "ties" not in line
  # One without private queries within noise of the best needs no other.
  level = over | {"public_only": (0.0507, None)}
  line = said(shipped=shipped, scores=(noisy(level, noise=0.0058),))[0]
  assert line.startswith("Ship: retriever, public model. public_only: nDCG@10")
  assert "It used no private query." in line


def test_a_row_that_is_not_seen_to_be_above_bm25_replaces_none_that_is():
  over = {"eps8": (0.02, 8.0), "public_only": (0.013, None)}
  line = said(shipped=tuple(over), scores=(noisy(over, noise=0.004),))[0]
  assert " eps8: " in line


def test_every_pair_of_released_rows_is_said_to_be_in_order_or_not():
  """By intervals that hold for all pairs at once."""
  over = {"good": (0.2, 8.0), "near": (0.199, None), "less": (-0.02, None)}
  scores = noisy(over, number=2000)
  built = report_scores.RELEASED.build(
    made_up.shareable_values(released_scores=[scores])
  )
  [order] = [
    x for x in built if getattr(x, "lead", "") == "Which rows are in order"
  ]
  assert "at 95% for all 6 pairs at once" in order.text
  grid = built[built.index(order) + 1]
  assert grid.header == ("Row", "2", "3", "4")
  assert grid.rows == (
    ("1. good", "?", ">", ">"),
    ("2. near", "", ">", ">"),
    ("3. bm25", "", "", "(>)"),
    ("4. less", "", "", ""),
  )
  widths = [
    pair.less.here.high - pair.less.here.low
    for pair in noisy_results.pairs(scores, "nDCG@10")
  ]
  z = stats.norm.ppf(1 - 0.05 / 12)
  assert widths == pytest.approx([2 * z * 2**0.5 * 0.001] * 6)


def test_the_best_of_several_rows_is_clear_by_an_interval_for_all_of_them():
  """By its own interval one of ten equal rows was shipped in a quarter of runs."""
  wide = intervals.Interval(mean=0.03, low=-0.001, high=0.061)
  rows = [dataclasses.replace(one, over_bm25_at_once=wide) for one in ROWS]
  line = said(rows=rows, shipped=SHIPPED)[0]
  assert line.startswith("Ship: None.")
  assert "+0.030 [-0.001, +0.061]" in line


def test_no_row_is_shipped_that_is_not_clear_of_bm25():
  (line,) = [
    x for x in said(rows=ROWS[:2], shipped=SHIPPED) if x.startswith("Ship")
  ]
  assert "None." in line and "-0.200 [-0.210, -0.190]" in line
  assert "Not known" in said(rows=ROWS[:1], shipped=SHIPPED)[0]


def private(audits=(), rows=ROWS, scores=()):
  """Returns the lines of the private page."""
  return verdict.as_text(
    verdict.PRIVATE.build(
      made_up.private_values(
        released=found(),
        synthetic=[queries()],
        comparison=made_up.comparison(rows=tuple(rows)),
        shipped=SHIPPED,
        audits=audits,
        result_folders=list(SHARED),
        released_scores=scores,
      )
    )
  ).splitlines()


@pytest.mark.parametrize(
  ("control", "bound", "words"),
  [(0.5, 9.0, "refutes the claim"), (1e-6, 0.0, "is void")],
)
def test_an_audit_that_refutes_the_claim_says_no(control, bound, words):
  audit = results.AuditReport(
    directory="", row=made_up.row("eps8"), cells=(), bounds=(), num_candidates=1,
    num_ranked=1, num_searched=0, confidence=0.95, claimed_epsilon=8.0,
    claimed_delta=1e-5, lower_bound=bound, ceiling=9.0, control=control,
  )  # fmt: skip
  line = private([audit])[1]
  assert line.startswith("Queries: No. eps8") and words in line
  fine = dataclasses.replace(audit, control=0.5, lower_bound=0.0)
  assert private([fine])[1].startswith("Queries: Yes")
