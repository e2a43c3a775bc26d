import pytest

from synthq_jax.data import rule_questions


@pytest.mark.parametrize(
  ("title", "text", "wanted"),
  [
    ("Plotting many lines", "Call it.", ["how do i plot many lines"]),
    ("Types of cells", "Many.", ["what are the types of cells"]),
    (
      "Mitosis vs meiosis",
      "Two ways.",
      ["what is the difference between mitosis and meiosis"],
    ),
    ("Intro", "This is a book.", []),
    ("Ada", "Ada was a writer. She", ["who was ada"]),
    ("Rust", "Rust is the red oxide of iron that forms in air.",
     ["what is rust", "is rust the red oxide of iron that forms in air"]),
    ("", "Scurvy is caused by a lack of vitamin C.",
     ["what is scurvy", "is scurvy caused by a lack of vitamin c",
      "what is scurvy caused by"]),
    ("", "The telephone was invented by Alexander Bell.",
     ["who was the telephone invented by",
      "was the telephone invented by alexander bell"]),
    ("", "The abbey was founded in 1132 by monks.",
     ["when was the abbey founded",
      "was the abbey founded in 1132 by monks"]),
    ("", "Coal is found in layers of rock.",
     ["what is coal", "is coal found in layers of rock",
      "where is coal found"]),
    ("", "The pancreas produces insulin.",
     ["what does the pancreas produce", "what produces insulin",
      "does the pancreas produce insulin"]),
    ("", "Marie Curie discovered radium.",
     ["what did marie curie discover", "who discovered radium",
      "did marie curie discover radium"]),
    ("", "Antibiotics can kill bacteria.", ["can antibiotics kill bacteria"]),
    ("", "It contains nothing.", []),
    ("", "The following table contains codes.", []),
    ("", "Returns the number that contains the dot.", []),
  ],
)  # fmt: skip
def test_rules_ask_what_a_text_answers(title, text, wanted):
  assert rule_questions.ask(title, text) == wanted
