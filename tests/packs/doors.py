"""Asks for profiles by `show` and by `+repro=` of an app, in one guarded process.

A line of standard input is a request as JSON, and a line of standard output its answer. What a
request opens, starts or connects to is noted by an audit hook, which nothing can take back: https://docs.python.org/3/library/audit_events.html.
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

LONGEST = 120  # seconds after which a door is said to hang
LONG = 0.8  # seconds after which a door is asked again, to be sure that it takes them
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


DOORS = {"show": show, "hydra": hydra}


def _hangs(*_):
    raise TimeoutError(f"no answer within {LONGEST} s")


def ask(door, name):
    out, err = io.StringIO(), io.StringIO()
    environment = dict(os.environ)
    modules = set(sys.modules)
    noted.clear()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        signal.alarm(LONGEST)
        try:
            status = DOORS[door](name)
        except BaseException as error:  # noqa: BLE001 - whatever escapes is what the test is about
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


def least_time(door, name, seconds):
    """Return the least time of two answers: what else a machine does only adds to it."""
    return seconds if seconds <= LONG else min(seconds, ask(door, name)["seconds"])


def main():
    signal.signal(signal.SIGALRM, _hangs)
    sys.addaudithook(note)
    requests, answers = sys.stdin, sys.stdout
    for line in requests:
        request = json.loads(line)
        sys.path.insert(0, request["site"])
        importlib.invalidate_caches()
        os.chdir(request["folder"])
        answer = {door: ask(door, request["named"]) for door in DOORS}
        for door, its in answer.items():
            its["seconds"] = least_time(door, request["named"], its["seconds"])
        sys.path.remove(request["site"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
