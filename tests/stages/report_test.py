"""Reports: nothing private gets out, everything is escaped, numbers are exact."""

import dataclasses
import html
import json
import math
import re
import types

import made_up
import numpy as np
import pages
import pytest
import small_data
import tiny_runs

from synthq_jax import intervals
from synthq_jax.audit import exposure
from synthq_jax.privacy import sampling, statement, wording
from synthq_jax.report import audit, plots, scores, tables
from synthq_jax.runtime import (
  comparison_results,
  released_results,
  results,
  system_results,
  workspace,
)
from synthq_jax.runtime import comparison_results as leakage_lib
from synthq_jax.stages import compare_queries, plan, report
from synthq_jax.storage import artifacts

SECRET = "zanzibar"  # stands in everything private below
SCORE = 0.7777  # and this only in scores that are private


GENERATOR = made_up.claim("finetune_dp/1a2b")
DIRECT = made_up.claim("train_retriever/1a2b")
PUBLIC = statement.none(relation="REPLACE_SPECIAL")
NOT_PRIVATE = statement.non_private(f"{SECRET} note.")
SYNTHETIC = statement.inherit(GENERATOR, "Queries were sampled.")


PREPARED = made_up.prepared(
  source=f"jsonl:/logs/{SECRET}.jsonl",
  digest=f"{SECRET}-digest",
  versions="numpy 1 & scipy 2",
  num_documents=1234,
  num_queries={"train": 76543, "test": 54321},
  num_pairs={"train": 87654, "test": 65432},
  cut_documents=0.25,
)


def evaluation(name, mean=SCORE, *, test_set="test", epsilon=None, **changes):
  is_private = changes.pop("private", test_set == "test")
  return results.Evaluation(
    directory=f"{'private/' if is_private else ''}evaluate/{name}",
    row=made_up.row(name),
    label=f"{SECRET} label" if is_private else changes.pop("label", "pairs"),
    test_set=test_set,
    private=is_private,
    statement=made_up.promise(epsilon),
    measures={
      "nDCG@10": intervals.Interval(
        mean=mean, low=mean - 0.01, high=mean + 0.02
      ),
      "R@10": intervals.Interval(mean=mean, low=mean / 2, high=mean + 0.1),
    },
    num_queries=500,
    traps=(f"{SECRET} trap.",) if is_private else ("Ties go by id.",),
    seconds=1.0,
  )


def checkpoint(root, kind, name, claim, *, private=False, private_metrics=True):
  directory = f"{'private/' if private else ''}{kind}/{name}"
  metrics = (
    f"{'private/' if private_metrics else ''}{kind}/{name}/metrics.jsonl"
  )
  lines = [{"step": s, "loss": 5 / s, "grad_norm": 0.5} for s in (1, 2, 4)]
  small_data.write_lines(root / metrics, map(json.dumps, lines))
  return made_up.checkpoint(
    directory=directory,
    kind=kind,
    row=made_up.row(name),
    statement=claim,
    metrics=metrics,
  )


def synthetic(root, name, claim, *, private=False, mark="made"):
  directory = f"{'private/' if private else ''}generate/{name}"
  lines = [
    {"_id": f"s{i}", "text": f"{mark} query {i} {name}", "document": f"d{i}"}
    for i in range(4)
  ]
  path = root / directory / "queries.jsonl"
  small_data.write_lines(path, map(json.dumps, lines))
  return results.SyntheticQueries(
    directory=directory,
    row=made_up.row(name),
    statement=claim,
    prefix="ask: ",
    sampler="nucleus p=0.8",
    num_documents=4,
    queries_per_document=1,
    num_queries=4,
    removed={"empty": 0, "duplicate": 3, "not found": 1234},
    filters="Dropped were pointless queries.",
    gauge=0.25,
    copy_rate=0.5,
    mean_words=4.0,
    examples=((f"{mark} <b>bold</b> | query", "a document " * 30),),
    seconds=5.0,
  )


