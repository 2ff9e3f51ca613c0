"""Large packages are imported while the collector rests."""

from __future__ import annotations

import gc
import sys
import types

import pytest

from paceline.service.imports import without_collections


def test_the_collector_rests_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append("freeze"))
    with pytest.raises(ImportError), without_collections():
        assert not gc.isenabled()
        with without_collections():
            pass
        assert not gc.isenabled()
        raise ImportError("no such package")
    assert gc.isenabled()
    assert not frozen
    with without_collections():
        monkeypatch.setitem(sys.modules, "a_new_package", types.ModuleType("a_new_package"))
    assert gc.isenabled()
    assert frozen == ["freeze"]
