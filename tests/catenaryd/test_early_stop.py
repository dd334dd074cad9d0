"""A server that is told to stop before it has begun."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize("server", ["gateway", "scheduler", "agent"])
def test_a_server_that_is_stopped_while_it_imports_ends_well(server: str) -> None:
    # The real module with an import that takes for ever in the place of the command line.
    code = (
        "import sys, time, types\n"
        f"sys.argv = ['catenaryd', '--supervised', {server!r}, '--insecure']\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'catenaryd.command_line':\n"
        "            print('importing', flush=True)\n"
        "            time.sleep(600)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "from catenaryd.__main__ import main\n"
        "main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_other_commands_that_are_stopped_say_so() -> None:
    code = (
        "import sys\nsys.argv = ['catenaryd', 'import-model']\n"
        "import time, types\n"
        "fake = types.ModuleType('catenaryd.command_line')\n"
        "fake.main = lambda: (print('runs', flush=True), time.sleep(600))\n"
        "sys.modules['catenaryd.command_line'] = fake\n"
        "from catenaryd.__main__ import main\nmain()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