def write_collection(root):
  files = {
    "prepare_data/corpus.jsonl": [
      {"_id": f"d{i}", "title": f"Title {i}", "text": f"body {i} <i>text</i>"}
      for i in range(6)
    ],
    "private/prepare_data/queries.jsonl": [
      {"_id": f"q{i}", "text": f"{SECRET} real query {i}"} for i in range(6)
    ],
  }
  for name, lines in files.items():
    small_data.write_lines(root / name, map(json.dumps, lines))
  rows = ["query-id\tcorpus-id\tscore"]
  rows += ["q1\td1\t1", "q2\td1\t1", "q3\td3\t1", "q4\td5\t1", "q5\td0\t0"]
  small_data.write_lines(root / "private/prepare_data/qrels/test.tsv", rows)


def write_scores(root, evaluations):
  """Writes values of six queries around the mean of each evaluation."""
  for one in evaluations:
    offsets = (-0.03, -0.02, -0.01, 0.01, 0.02, 0.03)
    values = {
      name: {f"q{i}": measure.mean + x for i, x in enumerate(offsets)}
      for name, measure in one.measures.items()
    }
    path = root / one.directory / "per_query.json"
    artifacts.write_atomically(path, json.dumps(values))


def leakage():
  """Returns a search, nothing of which may be shared."""
  return leakage_lib.QueryLeakage(
    directory="private/query_leakage",
    detectors={"words": "equal words"},
    num_train=76543,
    num_control=54321,
    num_written={"eps8": 4},
    confidence=0.95,
    memberships=(
      leakage_lib.Membership(
        name="eps8",
        detector="words",
        train=leakage_lib.Found(number=4321, total=65432),
        control=leakage_lib.Found(number=1, total=54321),
        difference=intervals.Interval(mean=SCORE, low=0.7, high=0.8),
        p_value=1e-9,
        train_all=leakage_lib.Found(number=4322, total=76543),
        control_all=leakage_lib.Found(number=1, total=54321),
      ),
    ),
    seconds=1.0,
  )


def run_of(root):
  """Returns the arguments of a run, and writes the files they name."""
  write_collection(root)
  epsilon = GENERATOR.epsilon
  return {
    "prepared": PREPARED,
    "evaluations": [
      evaluation("bm25", 0.2),
      evaluation("original", epsilon=math.inf),
      evaluation("synthetic_eps8", 0.22, epsilon=epsilon),
      evaluation("direct_eps8", 0.05, epsilon=DIRECT.epsilon),
      evaluation("bm25", 0.31, test_set="public", label="no training"),
      evaluation("synthetic_eps8", 0.42, test_set="public", epsilon=epsilon),
      evaluation("original", test_set="public", epsilon=math.inf, private=True),
    ],
    "synthetic": [
      synthetic(root, "public_only", PUBLIC),
      synthetic(root, "eps8", SYNTHETIC),
      synthetic(root, "epsinf", NOT_PRIVATE, private=True, mark=SECRET),
    ],
    "checkpoints": [
      checkpoint(root, "generator", "eps8", GENERATOR),
      checkpoint(
        root, "retriever", "public_only", PUBLIC, private_metrics=False
      ),
      checkpoint(
        root, "retriever", "synthetic_eps8", SYNTHETIC, private_metrics=False
      ),
      checkpoint(root, "retriever", "direct_eps8", DIRECT),
      checkpoint(root, "retriever", "original", NOT_PRIVATE, private=True),
    ],
    "leakage": leakage(),
    "audits": [
      made_up.audit(
        {
          "kind": "rare_words",
          "repetitions": 10,
          "ranks": (43, 45),
          "held_out_ranks": (51, 53),
          "exposure": (1.25, 1.35),
        },
        {
          "attack": "synthetic",
          "repetitions": 10,
          "claimed_epsilon": math.inf,
          "epsilon_one_run": 0.125,
          "epsilon_one_run_fdp": 0.25,
          "auroc": (0.7, 0.4, 0.9),
        },
        lower_bound=0.0625,
        num_searched=1234,
        control=0.33,
      )
    ],
  }


