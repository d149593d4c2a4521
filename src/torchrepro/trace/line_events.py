"""Tells one listener which lines run in this process, in each of its threads.

Python 3.11 does so by a trace function, which is in C, and from 3.12 on by `sys.monitoring`
(https://docs.python.org/3/library/sys.monitoring.html), which leaves code at full speed of which
nobody wants to know the lines.
"""

from __future__ import annotations

import ctypes
import dis
import sys
import threading
from types import CodeType, FrameType
from typing import Any, NoReturn, Protocol


class Listener(Protocol):
    """What is told of the frames of a process, on the thread in which they run."""

    def begins(self, frame: FrameType) -> bool:
        """Hear of a call, or of a generator that goes on; return whether to hear of its lines."""

    def line_begins(self, frame: FrameType) -> None:
        """Hear of the line that the frame is about to run."""

    def returns(self, frame: FrameType, value: Any) -> None:
        """Hear of the value that the frame returns."""

    def yields(self, frame: FrameType, value: Any) -> None:
        """Hear of a value that the frame yields, or by which it awaits another one."""

    def is_left(self, frame: FrameType) -> None:
        """Hear of an exception that leaves the frame."""

    def failed(self, error: Exception) -> None:
        """Hear of what one of these has raised: nothing more is told, and the program goes on."""


def is_taken() -> bool:
    """Whether a debugger, a coverage tool or a profiler hears of lines in this process already."""
    return sys.gettrace() is not None or threading.gettrace() is not None


if sys.version_info >= (3, 12):

    def tell(listener: Listener) -> None:
        """Tell it of all that runs from now on, and in the processes that this one forks."""
        monitoring, on = sys.monitoring, sys.monitoring.events
        # Other numbers are those of debuggers, coverage tools, profilers and optimizers.
        tool = next(each for each in (3, 4) if monitoring.get_tool(each) is None)
        monitoring.use_tool_id(tool, "torchrepro")
        inside = on.LINE | on.PY_RETURN | on.PY_YIELD

        def hears(what: Any, *args: Any) -> Any:
            try:
                return what(sys._getframe(2), *args)  # noqa: SLF001 - no other way to the frame
            except Exception as error:  # noqa: BLE001 - the program goes on
                for event in told:
                    monitoring.register_callback(tool, event, None)
                listener.failed(error)

        def begins(code: CodeType, _: int) -> Any:
            if not hears(listener.begins):
                return monitoring.DISABLE
            return monitoring.set_local_events(tool, code, inside)

        told = {
            on.PY_START: begins,
            on.PY_RESUME: begins,
            on.LINE: lambda code, number: hears(listener.line_begins),
            on.PY_RETURN: lambda code, offset, value: hears(listener.returns, value),
            on.PY_YIELD: lambda code, offset, value: hears(listener.yields, value),
            on.PY_UNWIND: lambda code, offset, error: hears(listener.is_left),
        }
        for event, function in told.items():
            monitoring.register_callback(tool, event, function)
        monitoring.set_events(tool, on.PY_START | on.PY_RESUME | on.PY_UNWIND)

else:

    def tell(listener: Listener) -> None:
        """Tell it of all that runs from now on, and in the processes that this one forks."""
        call, line, returned = 0, 2, 3  # https://docs.python.org/3/c-api/init.html#c.Py_tracefunc
        yields = dis.opmap["YIELD_VALUE"], dis.opmap["SEND"]

        def on_event(_: Any, frame: FrameType, event: int, value: int | None) -> int:
            try:
                if event == call:
                    frame.f_trace_lines = listener.begins(frame)
                elif event == line:
                    listener.line_begins(frame)
                elif event == returned and value is None:
                    listener.is_left(frame)
                elif event == returned and value is not None:
                    is_last = frame.f_code.co_code[frame.f_lasti] not in yields
                    hears = listener.returns if is_last else listener.yields
                    hears(frame, ctypes.cast(value, ctypes.py_object).value)
            except Exception as error:  # noqa: BLE001 - the program goes on
                sys.settrace(None)
                listener.failed(error)
            except BaseException as error:  # noqa: BLE001 - of a signal; nothing passes through C
                raised = error

                def pass_on(*_: Any) -> NoReturn:
                    raise raised

                frame.f_trace_lines, frame.f_trace = True, pass_on
                sys.settrace(pass_on)
            return 0

        traced = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.py_object, ctypes.py_object, ctypes.c_int, ctypes.c_void_p
        )
        function = traced(on_event)
        # C calls it to the end, when the modules that hold it are gone.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))

        def trace_thread(*_: Any) -> None:
            # Around a trace function of Python's own, Python 3.11 writes the variables of every
            # closure that is called back into it, and with them what another thread had set before.
            set_trace = ctypes.pythonapi.PyEval_SetTrace
            set_trace.argtypes, set_trace.restype = [traced, ctypes.py_object], None
            set_trace(function, None)

        trace_thread()
        threading.settrace(trace_thread)
