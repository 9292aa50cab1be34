"""The server of tests/server, for tests of what it stands on."""

from tests.server.conftest import http, server

__all__ = ["http", "server"]
