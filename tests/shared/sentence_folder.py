"""A folder of sentence-transformers with random static vectors of letters and words."""

import json
import pathlib
import string

import numpy as np

DIM = 12


def save(folder: pathlib.Path, words: str, *, is_normal: bool = True) -> str:
  """Writes it; returns its path. Needs `tokenizers` alone."""
  import tokenizers
  from safetensors import numpy as safetensors

  letters = string.ascii_lowercase + string.digits
  names = ["[PAD]", "[UNK]", *sorted(set(words.lower().split()))]
  names += [*letters, *(f"##{letter}" for letter in letters)]
  names = list(dict.fromkeys(names))
  inner = tokenizers.Tokenizer(
    tokenizers.models.WordPiece(
      {name: i for i, name in enumerate(names)}, unk_token="[UNK]"
    )
  )
  inner.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
  inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  kind = "sentence_transformers.models."
  modules = [
    {"idx": 0, "name": "0", "path": "", "type": f"{kind}StaticEmbedding"},
    {"idx": 1, "name": "1", "path": "1_Normalize", "type": f"{kind}Normalize"},
  ]
  folder.mkdir(parents=True)
  (folder / "1_Normalize").mkdir()
  (folder / "modules.json").write_text(json.dumps(modules[: 1 + is_normal]))
  inner.save(str(folder / "tokenizer.json"))
  table = np.random.default_rng(0).normal(size=(len(names), DIM))
  safetensors.save_file(
    {"embedding.weight": table.astype(np.float32)},
    folder / "model.safetensors",
  )
  return str(folder)
