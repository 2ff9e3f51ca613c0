"""A server of every service of the protocol, as a program: `python -m support.closed_server`.

Credentials come from its environment; with the argument `outside` it asks nobody for a certificate, as reward
services do. Its methods do nothing: a call that gets in is answered UNIMPLEMENTED.
"""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from paceline.rpc import v1
from paceline.service.grpc.server import start_server
from paceline.service.identity.credentials import Credentials


def methods() -> Iterator[MethodDescriptor]:
    """Every method of the protocol, from the generated modules."""
    for module in _modules("_pb2"):
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def path(method: MethodDescriptor) -> str:
    """/package.Service/Method."""
    return f"/{method.containing_service.full_name}/{method.name}"


def _modules(ending: str) -> Iterator[ModuleType]:
    for module in pkgutil.iter_modules(v1.__path__):
        if module.name.endswith(ending):
            yield importlib.import_module(f"{v1.__name__}.{module.name}")


def _add_all(_: None, server: Any) -> None:
    for module in _modules("_pb2_grpc"):
        for name in vars(module):
            if name.startswith("add_"):
                servicer = name.removeprefix("add_").removesuffix("_to_server")
                getattr(module, name)(getattr(module, servicer)(), server)


async def _main() -> None:
    credentials = Credentials.from_env()
    if "outside" in sys.argv:
        credentials = credentials.for_outside_callers()
    server = await start_server(_add_all, None, credentials=credentials)
    print(server.port, flush=True)
    await asyncio.sleep(300)


if __name__ == "__main__":
    asyncio.run(_main())