def run_report(root, compared=None, config=None, date="", **changes):
  """Compares and reports, as a run does; returns the result."""
  folders = workspace.Folders(root)
  arguments = {**run_of(root), **changes}
  evaluations = arguments.pop("evaluations")
  write_scores(root, evaluations)
  comparison = tiny_runs.make(
    compare_queries.STAGE,
    compared or compare_queries.Config(),
    folders,
    inputs=compare_queries.Inputs(
      prepared=arguments["prepared"],
      evaluations=evaluations,
      synthetic=arguments["synthetic"],
      t5=None,
    ),
  )
  kind = comparison_results.QueryComparison
  saved = artifacts.load(root / "private/compare_queries", kind)
  assert saved == comparison
  return tiny_runs.make(
    report.STAGE,
    config or report.Config(),
    folders,
    inputs=report.make_values(
      saved,
      released=released_results.Released(
        shared={}, compared={}, started={}, unclaimed=()
      ),
      shipped=["public_only", "synthetic_eps8", "direct_eps8"],
      result_folders=[],
      public_data=False,
      audited=False,
      date=date,
      **{
        "audits": (),
        "leakage": None,
        "released_scores": (),
        "weights": (),
        **arguments,
      },
    ),
  )


@pytest.fixture(name="written", scope="module")
def _written(tmp_path_factory):
  """Returns a working directory with reports, and the result."""
  root = tmp_path_factory.mktemp("run")
  return root, run_report(root)


def read(written, name):
  root, made = written
  return (root / getattr(made, name)).read_text()


def test_nothing_private_stands_outside_the_private_folder(written):
  root, made = written
  outside = [
    path
    for path in root.rglob("*")
    if path.is_file() and "private" not in path.relative_to(root).parts
  ]
  assert root / made.html in outside and root / made.markdown in outside
  for path in outside:
    text = path.read_text()
    assert SECRET not in text, path
    # Counts of private queries; scores and losses of private stages.
    for found in (
      *("54,321", "87,654", "0.778", "0.777", "0.220", "43.5"),
      *("76,543 private", "4,321", "77.77"),
    ):
      assert found not in text, (path, found)
  assert SECRET in read(written, "private_html")
  assert "0.778" in read(written, "private_html")


def test_private_queries_among_written_ones_are_told_in_private(written):
  shareable, private = read(written, "html"), read(written, "private_html")
  title = "Private queries among the synthetic ones"
  assert title not in pages.Parser(shareable).headings
  assert title in pages.Parser(private).headings
  assert "4,321 of 65,432" in private
  assert "+77.77% [+70.00, +80.00]" in private


def test_the_page_states_the_mechanism_behind_learned_weights(tmp_path):
  learned = system_results.Ranking(
    directory="learn_to_rank/public_only",
    row=made_up.row("ltr_public_only"),
    statement=made_up.claim("learn_to_rank/public_only/0a1b"),
    features=("words",),
    weights=(0.5,),
    depth=10,
    num_queries=40,
  )
  exact = dataclasses.replace(
    learned,
    directory="private/learn_to_rank/original",
    row=made_up.row("ltr_original"),
    statement=statement.non_private(),
  )
  run_report(tmp_path, weights=[learned, exact])
  page = (tmp_path / "report/report.md").read_text()
  assert "Weights ltr public only" in page and "ltr original" not in page
  [release] = learned.statement.ledger
  assert wording.write(release.mechanism, learned.statement.unit) in page


def test_curves_are_drawn_only_where_losses_are_not_private(written):
  shareable, private = read(written, "html"), read(written, "private_html")
  titles = ("generator eps8", "retriever direct eps8", "retriever original")
  for title in titles:
    assert f">{title}</text>" not in shareable
    assert f">{title}</text>" in private
  assert ">retriever synthetic eps8</text>" in shareable


