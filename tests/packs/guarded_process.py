"""Loads profiles by `show` and by `+repro=` of an app, in one process under an audit hook.

A line of standard input is a request as JSON, and a line of standard output its answer. The audit
hook notes what a request opens, starts or connects to, and cannot be removed:
https://docs.python.org/3/library/audit_events.html.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import signal
import sys
import time

LONGEST = 120  # seconds after which a command counts as hanging
LONG = 0.8  # seconds after which a command is repeated, in case the machine was busy
WATCHED = ("open", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen")
noted = []


def note(event, arguments):
    if event in WATCHED or event.startswith("socket."):
        noted.append((event, str(arguments[0]) if arguments else ""))


def show(name):
    from torchrepro.cli import main

    try:
        main(["show", name])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def hydra(name):
    from hydra import main
    from hydra.core.global_hydra import GlobalHydra

    @main(version_base=None, config_path=None)
    def app(config):
        print("RAN")

    sys.argv = ["app.py", f"+repro='{name}'" if "'" not in name else f"+repro={name}"]
    try:
        app()
    except SystemExit as left:
        return int(left.code or 0)
    finally:
        GlobalHydra.instance().clear()
    return 0


COMMANDS = {"show": show, "hydra": hydra}


def _hangs(*_):
    raise TimeoutError(f"no answer within {LONGEST} s")


def ask(command, name):
    out, err = io.StringIO(), io.StringIO()
    environment = dict(os.environ)
    modules = set(sys.modules)
    noted.clear()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        signal.alarm(LONGEST)
        try:
            status = COMMANDS[command](name)
        except BaseException as error:  # noqa: BLE001 - the test is about these
            status = f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
    return {
        "status": status,
        "out": out.getvalue(),
        "err": err.getvalue(),
        "seconds": time.process_time() - began,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory,
        "environment": dict(os.environ) == environment,
        "imported": sorted(set(sys.modules) - modules),
        "opened": sorted({path for event, path in noted if event == "open"}),
        "acts": sorted({event for event, _ in noted if event != "open"}),
    }


def least_time(command, name, seconds):
    """Return the least time of two runs: other load on the machine only adds time."""
    return seconds if seconds <= LONG else min(seconds, ask(command, name)["seconds"])


def main():
    signal.signal(signal.SIGALRM, _hangs)
    sys.addaudithook(note)
    requests, output = sys.stdin, sys.stdout
    for line in requests:
        request = json.loads(line)
        sys.path.insert(0, request["site"])
        importlib.invalidate_caches()
        os.chdir(request["folder"])
        answers = {command: ask(command, request["named"]) for command in COMMANDS}
        for command, answer in answers.items():
            answer["seconds"] = least_time(command, request["named"], answer["seconds"])
        sys.path.remove(request["site"])
        output.write(json.dumps(answers) + "\n")
        output.flush()


if __name__ == "__main__":
    main()
