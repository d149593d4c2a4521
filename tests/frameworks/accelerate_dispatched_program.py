"""The loop on accelerate, with one process that loads the batches of all."""

from functools import partial

import accelerate_program

train = partial(accelerate_program.train, dispatch_batches=True)