def test_the_first_screen_has_a_title_three_tiles_a_picture_and_queries(
  tmp_path,
):
  changes = {"data": "shop log", "title": "T"}
  made = run_report(
    tmp_path, config=report.Config(**changes), date="2026-01-02."
  )
  text = (tmp_path / made.html).read_text()
  assert "<h1>T: shop log</h1>" in text
  assert '<p class="subtitle">2026-01-02. This page may be shared' in text
  head, nav, _ = text.partition("<nav>")
  assert nav and "<table" not in head
  places = [
    head.index(one)
    for one in (
      "<strong>Ship</strong>", "<strong>Queries</strong>",
      "<strong>Privacy</strong>", "<svg", "<li>&#34;made &lt;b&gt;bold",
    )
  ]  # fmt: skip
  assert places == sorted(places) and head.count('class="tile"') == 3
  private = (tmp_path / made.private_html).read_text().partition("<nav>")[0]
  assert private.count('class="tile"') == 3 and "<svg" in private


def test_an_assumption_stands_on_the_page_once(written):
  text = read(written, "html")
  for name in ("secret_seeds", "ideal_numbers", "split"):
    sentence = html.escape(wording.write(name, GENERATOR.unit))
    assert text.count(sentence) <= 1
  assert "floating point numbers for real ones" in text


def test_the_shareable_page_has_its_sections(written):
  page = read(written, "html")
  pages.Parser(page)
  assert re.findall("<h2>(.*)</h2>", page) == [
    "Scores on public queries",
    "Synthetic queries",
    "Privacy",
    "Training",
    "Data and versions",
  ]
  text = read(written, "html")
  assert "numpy 1 &amp; scipy 2" in text
  assert "PRIVATE" not in text
  assert "0.310 [0.300, 0.330]" in text and "0.420 [0.410, 0.440]" in text
  assert (
    "Dropped were pointless queries. Filters removed 3 (duplicate), 1,234"
    " (not found)."
  ) in text


def test_every_shareable_result_has_its_statement_in_words(written):
  page = pages.Parser(read(written, "html"))
  assert "Generator eps8, queries eps8, retriever synthetic eps8" in (
    page.headings
  )
  assert "Retriever direct eps8" in page.headings
  assert "Queries public only, retriever public only" in page.headings
  assert not any("original" in title for title in page.headings)
  sections = read(written, "html").split("<h3>")
  together = next(one for one in sections if one.startswith("Everything that"))
  for title, claim in (
    ("Generator eps8", GENERATOR),
    ("Retriever dir", DIRECT),
  ):
    section = next(one for one in sections if one.startswith(title))
    for paragraph in statement.in_words(claim).split("\n\n"):
      lead, _, rest = paragraph.partition(". ")
      block = f"<strong>{html.escape(lead)}.</strong> {html.escape(rest)}</p>"
      is_common = lead in ("Treated as public", "Assumed", "Not protected")
      shown = html.unescape(together if is_common else section)
      assert html.unescape(block) in shown


def test_the_page_claims_the_sum_of_all_its_releases(written):
  text = read(written, "markdown")
  together = statement.compose([GENERATOR, DIRECT])
  assert together.epsilon > max(GENERATOR.epsilon, DIRECT.epsilon)
  claim = statement.in_words(together).split("\n\n")[0]
  number = re.search(r"is \(([\d.]+), ", claim).group(1)
  section = text.split("### Everything that is released together")[1]
  assert f"({number}, " in section.split("###")[0]


