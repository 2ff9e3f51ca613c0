"""Writes a copy of a block-FP8 model in bfloat16, on a CPU: `python bfloat16_copy.py MODEL COPY`.

transformers cannot do this: `from_pretrained` dequantises the weights, but `save_pretrained` (5.19) writes
them in FP8 again.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, safe_open, save_file


def convert(source: Path, copy: Path) -> None:
    """Copies a folder and multiplies every float8 tensor by the scales of its blocks."""
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((source / "config.json").read_text())
    rows, columns = config.pop("quantization_config")["weight_block_size"]
    (copy / "config.json").write_text(json.dumps(config, indent=2))
    files, scales, places = sorted(source.glob("*.safetensors")), {}, {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            names = [name for name in tensors.keys() if name.endswith("_scale_inv")]  # noqa: SIM118
            scales |= {name: tensors.get_tensor(name) for name in names}
    for file in files:
        plain = {name: tensor for name, tensor in load_file(file).items() if name not in scales}
        for name, tensor in plain.items():
            if tensor.element_size() == 1:
                scale = scales[f"{name}_scale_inv"].float()
                scale = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
                plain[name] = (tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]).bfloat16()
        save_file(plain, copy / file.name, metadata={"format": "pt"})
        places |= dict.fromkeys(plain, file.name)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
