"""What a block of Python may take as given, by name; each piece is a program in itself."""

PIECES = {
    "a model": """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
    "a loader": """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(64.0).reshape(16, 4), torch.arange(16.0).reshape(16, 1))
loader = DataLoader(data, batch_size=4)
""",
    "train": """
import torch
def train():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
""",
    "a profile": """
import torchrepro
torchrepro.apply("seed-only")
""",
    "a writer": """
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("tensorboard")
""",
}