def test_the_private_page_is_marked_and_has_everything(written):
  text = read(written, "private_html")
  assert re.search(r'class="banner">PRIVATE', text)
  epsilon = tables.epsilon(GENERATOR.epsilon)
  for row in (  # of the plot
    f"retriever, synthetic queries (epsilon {epsilon})",
    "retriever, real queries (no privacy)",
    "BM25",
  ):
    assert f">{row}</text>" in text
  assert ">retriever</text>" not in text  # no curve over one epsilon
  for found in (
    f"{exposure.mean_rank(np.array([43, 45]), 100):.1f}",
    "52.0",  # of the control group
    "50.5 by chance",
    "1.30",  # bits, of
    "at most 13.29 bits",
    "1,234 queries of the run",
    "50%",  # leaked
    "a query + random words, its document",
    "0.700 [0.400, 0.900]",
    "does not refute the claim",
  ):
    assert found in text
  assert "Not a valid audit" not in text
  assert "54,321" in text
  assert (
    "real queries 0.200, public only 0.250, eps8 0.250, epsinf 0.250: nDCG@10"
    in text
  )


def test_scores_are_drawn_over_epsilon_where_there_are_three(tmp_path):
  rows = [
    evaluation("bm25", 0.2),
    evaluation("original", epsilon=math.inf),
    *(evaluation(f"synthetic_eps{e}", 0.2, epsilon=e) for e in (2.0, 8.0)),
    evaluation("synthetic_inf", 0.3, epsilon=math.inf),
  ]
  drawn = []
  for more in ([], [evaluation("synthetic_eps4", 0.2, epsilon=4.0)]):
    made = run_report(tmp_path, evaluations=rows + more)
    text = (tmp_path / made.private_html).read_text()
    assert ">BM25</text>" in text
    drawn.append(">no noise</text>" in text and ">retriever</text>" in text)
  assert drawn == [False, True]


def test_epsilon_is_a_numeric_axis():
  rows = [
    evaluation(f"synthetic_eps{e:g}", 0.2, epsilon=e)
    for e in (1.0, 2.0, 8.0, 8.04)
  ]
  values = made_up.shareable_values(evaluations=rows)
  (drawn,) = scores.PICTURE.build(values)
  ticks = re.findall(r' x="([\d.]+)"[^>]*>([\d.]+)</text>', drawn.svg)
  ticks = {label: float(place) for place, label in ticks}
  assert ticks.keys() >= {"1", "2", "8"} and "8.04" not in ticks
  ratio = (ticks["8"] - ticks["2"]) / (ticks["2"] - ticks["1"])
  assert ratio == pytest.approx(2, abs=0.01)


def test_no_two_series_share_a_color_and_a_marker():
  series = range(len(plots._COLORS) * len(plots._MARKERS))
  looks = {
    (
      plots._COLORS[i % len(plots._COLORS)],
      plots._MARKERS[i % len(plots._MARKERS)],
    )
    for i in series
  }
  assert len(looks) == len(series) == 42


def test_real_queries_stand_beside_synthetic_ones_of_their_document(written):
  text = read(written, "private_html")
  rows = [row for row in text.split("<tr>") if f"{SECRET} real query" in row]
  assert len(rows) == 2  # d1 and d3; nobody wrote for d5, q5 is not relevant
  row = next(row for row in rows if "Title 1" in row)
  cells = re.findall(r"<td>(.*?)</td>", row)
  assert cells == [
    "Title 1 body 1 &lt;i&gt;text&lt;/i&gt;",
    f"{SECRET} real query 1 / {SECRET} real query 2",
    "made query 1 public_only",
    "made query 1 eps8",
    f"{SECRET} query 1 epsinf",
  ]


def test_the_table_has_scores_with_intervals_and_epsilons(written):
  _, made = written
  header, _, *lines = made.table.splitlines()
  assert re.split("  +", header) == [
    "Row", "epsilon", "nDCG@10", "Recall@10", "over BM25", "gain kept",
  ]  # fmt: skip
  assert max(map(len, made.table.splitlines())) <= 100
  lexical, original, synthetic, _ = (re.split("  +", line) for line in lines)
  assert lexical == [
    "bm25", "-", "0.200 [0.190, 0.220]", "0.200", "-", "-",
  ]  # fmt: skip
  # All queries differ alike, and they are few.
  assert original[:2] == ["original", "inf"]
  assert original[2].startswith("0.778 ")
  assert original[4] == "+0.578 [+0.202, +0.578]"
  assert synthetic[:2] == ["synthetic eps8", tables.epsilon(GENERATOR.epsilon)]
  assert synthetic[2].startswith("0.220 ")
  assert made.table.isascii()


