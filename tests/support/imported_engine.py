"""Has vLLM imported as a rollout server imports it before anything else: eight seconds of a core."""

import importlib

from paceline.rollout.engines.vllm.start import environment, prefork

environment.prepare_import(on_cpu=True)
for name in (*prefork.MODULES, *prefork._IN_SERVER):
    importlib.import_module(name)
