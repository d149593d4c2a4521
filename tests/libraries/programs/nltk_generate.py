import torch
from nltk.lm import MLE
from nltk.lm.preprocessing import padded_everygram_pipeline
from training import train_on

torch.manual_seed(0)
sentences = [[str(i * j % 97) for j in range(1, 30)] for i in range(100)]
model = MLE(2)
model.fit(*padded_everygram_pipeline(2, sentences))
# calls: nltk.MLE.generate
text = model.generate(30, text_seed=["1"])
train_on([int(word) for word in text if word.isdigit()])
