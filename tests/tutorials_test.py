"""The Python of the tutorials runs as it is printed, launchers as dry runs."""

import ast
import functools
import html
import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types
import urllib.parse
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_t5
import sentence_folder
import small_data

from synthq_jax.cli import main
from synthq_jax.data import environment_docs

TUTORIALS = pathlib.Path(__file__).parents[1] / "docs/tutorials"
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def _run(name: str) -> dict:
  blocks = _BLOCK.findall((TUTORIALS / name).read_text())
  assert blocks, f"{name} shows no Python"
  names: dict = {}
  exec(compile("\n".join(blocks), name, "exec"), names)  # noqa: S102
  return names


def test_the_tutorial_on_contrastive_losses_trains_with_noise(capsys):
  names = _run("contrastive_dp.md")
  printed, promise = capsys.readouterr().out, names["promise"]
  text = (TUTORIALS / "contrastive_dp.md").read_text()
  shown = re.search(r"epsilon (\d+) and delta ([\d.]+) for one pair", text)
  assert promise.epsilon == pytest.approx(float(shown[1]), abs=0.01)
  assert promise.delta == float(shown[2])
  assert f" {shown[2]})-differentially private: when one pair" in printed
  assert (promise.steps, promise.l2_sensitivity) == (names["steps"], 0.1)
  kernel = names["params"]["kernel"]
  assert jnp.isfinite(kernel).all()
  assert jnp.abs(kernel - jnp.eye(names["dim"])).max() > 0.01
  assert names["grad_fn"].sensitivity("ADD_OR_REMOVE_ONE", "pair") == 0.1
  assert names["state"][0].step == names["steps"]
  against_batch = names["optim"].contrastive_clipped_grad(
    names["encode"],
    names["encode"],
    loss=names["contrastive"].Softmax(temperature=0.1),
    l2_clip_norm=0.1,
    method=names["optim"].Row(),
    max_batch_size=8,
  )
  moved = against_batch.sensitivity("ADD_OR_REMOVE_ONE", "pair")
  assert moved == pytest.approx(1.5)


def test_the_page_on_audits_finds_what_it_says():
  """Its script on the private step: tests/audit/private_step_test.py."""
  names = _run("../audits.md")
  found = names["found"]
  assert 0 < found.epsilon_one_run < found.epsilon_one_run_fdp < 7.1


def test_the_tutorial_on_a_loop_of_ones_own_learns_and_says_what_it_earned():
  names = _run("own_training_loop.md")
  assert names["accuracy"](names["start"]) < 0.6
  assert names["accuracy"](names["params"]) > 0.8
  assert names["earned"].epsilon == pytest.approx(4.0, abs=0.01)
  step, arguments = names["step"], (names["params"], names["opt_state"])
  batch = {**names["two"], "is_padding_example": jnp.zeros(2, bool)}
  expected = step(*arguments, batch)
  donated = names["fast"](*jax.tree.map(jnp.copy, arguments), batch)
  jax.tree.map(np.testing.assert_array_equal, donated, expected)
  assert jax.tree.structure(names["total"]) == jax.tree.structure(names["head"])


def test_the_tutorial_on_clients_trains_and_counts():
  names = _run("federated.md")
  assert names["distance"] < 0.05
  assert names["made"].traffic["north"].sent > 200 * 64 * 4
  assert names["claim"].epsilon == names["privacy"].epsilon


def _commands(name: str) -> list[tuple[list[str], int]]:
  """The arguments of each `synthq` of a page, and its exit code."""
  text = (TUTORIALS / name).read_text()
  lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
  lines = lines.replace("\\\n", " ")
  return [
    (
      shlex.split(line, comments=True)[1:],
      int((re.findall(r"exit code (\d)", line) or [0])[0]),
    )
    for line in lines.splitlines()
    if line.startswith("synthq ")
  ]


