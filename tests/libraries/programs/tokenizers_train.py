import torch
from tokenizers import Tokenizer, models, trainers
from training import train_on

torch.manual_seed(0)
tokenizer = Tokenizer(models.BPE(unk_token="?"))
words = [chr(0x4E00 + i) + chr(0x4E01 + i) for i in range(600)]
trainer = trainers.BpeTrainer(vocab_size=900, limit_alphabet=100, show_progress=False)
# calls: tokenizers.Tokenizer.train_from_iterator
tokenizer.train_from_iterator(words, trainer)
train_on(sorted(ord(token[0]) * n for token, n in tokenizer.get_vocab().items()))
