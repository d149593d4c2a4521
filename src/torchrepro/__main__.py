"""`python -m torchrepro`: the command line, where its script is not on PATH."""

from torchrepro.cli import main

main()
