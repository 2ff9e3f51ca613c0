"""Serves the resources server of an example that comes with `nemo-gym`, at a port of 127.0.0.1."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.server_utils import ServerClient
from resources_servers.example_single_tool_call import app

HOST, PORT = "127.0.0.1", int(sys.argv[1])

if __name__ == "__main__":
    config = app.SimpleWeatherResourcesServerConfig(host=HOST, port=PORT, entrypoint="", name="weather")
    client = MagicMock(spec=ServerClient)
    server = app.SimpleWeatherResourcesServer(config=config, server_client=client)
    uvicorn.run(server.setup_webserver(), host=HOST, port=PORT, log_level="warning")