def test_the_same_results_give_the_same_bytes(written, tmp_path):
  root, made = written
  again = run_report(tmp_path)
  assert again == made
  for name in (made.html, made.markdown, made.private_html):
    assert (tmp_path / name).read_bytes() == (root / name).read_bytes()


def test_the_result_is_saved_in_the_private_folder(written):
  root, made = written
  assert artifacts.load(root / "private/report", results.Report) == made
  assert not (root / "report" / artifacts.RESULT_NAME).exists()
  assert made.private_html == "private/report/report.private.html"


SIGNS = (
  {"private": True},
  {"statement": made_up.promise(math.inf)},
  {"directory": "private/evaluate/x"},
)
"""Of privacy: each by itself is enough."""


@pytest.mark.parametrize("test_set", ["public", "fiqa"])
def test_one_sign_of_privacy_keeps_a_row_out(tmp_path, test_set):
  others = [
    evaluation("bm25", 0.2),
    evaluation("public_only", 0.25, test_set=test_set),
  ]
  rows = [
    evaluation(f"mine{i}", 0.6543 + i / 10, test_set=test_set, epsilon=1.0)
    for i in range(len(SIGNS))
  ]
  scores = ("0.654", "0.754", "0.854")
  made = run_report(tmp_path, evaluations=others + rows)
  text = (tmp_path / made.markdown).read_text()
  assert all(score in text for score in scores)
  rows = [
    dataclasses.replace(row, **sign)
    for row, sign in zip(rows, SIGNS, strict=True)
  ]
  made = run_report(tmp_path, evaluations=others + rows)
  text = (tmp_path / made.markdown).read_text()
  assert "0.250" in text and "mine" not in text
  assert not any(score in text for score in scores)
  assert not re.search(r"for \d+ tests", text)  # of the rows that are left out
  text = (tmp_path / made.private_html).read_text()
  assert all(score in text for score in scores)


def test_a_run_without_dp_rows_audits_or_public_scores_still_reports(tmp_path):
  made = run_report(
    tmp_path,
    evaluations=[evaluation("bm25", 0.2)],
    synthetic=[],
    checkpoints=[],
    audits=[],
  )
  pages.Parser((tmp_path / made.html).read_text())
  pages.Parser((tmp_path / made.private_html).read_text())


def test_a_missing_test_set_is_refused(tmp_path):
  with pytest.raises(ValueError, match="test_set='dev', got .*public.*test"):
    run_report(tmp_path, compare_queries.Config(test_set="dev"))


def test_epsilon_is_never_rounded_down():
  values = (None, math.inf, 0.0, 7.9961, 8.0001, 123456.5)
  shown = ["-", "inf", "0", "8", "8.01", "123456.5"]
  assert [tables.epsilon(value) for value in values] == shown


def test_epsilon_0_of_a_release_is_not_that_of_public_data():
  whole = sampling.FixedOrder(num_examples=64, batch_size=64)
  claim = made_up.claim(sampler=whole, noise_multiplier=100.0, steps=1)
  assert claim.epsilon == 0
  assert tables.claimed(claim) == "0"
  assert tables.claimed(PUBLIC) == "-"
  assert tables.claimed(NOT_PRIVATE) == "inf"


def test_names_are_no_formulas_in_drawings():
  measure = intervals.Interval(mean=0.2, low=0.1, high=0.3)
  svg = plots.over_places(
    {"_a $x$ <b>": [(0, measure)]}, {0: "8"}, {"b": measure}, measure="nDCG@10"
  )
  assert "a $x$ &lt;b&gt;</text>" in svg
  assert svg.startswith("<svg") and svg.endswith("</svg>")
  assert "metadata" not in svg


