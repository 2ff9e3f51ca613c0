"""Programs are confined where the service is not root: none of what they try gets through."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from paceline.service.confinement import confined
from paceline.service.confinement.confined import Command, why_not_confined
from support import escapes
from support.confined_hosts import listening

PROBLEM = asyncio.run(why_not_confined())
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)


@pytest.mark.skipif(
    os.getuid() != 0 or not all(map(shutil.which, ("setpriv", "/usr/bin/python3"))),
    reason="needs root, setpriv (util-linux) and /usr/bin/python3 to run as another user",
)
def test_no_attempt_gets_through_where_nobody_is_root() -> None:
    """As a user without rights, the program is that user, under another number."""
    with tempfile.TemporaryDirectory() as folder, listening() as (port, name):
        root, program = Path(folder, "root"), Path(folder, "inside.py")
        root.mkdir()
        program.write_text(Path(confined.inside.__file__).read_text())
        for path in (folder, root, program):
            os.chmod(path, 0o777)
        words = ["/usr/bin/python3", "-I", "-B", "/tmp/program.py", folder, str(port), name]
        command = Command(words=words, files={"program.py": Path(escapes.__file__).read_text()})
        spec = os.memfd_create("spec")
        os.write(spec, json.dumps(confined._spec(command, str(root)) | {"other_user": False}).encode())
        os.lseek(spec, 0, os.SEEK_SET)
        report, theirs = os.pipe()
        nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        done = subprocess.run(
            [*nobody, "/usr/bin/python3", "-I", "-S", str(program), str(spec), str(theirs)],
            pass_fds=(spec, theirs), env={}, capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        os.close(spec)
        os.close(theirs)
        with os.fdopen(report, "rb") as reported:
            assert reported.read() == confined.inside.STARTED
    assert done.stdout.splitlines() == [*(f"no {name}" for name in escapes.ATTEMPTS), "end"], done
