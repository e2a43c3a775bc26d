"""Every gin file parses, and says what its header promises."""

import dataclasses
import math
import pathlib
import re

import pytest

from synthq_jax.cli import flags as flags_lib
from synthq_jax.cli import main
from synthq_jax.models import t5_config
from synthq_jax.stages import plan
from synthq_jax.studies import (
  federated,
  images,
  planted_leakage,
  vectors,
)

ROOT = pathlib.Path(__file__).resolve().parents[1]
ALL_FILES = sorted((ROOT / "gin_configs").rglob("*.gin"))
FILES = [path for path in ALL_FILES if path.parent.name != "t5x"]
"""Those of `synthq`; T5X's own are run by tests/backends/t5x."""
DEMO = "gin_configs/recipes/demo.gin"
PAPER = "gin_configs/recipes/paper_t5_base.gin"
PAPER_NEEDS = ("SOURCE=msmarco:m", "CHECKPOINT=c", "VOCABULARY=v.model")
NEEDS = {
  "beir": ("SOURCE=beir:b",),
  "encoder": ("SOURCE=beir:b", "ENCODER=e"),
  "encoder_queries": ("SOURCE=beir:b", "ENCODER=e"),
  "msmarco": ("SOURCE=msmarco:m",),
  "jsonl": ("SOURCE=jsonl:j",),
  "seqio": ("MIXTURE_OR_TASK_NAME=t",),
  "planted_leakage": ("SOURCE=beir:b",),
  "sizes": ("CHECKPOINT=c",),
  "federated": ("SOURCE=beir:b",),
  "federated_tiny": ("SOURCE=beir:b",),
  "federated_wikiqa": ("SOURCE=beir:b",),
  "paper_fed_newsqa": ("SOURCE=newsqa:f.json", "URLS=('u.txt',)", "BERT=b"),
  "paper_spire22_robust04": (
    "TRAIN_SOURCE=ir_datasets:x",
    "MORE_QUERIES=ir_datasets:y",
    "VERIFIED=v.jsonl",
    "MONOT5=t",
    "T5_VOCABULARY=v.model",
    "MONOBERT=b",
  ),
  "paper_t5_base": PAPER_NEEDS,
  "paper_canaries": PAPER_NEEDS,
  **{
    f"paper_t5_{size}": (*PAPER_NEEDS, "ENCODER=r")
    for size in ("small", "large", "xl")
  },
}
STUDIES = {
  "federated": federated.Config,
  "federated_tiny": federated.Config,
  "federated_wikiqa": federated.Config,
  "paper_fed_newsqa": federated.Config,
  "paper_spire22_robust04": planted_leakage.Config,
  "logit_dp_cifar": images.Config,
  "logit_dp_images": images.Config,
  "planted_leakage": planted_leakage.Config,
  "planted_leakage_tiny": planted_leakage.Config,
  "vectors": vectors.Config,
}


def recipe(path: pathlib.Path) -> tuple[type, list[str]]:
  """The dataclass that a file configures, and the files it takes."""
  if path.parent.name == "studies":
    return STUDIES.get(path.stem, plan.RunConfig), [str(path)]
  if path.parent.name == "recipes":
    return plan.RunConfig, [str(path)]
  return plan.RunConfig, [DEMO, str(path)]


