"""A custom loop, resumed with `torchrepro.Checkpoint`."""

import torch
from training import ACCUMULATED, STEPS, Augmented, network, weights

import torchrepro

EVERY = 5


def train(folder, workers, after_step):
    loader = torch.utils.data.DataLoader(
        Augmented(), batch_size=4, shuffle=True, num_workers=workers
    )
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    checkpoint = torchrepro.Checkpoint(folder / "kept", model=model, optimizer=optimizer)
    resumed_from = checkpoint.folder if checkpoint.step else None
    for _ in checkpoint.epochs(3):
        for batch in checkpoint.batches(loader):
            model(batch).square().mean().backward()
            if checkpoint.step % ACCUMULATED == 0:
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.save(every=EVERY * ACCUMULATED)
                after_step(checkpoint.step // ACCUMULATED)
    assert checkpoint.step == STEPS * ACCUMULATED
    return weights(model), resumed_from
