"""A callback for the Hugging Face Trainer: ``callbacks=[torchrepro.hf.Callback()]``.

While a profile is active, every Trainer has this callback by default. The first use of `Callback`
imports transformers.
"""

TYPE_CHECKING = False  # type checkers know the name; importing typing would cost 5 ms

if TYPE_CHECKING:
    from torchrepro.frameworks.huggingface import RunState as Callback

__all__ = ["Callback"]


def __getattr__(name: str) -> object:
    if name != "Callback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchrepro.frameworks.huggingface import EXPLICIT, callback_class

    return callback_class(EXPLICIT)
