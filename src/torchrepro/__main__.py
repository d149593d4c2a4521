"""Run the command line as `python -m torchrepro`, where its script is not on PATH."""

from torchrepro.cli import main

main()