def test_rows_stand_side_by_side_with_their_differences(tmp_path):
  evaluations = [
    evaluation("public_only", 0.21),
    evaluation("original", 0.32, epsilon=math.inf),
    evaluation("synthetic_eps8", 0.24, epsilon=8.0),
  ]
  made = run_report(tmp_path, evaluations=evaluations)
  lines = made.table.splitlines()[2:]
  rows = ["public only", "original", "synthetic eps8"]
  assert [line.split("  ")[0] for line in lines] == rows
  assert " 0.210 [" in lines[0] and " 0.320 [" in lines[1]
  page = (tmp_path / made.private_html).read_text()
  cells = re.findall(r"<td.*?>(.*?)</td>", page)
  # The made-up values differ by the same amount on every query.
  least = {"+0.110": "+0.039", "+0.030": "+0.011"}  # few queries
  for difference, first in (("+0.110", rows[1]), ("+0.030", rows[2])):
    at = cells.index(f"{difference} [{least[difference]}, {difference}]")
    assert cells[at - 2 : at] == [first, "public only"]


def test_audits_stand_beside_the_papers_table(written):
  (one,) = run_of(written[0])["audits"]
  ranks = (*one.cells[0].ranks, 47, 49, 46)
  cell = dataclasses.replace(one.cells[0], ranks=ranks, leaked=2)
  audits = [
    dataclasses.replace(one, row=made_up.row("synthetic_inf"), cells=(cell,)),
    dataclasses.replace(one, row=made_up.row("synthetic_eps16")),
  ]
  lines = audit.text(audits).splitlines()
  (ours,) = [line for line in lines if line.startswith("inf ")][:1]
  # Generator, repetitions, the papers' rank and leaks, our rank and leaks.
  assert re.split(r"  +", ours) == [
    "inf", "10", "1", "67%", "46.0 [17.4, 79.1]", "40%",
  ]  # fmt: skip
  assert any(re.match(r"eps16 +10 +43 +0% ", line) for line in lines)


def test_a_contaminated_audit_says_so_first(written):
  (one,) = run_of(written[0])["audits"]
  text = audit.text([dataclasses.replace(one, control=1e-5)])
  assert text.startswith(
    "eps8: secrets that the scored model cannot know rank too low"
  )
  refuted = dataclasses.replace(one, lower_bound=8.5)
  assert "REFUTES THE CLAIM" in audit.text([refuted])
  assert "REFUTES" not in audit.text([one])


def test_a_learning_curve_of_one_point_can_be_seen():
  dot = re.compile(rf"<use [^>]*fill: {plots._COLORS[0]}", re.IGNORECASE)
  for number in (1, 2):
    drawn = plots.curves({"a": (range(number), [1.0] * number)}, label="loss")
    assert bool(dot.search(drawn)) == (number == 1)


def test_a_page_is_written_anew_once_its_queries_are_declared_otherwise(
  finished_run, monkeypatch
):
  def find_report():
    seen = plan.outlook(finished_run.config, finished_run.root, plan.STAGES)
    return dict(seen.progress)["report"]

  assert find_report() == {"": True}
  monkeypatch.setattr(plan.RunConfig, "has_public_queries", False)
  assert find_report() == {"": False}


def test_no_row_under_private_may_be_shipped():
  """The page tells its reader which systems to give away."""
  places = {
    "synthetic_eps8": "train_retriever/synthetic_eps8",
    "direct_dp_eps8": "private/train_retriever/direct_dp_eps8",
    "original": "private/train_retriever/original",
  }
  systems = {
    name: types.SimpleNamespace(value=types.SimpleNamespace(directory=place))
    for name, place in places.items()
  }
  run = types.SimpleNamespace(systems=systems)
  assert report._shipped(run) == ["synthetic_eps8"]