@pytest.mark.parametrize(
  "path", ALL_FILES, ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_what_a_file_leaves_open_stands_in_its_header(path):
  text = path.read_text()
  header = text[: text.index("from __gin__")]
  assert header.startswith("# ")
  for name in re.findall(r"(?m)^(\w+) = %gin.REQUIRED", text):
    assert name in header.partition("Required:")[2]


# What a header names without a value, or with one of several words.
ADVERTISED = {
  "audit.Config.num_candidates": "100",
  "monot5/planted_leakage.Model.document_length": "48",
  "monot5/rerankers.Recipe.epochs": "2",
  "plan.Canaries.kinds": "('rare_words',)",
  "plan.Canaries.number": "8",
}
_PARAMETER = re.compile(
  r"(?<![\w/.])(?:\w+/)?[a-z]\w*\.[A-Z]\w*[a-z]\w*\.[a-z]\w*"
)
_QUOTES = re.compile(r"""^[\\'"]+|[\\'"]+$""")
_FLAG = re.compile(r"--gin\.([\w./]+)=(\\?'[^']*'|\"[^\"]*\"|\S*[^\s.,;)])")


def advertised(path: pathlib.Path) -> list[dict[str, str]]:
  """The flags that a file's comments show, those of one command together."""
  text = " ".join(re.findall(r"(?m)^# *(.*)$", path.read_text()))
  commands, end = [], None
  for found in _FLAG.finditer(text):
    name, value = found.groups()
    if end is None or text[end : found.start()].strip():
      commands.append({})
    commands[-1][name] = ADVERTISED.get(name, _QUOTES.sub("", value))
    end = found.end()
  shown = {name for command in commands for name in command}
  named = dict.fromkeys(_PARAMETER.findall(text))
  return commands + [{n: ADVERTISED[n]} for n in named if n not in shown]


def macros(path: pathlib.Path) -> set[str]:
  """What a header says may, or must, be given."""
  header = path.read_text().partition("from __gin__")[0]
  text = " ".join(re.findall(r"(?m)^# *(.*)$", header))
  key = r"(?= [A-Z][a-z]+(?: [a-z]+)*(?: \([^)]*\))?: |$)"
  said = re.findall(rf"(?:Usual overrides|Required): (.*?){key}", text)
  name = r"(?<![\w=./:])[A-Z][A-Z_]{2,}[A-Z](?![\w.])"
  return set(re.findall(name, " ".join(said))) - {
    "BEIR",
    "BERT",
    "ORCAS",
    "TFDS",
    "TREC",
  }


def bound(path: pathlib.Path) -> list[str]:
  """The parameters of classes that a file binds on one line, as flags."""
  lines = re.findall(
    r"(?m)^([\w/]+\.[\w.]+) = (.*[^\s(\[{\\\\])$", path.read_text()
  )
  return [f"{name}={value.partition('  #')[0]}" for name, value in lines]


@pytest.mark.parametrize(
  "path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_a_file_builds_what_it_configures_with_what_its_header_names(
  path, capsys
):
  kind, files = recipe(path)
  needs = NEEDS.get(path.stem, ())
  config, text = main.configure(kind, files, needs)
  assert isinstance(config, kind)
  assert "dynamic_registration" in text
  assert capsys.readouterr().err == "", "something is set to no effect"
  assert macros(path) <= set(flags_lib.names(text))
  again, _ = main.configure(kind, files, [*needs, *bound(path)])
  assert again == config, "what a file binds, a flag can bind"
  for command in advertised(path):
    flags = [f"{name}={value}" for name, value in command.items()]
    _, text = main.configure(kind, files, [*needs, *flags])
    assert command.keys() <= set(flags_lib.names(text)), flags


def test_the_files_show_and_bind_what_stages_do_not_hold():
  """The readers above see what they must."""
  demo = ROOT / "gin_configs/recipes/demo.gin"
  assert {"EPSILON", "TRAINED"} <= macros(demo)
  studies = ROOT / "gin_configs/studies"
  shown = advertised(studies / "planted_leakage.gin")
  assert {"monot5/rerankers.Recipe.epochs": "2"} in shown
  shown = advertised(studies / "paper_spire22_robust04.gin")
  [robust] = [one for one in shown if "TRAIN_SOURCE" in one]
  assert robust["TRAIN_SOURCE"] == "ir_datasets:msmarco-document/orcas"
  [newsqa] = [x for x in advertised(studies / "federated.gin") if "URLS" in x]
  assert newsqa["PARTITION"] == "genre"
  flags = "\n".join(flag for path in FILES for flag in bound(path))
  for module in (
    "personalisation",
    "contrastive",
    "optim",
    "rerankers",
    "lora",
  ):
    assert re.search(rf"(?m)^(\w+/)?{module}\.[A-Z]", flags), module


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_header_installs_what_the_command_line_needs(path):
  """Extras such as cuda bring neither gin nor flax."""
  for extras in re.findall(r"pip install \S*\[(.*?)\]", path.read_text()):
    assert "run" in extras.split(",")


def test_the_demos_header_gives_what_the_readmes_table_was_made_with():
  header = (ROOT / DEMO).read_text().partition("\nfrom ")[0]
  launcher = (ROOT / "launch/local.sh").read_text()
  for setting in re.findall(r"--gin\.(\w+=[^\s\")]+)", launcher)[1:]:
    assert setting in header


def test_the_recipe_of_leaks_counts_instances_as_the_paper_does():
  path = ROOT / "gin_configs/studies/paper_spire22_robust04.gin"
  config, _ = main.configure(
    planted_leakage.Config, [str(path)], NEEDS[path.stem]
  )
  assert (config.num_leaked, config.sizes[0], config.sizes[-1]) == (
    1000, 1000, 128_000,
  )  # fmt: skip
  assert config.folds == 5 and not config.leaked_only
  assert {model.recipe.epochs for model in config.models} == {1}
  assert [model.seeds for model in config.models] == [5] * 5
  assert (config.near, config.num_test_queries) == ("verified", None)
  assert config.more_queries and config.train_source


def test_a_recipe_refuses_to_run_without_what_it_requires():
  with pytest.raises(main.UsageError) as caught:
    main.configure(plan.RunConfig, [PAPER], PAPER_NEEDS[:1])
  assert "--gin.CHECKPOINT=... --gin.VOCABULARY=..." in str(caught.value)
  assert "SOURCE" not in str(caught.value)


def test_a_model_is_known_by_its_name():
  name = t5_config.names()[-1]
  flags = [f"MODEL={name}"]
  config, _ = main.configure(plan.RunConfig, [DEMO], flags)
  assert config.model == t5_config.get(name)


def test_the_demo_has_the_rows_it_must_show_and_all_macros_reach_a_stage():
  config, text = main.configure(plan.RunConfig, [DEMO])
  rows = config.rows
  assert rows.bm25 and rows.public_only and rows.original
  assert rows.synthetic == rows.direct_dp == (8.0,)
  for name in (
    "EPSILON CLIP_NORM BATCH_SIZE TRAIN_STEPS DOCUMENT_LENGTH QUERY_LENGTH SEED"
  ).split():
    assert text.count(f"%{name}") >= 1, name
  assert config.generate.p == 0.8
  assert config.secret_seed is None


def test_one_seed_is_that_of_everything_public():
  config, _ = main.configure(plan.RunConfig, [DEMO], ["SEED=3"])
  stages = [getattr(config, field.name) for field in dataclasses.fields(config)]
  seeds = [stage.seed for stage in stages if hasattr(stage, "seed")]
  assert len(seeds) == 12
  assert seeds == [3] * len(seeds)


def test_the_paper_recipe_has_the_papers_settings():
  config, _ = main.configure(plan.RunConfig, [PAPER], PAPER_NEEDS)
  queries = 502_939
  tuned = config.finetune_dp
  assert tuned.steps == 30 * (queries // 1024)
  assert (tuned.batch_size, tuned.learning_rate) == (1024, 1e-3)
  assert (tuned.clip_norm, tuned.delta) == (0.1, None)
  assert tuned.optimizer == "dp_adafactor"
  assert tuned.prefix == config.generate.prefix == "generate_query: "
  assert config.prepare_data.document_length == 384
  assert config.prepare_data.query_length == config.generate.max_length == 128
  assert (config.generate.p, config.generate.temperature) == (0.8, 1.0)
  assert config.rows.synthetic == (math.inf, 16.0, 8.0, 3.0)
  assert config.rows.direct_dp == (16.0,)  # a week of a chip each
  for trained in (config.train_retriever, config.direct_dp):
    assert trained.steps == 5 * (queries // 32)
    assert (trained.batch_size, trained.learning_rate) == (32, 1e-3)
    assert trained.temperature == 1.0
    assert config.checkpoint == "c"
  assert (config.direct_dp.method, config.direct_dp.gradients) == (
    "example",
    "all",
  )
  assert config.prepare_data.written_for == "train"
  assert config.generate.num_documents is None
  assert config.compare_queries.similar_to == "train"
  public_code = (
    "RETRIEVER_TEMPERATURE=.01",
    "RETRIEVER_PROJECTION=True",
    "RETRIEVER_DIRECTIONS=2",
  )
  changed, _ = main.configure(
    plan.RunConfig, [PAPER], (*PAPER_NEEDS, *public_code)
  )
  for trained in (changed.train_retriever, changed.direct_dp):
    assert (trained.temperature, trained.projection) == (0.01, True)
  assert changed.train_retriever.directions == 2
  canaries, _ = main.configure(
    plan.RunConfig, ["recipes/paper_canaries.gin"], PAPER_NEEDS
  )
  assert canaries.canaries.digits == 10
  assert canaries.finetune_dp == config.finetune_dp


def test_the_image_recipe_accumulates_for_logit_dp_alone():
  """Logit-DP paper, appendix B.1: 25 and 100 batches, of Logit-DP alone."""
  config, _ = main.configure(
    images.Config,
    ["studies/logit_dp_cifar.gin"],
    ("RESNET_LOGIT_RATE=.5", "NET_NAIVE_CLIP=.25"),
  )
  of_net = {each.name: each for each in config.encoders}
  for encoder, batches in (("embedding_net", 25), ("resnet18", 100)):
    for row in of_net[encoder].rows:
      is_logit = row.name.startswith("logit")
      assert row.accumulation == (batches if is_logit else 1), row.name
      is_tuned = is_logit and encoder == "resnet18"
      assert row.learning_rate == (0.5 if is_tuned else 1e-3)
      is_naive = row.name == "naive" and encoder == "embedding_net"
      assert row.clip_norm == (0.25 if is_naive else 1.0)
  batch_norm = of_net["resnet18_batch"]
  assert batch_norm.norm == "batch"
  assert [row.method for row in batch_norm.rows] == [None]


def test_the_federated_recipe_has_the_thesis_settings():
  """Thesis, sections 3.4.2 and 4.3, tables 3.2, 3.3 and 4.2."""
  config, _ = main.configure(
    federated.Config,
    ["studies/paper_fed_newsqa.gin"],
    NEEDS["paper_fed_newsqa"],
  )
  recipe, personal = config.recipe, config.personal.settings
  assert {recipe.learning_rate, personal.learning_rate} == {3e-5}
  assert config.central_learning_rate == 3e-5 and not config.rates
  assert not config.is_chosen  # no early stopping
  assert recipe.weight_decay == personal.weight_decay > 0
  assert (config.query_length, config.sentence_length) == (32, 512)
  assert (config.query_pooling, config.sentence_pooling) == ("first", "mean")
  assert (recipe.batch_size, personal.batch_size) == (8, 32)
  assert (recipe.num_negatives, personal.num_negatives) == (8, 200)
  assert (recipe.top, config.exchange_top, config.max_clients) == (300, 200, 10)
