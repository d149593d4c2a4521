"""Train a small CNN on scikit-learn's handwritten digits, under whatever profile is asked for.

    python examples/digits.py                            # other numbers in every run
    python examples/digits.py +repro=debug-strict        # the same weights, bit for bit
    python examples/digits.py +repro=debug-strict repro.seed=8
    python examples/digits.py +repro=debug-strict repro.streams.split=3   # another split alone
    python examples/digits.py +repro=debug-strict checkpoint=kept         # resumes

It prints the accuracy on held-out digits and a fingerprint of the trained weights. `+repro=` alone
makes it repeatable, workers and augmentation included; the split draws from a stream of its own,
and the checkpoint lets an interrupted run end with the weights of an uninterrupted one.
"""

import hashlib
import sys

import hydra
import torch
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import torchrepro


class Digits(Dataset):
    """Images of 8 x 8 pixels in 0..1 with their labels; training images are shifted and noisy."""

    def __init__(self, images, labels, *, augment):
        self.images = torch.tensor(images / 16.0, dtype=torch.float32).unsqueeze(1)
        self.labels = torch.tensor(labels)
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            down, right = torch.randint(-1, 2, (2,)).tolist()
            image = torch.roll(image, (down, right), dims=(1, 2))
            image = image + 0.05 * torch.randn_like(image)
        return image, self.labels[index]


def network(dropout: float) -> nn.Module:
    """Return two convolutions with batch norm and dropout, then one linear layer to 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def fingerprint(weights: dict[str, torch.Tensor]) -> str:
    """Return a hash of every byte of the weights and buffers."""
    digest = hashlib.sha256()
    for tensor in weights.values():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Return the share of images in `loader` that the model names correctly."""
    model.eval()
    with torch.no_grad():
        hits = [
            (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
            for images, labels in loader
        ]
    return sum(hits) / len(loader.dataset)


def seed_of(name: str, config: DictConfig) -> int:
    """Return the seed of the profile's stream `name`, on every rank the same; else the app's."""
    return torchrepro.stream(name, rank=0).seed if "repro" in config else config.seed


def split_digits(config: DictConfig) -> tuple[Digits, Digits]:
    """Return the digits to train on, and those held out."""
    images, labels = load_digits(return_X_y=True)
    kept, held_out, kept_labels, held_out_labels = train_test_split(
        images.reshape(-1, 8, 8), labels, test_size=0.25, random_state=seed_of("split", config)
    )
    return (
        Digits(kept, kept_labels, augment=True),
        Digits(held_out, held_out_labels, augment=False),
    )


@hydra.main(version_base=None, config_path="conf", config_name="digits")
def main(config: DictConfig) -> None:
    """Train, then print accuracy and fingerprint."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, held_out = split_digits(config)
    train = DataLoader(
        training, batch_size=config.batch_size, shuffle=True, num_workers=config.num_workers
    )

    model = network(config.dropout).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    checkpoint = torchrepro.Checkpoint(config.checkpoint, model=model, optimizer=optimizer)
    total = config.epochs * len(train)
    with tqdm(total=total, initial=checkpoint.step, unit="step", file=sys.stderr) as steps:
        for epoch in checkpoint.epochs(config.epochs):
            model.train()
            for batch, targets in checkpoint.batches(train):
                loss = nn.functional.cross_entropy(model(batch.to(device)), targets.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                checkpoint.save(every=config.checkpoint_every)
                steps.set_postfix(epoch=epoch, loss=f"{loss.item():.4f}", refresh=False)
                steps.update()

    test = DataLoader(held_out, batch_size=256)
    print(f"accuracy {accuracy(model, test, device):.4f}")
    print(f"weights {fingerprint(model.state_dict())}")


if __name__ == "__main__":
    main()
