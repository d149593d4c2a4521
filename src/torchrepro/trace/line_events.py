"""Reports each line that Python runs to a listener, in every thread of the process.

Python 3.11 uses a C trace function. Later versions use `sys.monitoring`
(https://docs.python.org/3/library/sys.monitoring.html), which does not slow down code whose lines
the listener does not request.
"""

from __future__ import annotations

import atexit
import ctypes
import dis
import sys
import threading
from types import CodeType, FrameType
from typing import Any, NoReturn, Protocol


class Listener(Protocol):
    """Receives events of frames. Each method is called on the thread that runs the frame."""

    def begins(self, frame: FrameType) -> bool:
        """Receive a frame that starts or resumes. Return whether to report the frame's lines."""

    def line_begins(self, frame: FrameType) -> None:
        """Receive the line that the frame is about to run."""

    def returns(self, frame: FrameType, value: Any) -> None:
        """Receive the value that the frame returns."""

    def yields(self, frame: FrameType, value: Any) -> None:
        """Receive a value that the frame yields, or the awaitable that it waits for."""

    def is_left(self, frame: FrameType) -> None:
        """Receive a frame that ends with an exception."""

    def failed(self, error: Exception) -> None:
        """Receive an error that this listener raised. No events follow; the program continues."""


def _is_traced() -> bool:
    return sys.gettrace() is not None or threading.gettrace() is not None


if sys.version_info >= (3, 12):

    def report_lines(listener: Listener) -> bool:
        """Report lines to `listener` from now on, also in forked children. Return True.

        If a debugger, a coverage tool or a profiler already traces the process, report no lines and
        return False.
        """
        monitoring, on = sys.monitoring, sys.monitoring.events
        # The remaining numbers are reserved for debuggers, coverage, profilers and optimizers.
        tool = next((number for number in (3, 4) if monitoring.get_tool(number) is None), None)
        if tool is None or _is_traced():
            return False
        monitoring.use_tool_id(tool, "torchrepro")
        inside = on.LINE | on.PY_RETURN | on.PY_YIELD

        def call(method: Any, *args: Any) -> Any:
            try:
                return method(sys._getframe(2), *args)  # noqa: SLF001 - no other way to the frame
            except Exception as error:  # noqa: BLE001 - the program continues
                stop()
                listener.failed(error)

        def stop() -> None:
            for event in callbacks:
                monitoring.register_callback(tool, event, None)

        def begins(code: CodeType, _: int) -> Any:
            if not call(listener.begins):
                return monitoring.DISABLE
            return monitoring.set_local_events(tool, code, inside)

        callbacks = {
            on.PY_START: begins,
            on.PY_RESUME: begins,
            on.LINE: lambda code, number: call(listener.line_begins),
            on.PY_RETURN: lambda code, offset, value: call(listener.returns, value),
            on.PY_YIELD: lambda code, offset, value: call(listener.yields, value),
            on.PY_UNWIND: lambda code, offset, error: call(listener.is_left),
        }
        for event, function in callbacks.items():
            monitoring.register_callback(tool, event, function)
        monitoring.set_events(tool, on.PY_START | on.PY_RESUME | on.PY_UNWIND)
        atexit.register(stop)  # before Python clears the modules that the listener uses
        return True

else:

    def report_lines(listener: Listener) -> bool:
        """Report lines to `listener` from now on, also in forked children. Return True.

        If a debugger, a coverage tool or a profiler already traces the process, report no lines and
        return False. Sets `sys.unraisablehook`, which receives exceptions of signal handlers.
        """
        if _is_traced():
            return False
        called, line, returned = 0, 2, 3  # https://docs.python.org/3/c-api/init.html#c.Py_tracefunc
        yields = dis.opmap["YIELD_VALUE"], dis.opmap["SEND"]

        def on_event(_: Any, frame: FrameType, event: int, value: int | None) -> int:
            try:
                if event == called:
                    frame.f_trace_lines = listener.begins(frame)
                elif not frame.f_trace_lines:
                    pass  # most events: the listener did not request lines of this frame
                elif event == line:
                    listener.line_begins(frame)
                elif event == returned and value is None:
                    listener.is_left(frame)
                elif event == returned and value is not None:
                    is_last = frame.f_code.co_code[frame.f_lasti] not in yields
                    method = listener.returns if is_last else listener.yields
                    method(frame, ctypes.cast(value, ctypes.py_object).value)
            except Exception as error:  # noqa: BLE001 - the program continues
                sys.settrace(None)
                listener.failed(error)
            except BaseException as error:  # noqa: BLE001 - from a signal; C code cannot raise it
                raise_in(frame, error)
            return 0

        def raise_in(frame: FrameType, error: BaseException) -> None:
            def pass_on(*_: Any) -> NoReturn:
                raise error

            frame.f_trace_lines, frame.f_trace = True, pass_on
            sys.settrace(pass_on)

        previous_hook = sys.unraisablehook

        def hook(unraisable: Any) -> None:
            # If a signal arrives just as `on_event` is called, its error is raised before `try`.
            if unraisable.object is on_event:
                raise_in(sys._getframe(1), unraisable.exc_value)  # noqa: SLF001 - documented
            else:
                previous_hook(unraisable)

        sys.unraisablehook = hook

        traced = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.py_object, ctypes.py_object, ctypes.c_int, ctypes.c_void_p
        )
        function = traced(on_event)
        # C calls the function until the process ends, after Python has cleared our modules.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))

        def trace_thread(*_: Any) -> None:
            # Not `sys.settrace`: after each call of a Python trace function, Python 3.11 writes the
            # closure variables of the frame back, and so may undo a write of another thread.
            set_trace = ctypes.pythonapi.PyEval_SetTrace
            set_trace.argtypes, set_trace.restype = [traced, ctypes.py_object], None
            set_trace(function, None)

        trace_thread()
        threading.settrace(trace_thread)
        atexit.register(sys.settrace, None)  # before Python clears the listener's modules
        return True
