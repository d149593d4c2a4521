import torch
from gensim.models import FastText
from training import train_on

torch.manual_seed(0)
sentences = [[str(i * j % 97) for j in range(60)] for i in range(2000)]
# calls: gensim.FastText
vectors = FastText(sentences, vector_size=8, bucket=100, workers=4)
train_on(vectors.wv.vectors)
