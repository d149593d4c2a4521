import torch
from graph import citations
from network import Convolution


def main() -> None:
    torch.manual_seed(8)
    papers = citations()
    number = {paper: index for index, paper in enumerate(papers)}
    edges = [(number[paper], number[cited]) for paper in papers for cited in paper.cites]
    sources, targets = torch.tensor(edges).T
    years = torch.tensor([float(paper.year - 2000) / 30 for paper in papers])
    model = Convolution(len(papers), 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(5):
        loss = (model(sources, targets) - years).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