def test_the_tutorial_on_gin_runs_its_experiment(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  text = (TUTORIALS / "gin_experiment.md").read_text()
  (experiment,) = re.findall(r"```gin\n(.*?)```", text, re.DOTALL)
  pathlib.Path("clip_study.gin").write_text(experiment)
  small = [  # what the page runs on takes a minute to read and to search
    f"--gin.SOURCE={small_data.write_pairs(tmp_path / 'pairs.jsonl', 100)}",
    f"--gin.CHECKPOINT={random_t5.save(tmp_path / 't5')!r}",
    "--gin.plan.RunConfig.public_data=True",
    "--gin.prepare_data.Config.public_test_documents=20",
    "--gin.NUM_DOCUMENTS=32",
  ]
  said = []
  for arguments, code in _commands("gin_experiment.md"):
    flags = small if arguments[0] != "privacy" else []
    assert main.main([*arguments, *flags]) == code, capsys.readouterr().err
    said.append(capsys.readouterr())
  first, second, mistake, ledger = said
  assert "synthetic eps3" in first.out and "direct dp" not in first.out
  assert "[prepare_data] finished earlier" in second.err + second.out
  assert "CLIPNORM" in mistake.err and "CLIP_NORM" in mistake.err
  assert "together (2): epsilon" in ledger.out
  result = json.loads(
    pathlib.Path("runs/clip_study/finetune_dp/eps3/result.json").read_text()
  )
  assert '"l2_clip_norm": 0.1' in json.dumps(result)


def test_the_tutorial_on_evaluation_compares_runs_of_ones_own(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  judged = pathlib.Path("my_beir_folder/qrels/test.tsv")
  judged.parent.mkdir(parents=True)
  lines = ["query-id\tcorpus-id\tscore", "q1\td1\t1", "q2\td2\t2"]
  judged.write_text("\n".join(lines) + "\n")
  for row, first in (("bm25", "d1"), ("mine", "d2")):
    ranked = [
      f"{q} Q0 {first} 1 2.0 x\n{q} Q0 d3 2 1.0 x" for q in ("q1", "q2")
    ]
    pathlib.Path(f"{row}.trec").write_text("\n".join(ranked) + "\n")
  text = (TUTORIALS / "data_and_evaluation.md").read_text()
  (block,) = (x for x in _BLOCK.findall(text) if "tables.compare" in x)
  exec(compile(block, "data_and_evaluation.md", "exec"), {})  # noqa: S102
  printed = capsys.readouterr().out
  rows = [line.split() for line in printed.splitlines()]
  assert ["bm25", "0.500"] in rows and ["mine", "0.500"] in rows
  assert "nDCG@10, means over queries." in printed


def test_the_tutorial_on_leaks_finds_those_it_planted(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  names = _run("query_leakage.md")
  assert len(names["found"]) == 2
  ((arguments, code),) = _commands("query_leakage.md")
  assert main.main([*arguments, "--quiet"]) == code == 3
  rows = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert ["exact", "1", "mine", "1", "1", "1", "1"] in rows
  assert pathlib.Path("check/clean_ids.txt").read_text() == "q2\nq3\n"


def test_the_tutorial_on_shipping_goes_from_a_log_to_exports_and_a_search(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  numbers = range(120)
  documents = [
    {"_id": f"d{i}", "text": small_data.document(i)} for i in numbers
  ]
  clicks = [f"u{i % 9},{small_data.query(i)},d{i},{i % 5}" for i in numbers]
  lost = "u1,boat to the island,d999,1"
  small_data.write_lines(
    pathlib.Path("clicks.csv"), ["user,query,document,clicks", *clicks, lost]
  )
  small_data.write_lines(
    pathlib.Path("corpus.jsonl"), map(json.dumps, documents)
  )
  run, *others = [arguments for arguments, _ in _commands("ship_it.md")]
  run = [
    one.replace("recipes/demo.gin", "recipes/demo_tiny.gin") for one in run
  ]
  small = ["BATCH_SIZE=8", "RETRIEVER_BATCH_SIZE=8", "plan.Rows.direct_dp=()"]
  # Words of chance: BM25 finds one query in fifty.
  small += ["FILTER_TOP_K=119", "generate.Config.queries_per_document=16"]
  small.append("plan.Rows.original=False")
  small.append(f"CHECKPOINT={random_t5.save(tmp_path / 't5')!r}")
  run += [f"--gin.{one}" for one in small]
  assert main.main([*run, "--strict"]) == 2
  assert "the id of a known document" in capsys.readouterr().err
  assert main.main(run) == 0
  said = capsys.readouterr()
  assert "left out judgements of unknown document ids" in said.err
  for line in (
    "Queries: Yes",
    "Ship: ",
    r"Privacy: epsilon 8(\.\d+)? for one query",
  ):
    assert re.search(f"\n{line}", said.out)
  *others, serve = others
  for arguments in others:
    assert main.main(arguments) == 0
  shown = capsys.readouterr().out
  assert "hf upload YOUR_NAME/retriever" in shown
  assert (
    "--repo-type=dataset" in shown and "ltr_synthetic_eps8:\n  1. " in shown
  )
  assert len(run) < 20 and len([run, *others, serve]) <= 7
  page = _served(serve, "report on the otter of the harbor")
  assert page.count("<h1>") == 1 and page.count("<li>") == 10
  if importlib.util.find_spec("sentence_transformers"):
    names = {"texts": [one["text"] for one in documents]}
    text = (TUTORIALS / "ship_it.md").read_text()
    model, _, ranker = re.findall("```py\n(.*?)```", text, re.DOTALL)
    exec(model, names)  # noqa: S102
    assert names["scores"].shape == (len(documents),)
    monkeypatch.syspath_prepend("shipped/ranker")
    names["ids"] = [one["_id"] for one in documents]
    exec(ranker, names)  # noqa: S102
    assert len(names["ranker"].search("report on the otter", k=10)) == 10


@pytest.mark.slow
def test_the_tutorial_on_adapters_goes_from_a_log_to_a_query(
  tmp_path, monkeypatch, capsys
):
  pytest.importorskip("tokenizers")
  monkeypatch.chdir(tmp_path)
  numbers = range(90)
  documents = [
    {"_id": f"d{i}", "title": "", "text": small_data.document(i)}
    for i in numbers
  ]
  small_data.write_lines(
    pathlib.Path("clicks.csv"),
    ["query,document", *(f"{small_data.query(i)},d{i}" for i in numbers)],
  )
  small_data.write_lines(
    pathlib.Path("corpus.jsonl"), map(json.dumps, documents)
  )
  words = " ".join(one["text"] for one in documents)
  sentence_folder.save(pathlib.Path("model"), words)
  commands = [arguments for arguments, _ in _commands("adapter.md")]
  dry, *others, write, share = commands
  assert len(others) + 2 <= 5  # the run is printed once, as a dry one
  small = ["prepare_data.Config.public_test_documents=20"]
  small = [f"--gin.{one}" for one in small]
  of_map = ["learn_adapter.Config.steps=3", "learn_adapter.Config.pool=8"]
  of_queries = [f"CHECKPOINT={random_t5.save(tmp_path / 't5')!r}"]
  of_queries += ["BATCH_SIZE=8", "TRAIN_STEPS=2"]
  # Words of chance: BM25 finds one query in fifty.
  of_queries += ["FILTER_TOP_K=89", "generate.Config.queries_per_document=16"]
  write += [*small, *(f"--gin.{one}" for one in of_queries)]
  small += [f"--gin.{one}" for one in of_map]
  assert main.main([*dry, *small]) == 0
  planned = capsys.readouterr().out
  assert "learn_adapter/adapter_eps1" in planned
  assert "reads nothing before queries and nothing before documents" in planned
  wet = [one for one in dry if one != "--dry_run"]
  assert main.main([*wet, *small]) == 0
  assert "adapter eps1" in capsys.readouterr().out
  for arguments in (*others, write, share):
    assert main.main(arguments) == 0, capsys.readouterr().err
  assert pathlib.Path("runs/queries/learn_adapter/synthetic_eps3").exists()
  text = (TUTORIALS / "adapter.md").read_text()
  *model, alone = re.findall("```py\n(.*?)```", text, re.DOTALL)
  vectors = np.random.default_rng(1).normal(size=(3, sentence_folder.DIM))
  names: dict = {"vectors": vectors.astype(np.float32)}
  exec(alone, names)  # noqa: S102
  assert np.linalg.norm(names["moved"], axis=1) == pytest.approx(1, rel=1e-5)
  if importlib.util.find_spec("sentence_transformers"):
    names = {"texts": [one["text"] for one in documents]}
    exec(model[0], names)  # noqa: S102
    assert names["scores"].shape == (len(documents),)


def _served(arguments: list[str], query: str) -> str:
  """What the page of `synthq search --serve` answers."""
  with subprocess.Popen(
    [sys.executable, "-m", "synthq_jax", *arguments, "--port=0"],
    env=os.environ | {"PYTHONPATH": str(TUTORIALS.parents[1])},
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    try:
      address = process.stdout.readline().split()[0]
      form = urllib.parse.urlencode({"q": query}).encode()
      with urllib.request.urlopen(address, form, timeout=60) as answer:
        return answer.read().decode()
    finally:
      process.terminate()


class _Html(str):
  """Stands in for what Jupyter's kernel brings, which tests do without."""


def _shown(source: str, names: dict) -> object:
  """Runs a cell as Jupyter does; returns what its last line shows."""
  *body, last = ast.parse(source).body
  exec(compile(ast.Module(body, []), "cell", "exec"), names)  # noqa: S102
  return eval(ast.unparse(last), names)  # noqa: S307


def test_the_notebook_runs_the_tiny_recipe_and_shows_its_page(
  tmp_path, monkeypatch, capsys
):
  cells = json.loads((TUTORIALS / "demo_tiny.ipynb").read_text())["cells"]
  code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
  assert not any(c.get("outputs") for c in cells)
  display = types.ModuleType("IPython.display")
  display.HTML = _Html
  monkeypatch.setitem(sys.modules, "IPython.display", display)
  few = functools.partial(environment_docs.build, ("absl", "optax"))
  monkeypatch.setattr(environment_docs, "build", few)
  monkeypatch.chdir(tmp_path)
  # Before ours: with rows alone that the notebook shows.
  pathlib.Path("demo_tiny.gin").write_text(
    "from __gin__ import dynamic_registration\n"
    "from synthq_jax.stages import plan\n"
    "include 'gin_configs/recipes/demo_tiny.gin'\n"
    "plan.Rows.original = False\nplan.Rows.direct_dp = ()\n"
    "LTR = ()\nADAPTED = ()\n"
  )
  names: dict = {}
  finished, page, texts, _ = [_shown(source, names) for source in code]
  assert finished == 0
  framed = re.search('srcdoc="(.*?)" width', page, re.DOTALL)[1]
  written = pathlib.Path("runs/tiny/report/report.html").read_text()
  assert (
    html.unescape(framed) == written and "<strong>Queries</strong>" in written
  )
  assert len(texts) == 5 and all(texts)
  printed = capsys.readouterr().out
  assert re.search(r"epsilon (7\.9\d+|8) for one query", printed)
  assert "\nfused_synthetic_eps8:\n  1. " in f"\n{printed}"


_SHOWN = re.compile(r"```(bash|text)\n(.*?)```", re.DOTALL)


def _words(command: str) -> list[str]:
  """The words of a command that may go over several lines."""
  return shlex.split(command.replace("\\\n", " "))


@pytest.mark.parametrize(
  ("page", "number"),
  [("tutorials/tpu_slice.md", 6), ("lab/tpu_slice_2026.md", 2)],
)
def test_the_pages_on_tpu_slices_print_what_they_say(page, number):
  root = TUTORIALS.parents[1]
  blocks = _SHOWN.findall((TUTORIALS.parent / page).read_text())
  printed, launched = "", 0
  for kind, block in blocks:
    if kind == "text":
      for line in block.splitlines():
        assert line in printed.splitlines(), line
    elif block.startswith("python launch/"):
      words = _words(block)[1:]
      command = [w for w in words if w != "--confirm_cost"]
      if "--dry_run" not in words:
        command.append("--dry_run")
      done = subprocess.run(
        [sys.executable, *command],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
      )
      assert done.returncode == 0, done.stderr
      printed, launched = done.stdout, launched + 1
  assert launched == number


def test_without_consent_the_tutorials_commands_say_what_they_would_cost():
  text = (TUTORIALS / "tpu_slice.md").read_text()
  block = next(
    b for _, b in _SHOWN.findall(text) if "--confirm_cost --spot" in b
  )
  words = _words(block.replace("--confirm_cost", ""))[1:]
  done = subprocess.run(
    [sys.executable, *words],
    cwd=TUTORIALS.parents[1],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2
  assert "16 chips (v4-32, 4 hosts, spot)" in done.stderr
