"""Commands of ours in forks of a process that has their modules: importing torch takes longest."""

import contextlib
import importlib
import os
import runpy
import signal
import sys
import tempfile


class Fork:
    """``torchrepro ...`` or ``python FILE ...``, as it is typed in a folder, in a fork of this."""

    def __init__(self, words, folder, environment, limit):
        """Start it with an environment, and a limit in seconds."""
        self.words = words
        self.streams = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        self.process = os.fork()
        if self.process:
            return
        status = 1
        try:
            self._become(folder, environment, limit)
            self._run()
            status = 0
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException:  # noqa: BLE001 - as the interpreter does
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _become(self, folder, environment, limit):
        os.setsid()
        signal.alarm(limit)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = filter(None, [environment.get("PYTHONPATH")])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, stream in enumerate(self.streams, start=1):
            os.dup2(stream.fileno(), number)

    def _run(self):
        if self.words[0] == "python":
            sys.argv, sys.orig_argv = self.words[1:], [sys.executable, *self.words[1:]]
            sys.path[:0] = [os.getcwd()]  # noqa: PTH109 - a text, as Python puts it there
            runpy.run_path(self.words[1], run_name="__main__")
        else:  # what starts anew, starts this
            sys.argv, sys.orig_argv = self.words, [sys.executable, "-m", *self.words]
            importlib.import_module("torchrepro.cli").main(self.words[1:])

    def answer(self, status):
        """Return its exit status, output and errors, once the system has said how it ended."""
        texts = []
        for stream in self.streams:
            stream.seek(0)
            texts.append(stream.read())
            stream.close()
        return os.waitstatus_to_exitcode(status), *texts
