"""On several ranks a program's own seed reaches a named loader only where all have the same."""

import json

PROGRAM = """
import json, os, sys, torch, torchrepro
import torch.distributed as dist
from pathlib import Path
from torch.utils.data import DataLoader

rank, answers = int(os.environ["RANK"]), []
for number, (first, then) in enumerate(json.loads(sys.argv[1])):
    with torchrepro.apply("seed-only") as applied:
        if first is not None:
            torch.manual_seed(first)
        place = f"file://{os.getcwd()}/group-{number}"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
        if then is not None:
            torch.manual_seed(then[rank])
        named = torchrepro.dataloader_kwargs("train")
        loader = DataLoader(range(40), batch_size=40, shuffle=True, **named)
        answers.append([next(iter(loader)).tolist(), list(applied.report.loading)])
        dist.barrier()
        dist.destroy_process_group()
Path(f"rank-{rank}").write_text(json.dumps(answers))
"""
NEVER, ONE, TWO = [None, None], [1, None], [2, None]
THEN_BY_RANK, AFTER, BY_RANK = [1, [1, 2]], [None, [1, 1]], [None, [1, 2]]


def test_only_a_seed_that_all_ranks_gave_before_they_met_enters_the_order(on_two_ranks, tmp_path):
    """Such a seed changes the order on all ranks alike; any other is left out, which is said."""
    cases = [NEVER, ONE, TWO, THEN_BY_RANK, AFTER, BY_RANK]
    ended = on_two_ranks(PROGRAM, json.dumps(cases))
    assert ended.returncode == 0, ended.stderr
    ranks = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in (0, 1)]
    orders = [[order for order, _ in answers] for answers in ranks]
    never, one, two, then_by_rank, after, by_rank = orders[0]

    assert orders[0] == orders[1]
    assert never == after == by_rank != one == then_by_rank != two != never
    said = [
        ["do not depend on the program's own seed" in str(notes) for _, notes in answers]
        for answers in ranks
    ]
    assert said == [[False] * 4 + [True] * 2, [False] * 3 + [True] * 3]
