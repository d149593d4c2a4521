"""The loop on Fabric that puts its loader into the state."""

from functools import partial

import fabric_program

STEPS = fabric_program.STEPS
train = partial(fabric_program.train, keeps_loader=True)
