import hydra
import torch
from nets.language_model import LanguageModel
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    corpus = torch.arange(200) * 7 % cfg.words
    model = LanguageModel(cfg.words, cfg.width, cfg.heads)
    optimizer = hydra.utils.instantiate(cfg.optimizer, params=model.parameters())
    for step in range(cfg.steps):
        windows = corpus.unfold(0, 9, 8)[step * 4 : step * 4 + 4]
        logits = model(windows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
