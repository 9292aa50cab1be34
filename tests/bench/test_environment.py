"""What a figure was measured on names no machine and no user."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path

from minisgl.bench.environment import environment
from tools.check_public_text import findings


def test_the_environment_names_no_machine_and_no_user() -> None:
    text = json.dumps(environment())
    for secret in (socket.gethostname(), str(Path.home()), getpass.getuser(), str(Path.cwd())):
        assert len(secret) < 4 or secret not in text, secret
    assert list(findings(text)) == []
